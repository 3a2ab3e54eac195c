// The only file here that knows Python.
//
// Tensors come as addresses and strides, (data, batch, head, row): a DLPack capsule costs several
// microseconds a tensor, more than all else in a small call. `headwise.backends.native` is the one
// caller; it has checked shapes, dtypes and devices, and holds the tensors while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "attention.h"
#include "cpu.h"
#include "dispatch.h"
#include "threads.h"

namespace nb = nanobind;
using namespace headwise;

namespace {

const Kernels* current = nullptr;

const Kernels& kernels() {
    if (!current) current = kernels_of(runnable().front());
    return *current;
}

std::int64_t integer(nb::handle tuple, int i) {
    return nb::cast<std::int64_t>(nb::handle(PyTuple_GetItem(tuple.ptr(), i)));
}
void* pointer(nb::handle tuple, int i) {
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(integer(tuple, i)));
}

template <class T>
T* at(nb::handle tuple, int i) {
    return static_cast<T*>(pointer(tuple, i));
}

Tensor tensor(nb::handle t) { return {pointer(t, 0), integer(t, 1), integer(t, 2), integer(t, 3)}; }

Mask mask_of(nb::handle runs, nb::handle bits) {
    Mask mask;
    if (!runs.is_none()) {
        mask.runs = at<const std::int32_t>(runs, 0);
        mask.runs_batch = integer(runs, 1);
        mask.runs_head = integer(runs, 2);
        mask.runs_row = integer(runs, 3);
        mask.count = static_cast<int>(integer(runs, 4));
    }
    if (!bits.is_none()) {
        mask.bits = at<const std::uint8_t>(bits, 0);
        mask.bits_batch = integer(bits, 1);
        mask.bits_head = integer(bits, 2);
        mask.bits_row = integer(bits, 3);
    }
    return mask;
}

// sizes: (batch, heads, kv_heads, queries, keys, dim, value_dim). runs: (data, batch, head, row,
// count), bits: (data, batch, head, row), bias: (data, batch, head, row, key); each may be None.
// numbers: (scale, softcap, dropout).
Call call_of(int dtype, nb::tuple sizes, nb::tuple query, nb::tuple key, nb::tuple value,
             nb::object runs, nb::object bits, nb::object bias, std::intptr_t sinks,
             nb::tuple numbers, std::uint64_t seed, int threads) {
    Call call;
    call.batch = integer(sizes, 0);
    call.heads = integer(sizes, 1);
    call.kv_heads = integer(sizes, 2);
    call.queries = integer(sizes, 3);
    call.keys = integer(sizes, 4);
    call.dim = integer(sizes, 5);
    call.value_dim = integer(sizes, 6);
    call.dtype = static_cast<Dtype>(dtype);
    call.query = tensor(query);
    call.key = tensor(key);
    call.value = tensor(value);
    call.mask = mask_of(runs, bits);
    if (!bias.is_none())
        call.bias = {pointer(bias, 0), integer(bias, 1), integer(bias, 2), integer(bias, 3),
                     integer(bias, 4)};
    call.sinks = reinterpret_cast<const void*>(sinks);
    call.scale = nb::cast<double>(numbers[0]);
    call.softcap = nb::cast<double>(numbers[1]);
    call.dropout = nb::cast<double>(numbers[2]);
    call.seed = seed;
    call.threads = threads;
    return call;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "headwise's kernels for the CPU.";
    m.def(
        "supported",
        [] {
            std::vector<std::string> names;
            for (Isa isa : supported()) names.emplace_back(name(isa));
            return names;
        },
        "The instruction sets that this CPU and its operating system support, best first.");
    m.def("runnable", &runnable, "Those of them that kernels were compiled for, best first.");
    m.def(
        "use",
        [](const std::string& isa) {
            const Kernels* found = kernels_of(isa);
            if (found) current = found;
            return found != nullptr;
        },
        "Let later calls run on this instruction set; False where it can't.");
    m.def("isa", [] { return std::string(kernels().isa); }, "What the kernels that run say they are.");
    m.def("threads", [] { return std::string(threads_name()); }, "Where threads come from.");
    m.def("forward", [](int dtype, nb::tuple sizes, nb::tuple query, nb::tuple key, nb::tuple value,
                        nb::object runs, nb::object bits, nb::object bias, std::intptr_t sinks,
                        nb::tuple numbers, std::uint64_t seed, int threads, nb::tuple output,
                        std::intptr_t lse) {
        Forward job;
        job.call = call_of(dtype, sizes, query, key, value, runs, bits, bias, sinks, numbers, seed,
                           threads);
        job.output = {pointer(output, 0), integer(output, 1), integer(output, 2), integer(output, 3)};
        job.lse = reinterpret_cast<void*>(lse);
        const Kernels& k = kernels();
        nb::gil_scoped_release unlocked;
        (job.call.queries == 1 && k.decode ? k.decode : k.forward)(job);
    }, nb::arg("dtype"), nb::arg("sizes"), nb::arg("query"), nb::arg("key"), nb::arg("value"),
       nb::arg("runs").none(), nb::arg("bits").none(), nb::arg("bias").none(), nb::arg("sinks"),
       nb::arg("numbers"), nb::arg("seed"), nb::arg("threads"), nb::arg("output"), nb::arg("lse"));
    m.def("backward", [](int dtype, nb::tuple sizes, nb::tuple query, nb::tuple key, nb::tuple value,
                         nb::object runs, nb::object bits, nb::object bias, std::intptr_t sinks,
                         nb::tuple numbers, std::uint64_t seed, int threads, nb::tuple output,
                         nb::tuple grad_output, nb::tuple lses, nb::tuple grads,
                         nb::object grad_bias) {
        Backward job;
        job.call = call_of(dtype, sizes, query, key, value, runs, bits, bias, sinks, numbers, seed,
                           threads);
        job.output = tensor(output);
        job.grad_output = tensor(grad_output);
        job.lse = pointer(lses, 0);
        job.grad_lse = pointer(lses, 1);
        job.grad_query = pointer(grads, 0);
        job.grad_key = pointer(grads, 1);
        job.grad_value = pointer(grads, 2);
        job.grad_sinks = pointer(grads, 3);
        if (!grad_bias.is_none()) {
            job.grad_bias = pointer(grad_bias, 0);
            job.grad_bias_at = {nullptr, integer(grad_bias, 1), integer(grad_bias, 2),
                                integer(grad_bias, 3), integer(grad_bias, 4)};
        }
        const Kernels& k = kernels();
        nb::gil_scoped_release unlocked;
        return k.backward(job);
    }, nb::arg("dtype"), nb::arg("sizes"), nb::arg("query"), nb::arg("key"), nb::arg("value"),
       nb::arg("runs").none(), nb::arg("bits").none(), nb::arg("bias").none(), nb::arg("sinks"),
       nb::arg("numbers"), nb::arg("seed"), nb::arg("threads"), nb::arg("output"),
       nb::arg("grad_output"), nb::arg("lses"), nb::arg("grads"), nb::arg("grad_bias").none());
    // The rest of `Statistics`, in its order: rows (active, its stride), declared (runs, bits) or
    // None, positions, first tokens, matches or None, the map's blocks, addresses of the results.
    m.def("statistics", [](int dtype, nb::tuple sizes, nb::tuple query, nb::tuple key, nb::object runs,
                           nb::object bits, nb::object bias, std::intptr_t sinks, nb::tuple numbers,
                           int threads, nb::tuple rows, nb::object declared, nb::tuple positions,
                           nb::tuple firsts, nb::object matches, nb::tuple map, nb::tuple by_row,
                           nb::tuple totals) {
        Statistics job;
        job.call = call_of(dtype, sizes, query, key, key, runs, bits, bias, sinks, numbers, 0, threads);
        job.active = at<const std::uint8_t>(rows, 0);
        job.active_head = integer(rows, 1);
        job.has_declared = !declared.is_none();
        if (job.has_declared) job.declared = mask_of(declared[0], declared[1]);
        job.even = integer(positions, 0) != 0;
        job.at = integer(positions, 1);
        job.distance_low = integer(positions, 2);
        job.distances_count = integer(positions, 3);
        job.query_at = at<const std::int64_t>(positions, 4);
        job.key_at = at<const std::int64_t>(positions, 5);
        job.first_keys = at<const std::int64_t>(firsts, 0);
        job.first_count = integer(firsts, 1);
        job.places = at<const std::int64_t>(firsts, 2);
        job.places_count = integer(firsts, 3);
        if (!matches.is_none()) {
            job.order = at<const std::int64_t>(matches, 0);
            job.match_first = at<const std::int64_t>(matches, 1);
            job.match_count = at<const std::int64_t>(matches, 2);
        }
        job.block_q = integer(map, 0);
        job.block_k = integer(map, 1);
        job.cell_rows = integer(map, 2);
        job.cell_columns = integer(map, 3);
        job.top = integer(map, 4);
        job.pairs = integer(map, 5) != 0;
        double** row[] = {&job.lse, &job.mass, &job.entropy, &job.largest, &job.sink, &job.spread};
        for (int i = 0; i < 6; ++i) *row[i] = at<double>(by_row, i);
        job.top_keys = at<std::int64_t>(by_row, 6);
        job.top_weights = pointer(by_row, 7);
        double** total[] = {&job.distances, &job.received,  &job.cells,     &job.gram,  &job.overlap,
                            &job.sink_sums, &job.duplicate, &job.induction, &job.hidden};
        for (int i = 0; i < 9; ++i) *total[i] = at<double>(totals, i);
        const Kernels& k = kernels();
        nb::gil_scoped_release unlocked;
        k.statistics(job);
    }, nb::arg("dtype"), nb::arg("sizes"), nb::arg("query"), nb::arg("key"), nb::arg("runs").none(),
       nb::arg("bits").none(), nb::arg("bias").none(), nb::arg("sinks"), nb::arg("numbers"),
       nb::arg("threads"), nb::arg("rows"), nb::arg("declared").none(), nb::arg("positions"),
       nb::arg("firsts"), nb::arg("matches").none(), nb::arg("map"), nb::arg("by_row"),
       nb::arg("totals"));
    // Keys and values as int8: (key, tail, value, key scales, value scales), each (data, batch,
    // head, row); `sealed` keys are int8, the rest in the tail.
    m.def("decode_int8", [](int dtype, nb::tuple sizes, nb::tuple query, nb::tuple stored,
                            std::int64_t sealed, nb::object runs, nb::object bits, nb::object bias,
                            std::intptr_t sinks, nb::tuple numbers, int threads, nb::tuple output,
                            std::intptr_t lse) {
        Quantized job;
        job.forward.call = call_of(dtype, sizes, query, query, query, runs, bits, bias, sinks, numbers,
                                   0, threads);
        job.forward.output = {pointer(output, 0), integer(output, 1), integer(output, 2),
                              integer(output, 3)};
        job.forward.lse = reinterpret_cast<void*>(lse);
        job.key = tensor(stored[0]);
        job.tail = tensor(stored[1]);
        job.value = tensor(stored[2]);
        job.key_scale = tensor(stored[3]);
        job.value_scale = tensor(stored[4]);
        job.sealed = sealed;
        const Kernels& k = kernels();
        nb::gil_scoped_release unlocked;
        k.decode_int8(job);
    }, nb::arg("dtype"), nb::arg("sizes"), nb::arg("query"), nb::arg("stored"), nb::arg("sealed"),
       nb::arg("runs").none(), nb::arg("bits").none(), nb::arg("bias").none(), nb::arg("sinks"),
       nb::arg("numbers"), nb::arg("threads"), nb::arg("output"), nb::arg("lse"));
    m.def("draws", [](std::int64_t batch, std::int64_t heads, std::int64_t queries, double dropout,
                      std::uint64_t seed, std::int64_t first_row, std::int64_t rows,
                      std::int64_t first_key, std::int64_t keys, std::intptr_t out) {
        Call call;
        call.batch = batch;
        call.heads = heads;
        call.queries = queries;
        call.dropout = dropout;
        call.seed = seed;
        kernels().draws(call, first_row, rows, first_key, keys, reinterpret_cast<float*>(out));
    });
}

// The plain-vector kernels against plain loops in double, as a program without Python: for machines
// where the package's own tests cannot run (make native-arm: 64-bit Arm, emulated).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "attention.h"

namespace headwise::portable {
extern const Kernels kernels;
}

using namespace headwise;

namespace {

struct Shape {
    std::int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
};

std::uint64_t state = 1;
double noise() {  // even in −1 … 1, multiples of 1/64: exact in every dtype
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(static_cast<std::int64_t>(state >> 33) % 64) / 32.0 - 1.0;
}

std::vector<double> numbers(std::int64_t n) {
    std::vector<double> x(static_cast<std::size_t>(n));
    for (double& one : x) one = noise();
    return x;
}

std::int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

void put(void* to, std::int64_t at, double x, Dtype dtype) {
    if (dtype == Dtype::f64) {
        static_cast<double*>(to)[at] = x;
    } else if (dtype == Dtype::f32) {
        static_cast<float*>(to)[at] = static_cast<float>(x);
    } else if (dtype == Dtype::bf16) {
        const float f = static_cast<float>(x);
        std::uint32_t u;
        std::memcpy(&u, &f, 4);
        static_cast<std::uint16_t*>(to)[at] = static_cast<std::uint16_t>(u >> 16);
    } else {  // exact here: a few bits, never subnormal
        const float f = static_cast<float>(x);
        std::uint32_t u;
        std::memcpy(&u, &f, 4);
        const std::uint32_t half = x == 0 ? 0 : ((u >> 13) & 0x3FFFFu) - 0x1C000u;
        static_cast<std::uint16_t*>(to)[at] =
            static_cast<std::uint16_t>(((u >> 16) & 0x8000u) | (half & 0x7FFFu));
    }
}

double get(const void* from, std::int64_t at, Dtype dtype) {
    if (dtype == Dtype::f64) return static_cast<const double*>(from)[at];
    if (dtype == Dtype::f32) return static_cast<const float*>(from)[at];
    const std::uint16_t h = static_cast<const std::uint16_t*>(from)[at];
    if (dtype == Dtype::bf16) {
        const std::uint32_t u = static_cast<std::uint32_t>(h) << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    }
    const int exponent = (h >> 10) & 31, fraction = h & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25)
                                 : std::ldexp(fraction, -24);
    return h & 0x8000 ? -size : size;
}

struct Stored {
    std::vector<std::uint8_t> bytes;
    Tensor tensor;
    Stored(const std::vector<double>& x, std::int64_t heads, std::int64_t rows, std::int64_t dim,
           Dtype dtype)
        : bytes(x.size() * static_cast<std::size_t>(size_of(dtype))) {
        for (std::size_t i = 0; i < x.size(); ++i)
            put(bytes.data(), static_cast<std::int64_t>(i), x[i], dtype);
        tensor = {bytes.data(), heads * rows * dim, rows * dim, dim};
    }
};

int failures = 0;
double worst = 0;

void close(double got, double want, double limit, const char* what, const Shape& s) {
    const double off = std::fabs(got - want);
    if (off / limit > worst) worst = off / limit;
    if (off <= limit) return;  // NaN fails too
    if (++failures < 20)
        std::printf("%s: got %g, wanted %g; %ld queries, %ld keys, dim %ld\n", what, got, want,
                    static_cast<long>(s.queries), static_cast<long>(s.keys),
                    static_cast<long>(s.dim));
}

void check(const Shape& s, Dtype dtype, bool causal) {
    const std::int64_t q_size = s.batch * s.heads * s.queries;
    const std::int64_t k_size = s.batch * s.kv_heads * s.keys;
    const auto q = numbers(q_size * s.dim), k = numbers(k_size * s.dim);
    const auto v = numbers(k_size * s.value_dim), g = numbers(q_size * s.value_dim);
    const Stored query(q, s.heads, s.queries, s.dim, dtype);
    const Stored key(k, s.kv_heads, s.keys, s.dim, dtype);
    const Stored value(v, s.kv_heads, s.keys, s.value_dim, dtype);
    const Stored grad(g, s.heads, s.queries, s.value_dim, dtype);

    std::vector<std::int32_t> runs;
    for (std::int64_t i = 0; i < s.queries; ++i) {
        runs.push_back(0);
        const std::int64_t end = i + s.keys - s.queries + 1;
        runs.push_back(static_cast<std::int32_t>(end < 0 ? 0 : end));
    }
    Call call;
    call.batch = s.batch, call.heads = s.heads, call.kv_heads = s.kv_heads;
    call.queries = s.queries, call.keys = s.keys, call.dim = s.dim, call.value_dim = s.value_dim;
    call.dtype = dtype;
    call.query = query.tensor, call.key = key.tensor, call.value = value.tensor;
    call.scale = 1.0 / std::sqrt(static_cast<double>(s.dim));
    if (causal) call.mask.runs = runs.data(), call.mask.runs_row = 2, call.mask.count = 1;

    // The definition, and its gradients.
    std::vector<double> out(g.size(), 0.0), lse(static_cast<std::size_t>(q_size), -INFINITY);
    std::vector<double> dq(q.size(), 0.0), dk(k.size(), 0.0), dv(v.size(), 0.0);
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t h = 0; h < s.heads; ++h)
            for (std::int64_t i = 0; i < s.queries; ++i) {
                const std::int64_t row = (b * s.heads + h) * s.queries + i;
                const std::int64_t kv = (b * s.kv_heads + h / (s.heads / s.kv_heads)) * s.keys;
                const std::int64_t n = causal ? runs[static_cast<std::size_t>(2 * i + 1)] : s.keys;
                std::vector<double> p(static_cast<std::size_t>(n));
                double total = 0, delta = 0;
                for (std::int64_t j = 0; j < n; ++j) {
                    double dot = 0;
                    for (std::int64_t d = 0; d < s.dim; ++d)
                        dot += q[row * s.dim + d] * k[(kv + j) * s.dim + d];
                    total += p[j] = std::exp(dot * call.scale);
                }
                if (n > 0) lse[row] = std::log(total);
                for (std::int64_t j = 0; j < n; ++j) {
                    p[j] /= total;
                    for (std::int64_t d = 0; d < s.value_dim; ++d)
                        out[row * s.value_dim + d] += p[j] * v[(kv + j) * s.value_dim + d];
                }
                for (std::int64_t d = 0; d < s.value_dim; ++d)
                    delta += g[row * s.value_dim + d] * out[row * s.value_dim + d];
                for (std::int64_t j = 0; j < n; ++j) {
                    double pull = 0;
                    for (std::int64_t d = 0; d < s.value_dim; ++d) {
                        pull += g[row * s.value_dim + d] * v[(kv + j) * s.value_dim + d];
                        dv[(kv + j) * s.value_dim + d] += p[j] * g[row * s.value_dim + d];
                    }
                    const double ds = p[j] * (pull - delta) * call.scale;
                    for (std::int64_t d = 0; d < s.dim; ++d) {
                        dq[row * s.dim + d] += ds * k[(kv + j) * s.dim + d];
                        dk[(kv + j) * s.dim + d] += ds * q[row * s.dim + d];
                    }
                }
            }

    const double arithmetic = dtype == Dtype::f64 ? 1e-13 : 3e-6;
    const double rounding = dtype == Dtype::bf16 ? 4e-3 : dtype == Dtype::f16 ? 5e-4 : arithmetic;
    const std::int64_t wide = dtype == Dtype::f64 ? 8 : 4;
    const Dtype wide_dtype = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    std::vector<std::uint8_t> got(out.size() * static_cast<std::size_t>(size_of(dtype)));
    std::vector<std::uint8_t> got_lse(lse.size() * static_cast<std::size_t>(wide));
    Forward job;
    job.call = call;
    job.output = {got.data(), s.heads * s.queries * s.value_dim, s.queries * s.value_dim, s.value_dim};
    job.lse = got_lse.data();
    const Kernels& run = portable::kernels;
    for (int twice = 0; twice < (s.queries == 1 ? 2 : 1); ++twice) {
        (twice ? run.decode : run.forward)(job);
        for (std::size_t i = 0; i < out.size(); ++i)
            close(get(got.data(), static_cast<std::int64_t>(i), dtype), out[i], rounding,
                  twice ? "decode" : "forward", s);
        for (std::size_t i = 0; i < lse.size(); ++i)
            if (lse[i] > -INFINITY)
                close(get(got_lse.data(), static_cast<std::int64_t>(i), wide_dtype), lse[i],
                      arithmetic, "lse", s);
    }
    std::vector<std::uint8_t> got_q(q.size() * wide), got_k(k.size() * wide), got_v(v.size() * wide);
    Backward back;
    back.call = call;
    back.output = {got.data(), job.output.batch, job.output.head, job.output.row};
    back.grad_output = grad.tensor;
    back.lse = got_lse.data();
    back.grad_query = got_q.data(), back.grad_key = got_k.data(), back.grad_value = got_v.data();
    if (!run.backward(back)) ++failures, std::printf("backward: refused finite numbers\n");
    const double limit = 30 * (dtype == Dtype::f64 ? 1e-13 : rounding);
    for (std::size_t i = 0; i < q.size(); ++i)
        close(get(got_q.data(), static_cast<std::int64_t>(i), wide_dtype), dq[i], limit, "dQ", s);
    for (std::size_t i = 0; i < k.size(); ++i)
        close(get(got_k.data(), static_cast<std::int64_t>(i), wide_dtype), dk[i], limit, "dK", s);
    for (std::size_t i = 0; i < v.size(); ++i)
        close(get(got_v.data(), static_cast<std::int64_t>(i), wide_dtype), dv[i], limit, "dV", s);
}

}  // namespace

int main() {
    const Shape shapes[] = {{1, 1, 1, 1, 1, 1, 1},      {2, 3, 1, 5, 7, 11, 13},
                            {1, 2, 2, 73, 131, 17, 37}, {2, 4, 2, 1, 531, 32, 48},
                            {1, 2, 1, 97, 97, 64, 64},  {9, 1, 1, 7, 3, 8, 4}};
    int done = 0;
    for (const Shape& shape : shapes)
        for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f64})
            for (bool causal : {false, true}) check(shape, dtype, causal), ++done;
    std::printf("%s: %d cases, %d wrong numbers, worst error %.2f of what is allowed\n",
                portable::kernels.isa, done, failures, worst);
    return failures ? 1 : 0;
}

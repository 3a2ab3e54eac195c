// What a kernel is told: pointers, sizes, strides, row intervals. Knows neither Python nor torch.
#pragma once

#include <cstdint>

namespace headwise {

// How numbers are stored. Arithmetic is float, and double for f64.
enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3 };

// A (batch, heads, length, dim) tensor whose last axis is contiguous. Strides count elements, and
// may be 0 where an axis only repeats.
struct Tensor {
    const void* data = nullptr;
    std::int64_t batch = 0, head = 0, row = 0;
};

// The same, to be written.
struct Output {
    void* data = nullptr;
    std::int64_t batch = 0, head = 0, row = 0;
};

// Added to the scores; any stride may be 0.
struct Bias {
    const void* data = nullptr;
    std::int64_t batch = 0, head = 0, row = 0, key = 0;
};

// Which keys a row may see: those inside one of `count` (1 or 2) disjoint runs [start, end), in
// order, whose bit is set. No runs: every key lies in. No bits: every bit is set.
struct Mask {
    const std::int32_t* runs = nullptr;  // strides count int32; the runs of a row lie together
    std::int64_t runs_batch = 0, runs_head = 0, runs_row = 0;
    int count = 0;
    const std::uint8_t* bits = nullptr;  // key j is bit j % 8 of byte j / 8; strides count bytes
    std::int64_t bits_batch = 0, bits_head = 0, bits_row = 0;
};

// One attention computation. Query head h reads key and value head h / (heads / kv_heads).
struct Call {
    std::int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0;
    std::int64_t dim = 0, value_dim = 0;
    Dtype dtype = Dtype::f32;
    Tensor query, key, value;
    Mask mask;
    Bias bias;
    const void* sinks = nullptr;  // (heads,), contiguous, in the call's dtype
    double scale = 1.0;
    double softcap = 0.0;  // 0: none
    double dropout = 0.0;  // probability; 0: none
    std::uint64_t seed = 0;
    int threads = 1;

    std::int64_t groups() const { return heads / kv_heads; }
};

struct Forward {
    Call call;
    Output output;        // (batch, heads, queries, value_dim) in the call's dtype
    void* lse = nullptr;  // (batch, heads, queries) contiguous, float or double; may be null
};

// Keys that share their scales in an int8 cache.
constexpr std::int64_t INT8_BLOCK = 64;

// The same where keys and values are stored as int8 (call.queries == 1; call.key and call.value are
// not read). Keys [0, sealed) lie in blocks of INT8_BLOCK, four features of a key side by side, then
// the block's keys: `key` is (batch, kv_heads, blocks, ⌈dim / 4⌉ · INT8_BLOCK · 4), zeros after dim,
// and feature d of a key is times key_scale [block][d]. The keys after them lie in `tail`, in the
// call's dtype, from its first row on. Values are all in `value`, a feature of four keys side by side:
// (batch, kv_heads, keys / 4, value_dim · 4), that of key j times value_scale [j]. A value scale of NaN
// says that the token's key or value was not finite.
struct Quantized {
    Forward forward;
    Tensor key, tail, value;
    Tensor key_scale;         // float (batch, kv_heads, blocks, dim)
    Tensor value_scale;       // float (batch, kv_heads, keys), `row` unused
    std::int64_t sealed = 0;  // a multiple of INT8_BLOCK
};

// Gradients, contiguous, in the arithmetic type: (batch, heads or kv_heads, length, dim).
struct Backward {
    Call call;
    Tensor output, grad_output;       // in the call's dtype
    const void* lse = nullptr;        // (batch, heads, queries), float or double
    const void* grad_lse = nullptr;   // the same, or null
    void* grad_query = nullptr;
    void* grad_key = nullptr;
    void* grad_value = nullptr;
    void* grad_sinks = nullptr;       // (heads,), or null
    void* grad_bias = nullptr;        // zeroed, addressed by `grad_bias_at`; or null
    Bias grad_bias_at;                // strides of grad_bias; 0 sums over that axis
};

// Every sum that head statistics need, from one batch element (call.batch == 1, values unused, f32 or
// f64). All outputs are contiguous and zeroed (row quantities: as the caller likes; rows that do not
// count are left alone).
struct Statistics {
    Call call;
    const std::uint8_t* active = nullptr;  // (heads or 1, queries): the rows that count
    std::int64_t active_head = 0;
    bool has_declared = false;  // weight on pairs outside this mask is counted
    Mask declared;
    // Positions: query i is `at` + i − j after key j where they are even, else as the two say.
    bool even = true;
    std::int64_t at = 0, distance_low = 0, distances_count = 0;
    const std::int64_t *query_at = nullptr, *key_at = nullptr;
    // (key, place) of first tokens; a row counts for a place from the place's position on.
    const std::int64_t *first_keys = nullptr, *places = nullptr;
    std::int64_t first_count = 0, places_count = 0;
    // Row i's earlier keys with its token: match_count[i] of `order`, from match_first[i] on; or null.
    const std::int64_t *order = nullptr, *match_first = nullptr, *match_count = nullptr;
    std::int64_t block_q = 1, block_k = 1, cell_rows = 0, cell_columns = 0, top = 0;
    bool pairs = true;
    // (heads, queries); the strongest keys (heads, queries, top), weights in the call's dtype.
    double *lse = nullptr, *mass = nullptr, *entropy = nullptr, *largest = nullptr, *sink = nullptr,
           *spread = nullptr;
    std::int64_t* top_keys = nullptr;
    void* top_weights = nullptr;
    // (heads, …): distances_count, keys, cells, heads (1 without pairs), places_count, 1, 1, 1.
    double *distances = nullptr, *received = nullptr, *cells = nullptr, *gram = nullptr,
           *overlap = nullptr, *sink_sums = nullptr, *duplicate = nullptr, *induction = nullptr,
           *hidden = nullptr;
};

// The kernels of one instruction set. They throw std::bad_alloc and nothing else.
struct Kernels {
    const char* isa;
    void (*forward)(const Forward&);
    void (*decode)(const Forward&);    // queries == 1
    // False, and nothing written, where an input is not finite.
    bool (*backward)(const Backward&);
    void (*draws)(const Call&, std::int64_t first_row, std::int64_t rows, std::int64_t first_key,
                  std::int64_t keys, float* out);
    void (*statistics)(const Statistics&);
    void (*decode_int8)(const Quantized&);  // f32, bf16, f16
};

}  // namespace headwise

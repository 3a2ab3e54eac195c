// Which keys the rows of a call may see, and what is drawn for them.

// The keys of one row: two runs [start, end), in order and within 0 … keys; and bits, or null.
struct RowMask {
    std::int64_t start[2], end[2];
    const std::uint8_t* bits;

    std::int64_t first() const { return start[0] < end[0] ? start[0] : start[1]; }
    std::int64_t last() const { return start[1] < end[1] ? end[1] : end[0]; }
    bool empty() const { return start[0] >= end[0] && start[1] >= end[1]; }
    bool all(std::int64_t low, std::int64_t high) const {
        return !bits && ((start[0] <= low && high <= end[0]) || (start[1] <= low && high <= end[1]));
    }
    bool none(std::int64_t low, std::int64_t high) const {
        return (end[0] <= low || start[0] >= high || start[0] >= end[0]) &&
               (end[1] <= low || start[1] >= high || start[1] >= end[1]);
    }
    bool sees(std::int64_t key) const {
        const bool in = (key >= start[0] && key < end[0]) || (key >= start[1] && key < end[1]);
        return in && (!bits || ((bits[key >> 3] >> (key & 7)) & 1));
    }
};

inline RowMask row_mask(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i) {
    const Mask& mask = call.mask;
    RowMask row{{0, 0}, {call.keys, 0}, nullptr};
    if (mask.runs) {
        const std::int32_t* runs =
            mask.runs + b * mask.runs_batch + h * mask.runs_head + i * mask.runs_row;
        for (int n = 0; n < 2; ++n) {
            row.start[n] = n < mask.count ? most<std::int64_t>(runs[2 * n], 0) : 0;
            row.end[n] = n < mask.count ? least<std::int64_t>(runs[2 * n + 1], call.keys) : 0;
        }
    }
    if (mask.bits)
        row.bits = mask.bits + b * mask.bits_batch + h * mask.bits_head + i * mask.bits_row;
    return row;
}

struct Span {
    std::int64_t low, high;
};

// The smallest span of keys that holds all that some rows see; low == high when they see none.
inline void widen_span(Span& span, const RowMask& row) {
    if (row.empty()) return;
    if (span.low >= span.high) {
        span = {row.first(), row.last()};
    } else {
        span.low = least(span.low, row.first());
        span.high = most(span.high, row.last());
    }
}

// All that the query heads of one key/value head see. `low` is where tiles begin to be counted: so
// a row's arithmetic does not depend on padding before it, nor on which rows share its call.
inline Span group_span(const Call& call, std::int64_t b, std::int64_t kv) {
    if (!call.mask.runs) return {0, call.keys};
    Span span{0, 0};
    const std::int64_t heads = call.mask.runs_head ? call.groups() : 1;
    const std::int64_t rows = call.mask.runs_row ? call.queries : 1;
    for (std::int64_t g = 0; g < heads; ++g)
        for (std::int64_t i = 0; i < rows; ++i)
            widen_span(span, row_mask(call, b, kv * call.groups() + g, i));
    return span;
}

// Dropout is a function of (seed, batch, head, query, key) alone: the backward pass, and any way to
// share out the work, draw the same.
struct Draw {
    std::uint32_t low, high, threshold;
};

inline std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline Draw draw_of(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::uint64_t row = static_cast<std::uint64_t>((b * call.heads + h) * call.queries + i);
    const std::uint64_t x = mix(mix(call.seed + 0x9E3779B97F4A7C15ull) ^ (row * 0xD6E8FEB86659FD93ull));
    const double threshold = call.dropout * 4294967296.0;
    return {static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32),
            static_cast<std::uint32_t>(least(threshold, 4294967295.0))};
}

// Whether the weight of this key is kept. Two rounds of multiply and shift, with half of the row's
// own 64 bits before each.
inline bool keeps(const Draw& draw, std::int64_t key) {
    std::uint32_t x = static_cast<std::uint32_t>(key) * 0x9E3779B9u + draw.low;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x ^= draw.high;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x >= draw.threshold;
}

// Multiplies n weights, keys from `key` on, by 0 or 1/(1 − p).
template <class A>
inline void drop(A* weights, std::int64_t n, const Draw& draw, std::int64_t key, A kept) {
    for (std::int64_t j = 0; j < n; ++j) {
        const A factor = keeps(draw, key + j) ? kept : A(0);
        weights[j] *= factor;
    }
}

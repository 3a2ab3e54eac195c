// One query a head over keys and values kept as int8: half the bytes of bf16 to read, and nothing is
// turned back into memory first.
//
// A key's scales belong to a block of keys and to each of its features, so they go onto the query, once
// a block: Σ q·(k·s) = Σ (q·s)·k. A value has one scale, which goes onto its softmax weight. Sums are
// float. (Keys by channel, values by token: Liu 2024, "KIVI", arXiv 2402.02750; there 2 bits.)

// Scores of a block's first n keys, G queries, into rows STEP_KEYS apart; of whole vectors, so up to a
// block is written. Keys lie side by side, so nothing is summed across a vector; each key's sum is its
// own chain. Meanwhile the next block is fetched, and the values that these keys weigh: a line of 64
// bytes a feature.
template <int G>
HW_INLINE void score_block(const float* query, std::int64_t q_row, const Int8* block, std::int64_t dim,
                           std::int64_t n, const Int8* values, float* scores) {
    constexpr int w = W<float>, all = static_cast<int>(INT8_BLOCK) / w;
    constexpr int wanted = G == 1 ? 8 : G == 2 || REGISTERS == 32 ? 4 : 2, across = wanted < all ? wanted : all;
    constexpr std::int64_t step = across * w;
    bool fetched = false;
    for (std::int64_t c = 0; c < n; c += step) {
        VecOf<float> sum[G][across];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
            for (int i = 0; i < across; ++i) sum[g][i] = VecOf<float>{};
        const auto feature = [&](std::int64_t d) __attribute__((always_inline)) {
            VecOf<float> k[across];
#pragma GCC unroll 8
            for (int i = 0; i < across; ++i) k[i] = load_byte(block + d * INT8_BLOCK + c + i * w);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const VecOf<float> x = fill(query[g * q_row + d]);
#pragma GCC unroll 8
                for (int i = 0; i < across; ++i) sum[g][i] = fma(x, k[i], sum[g][i]);
            }
        };
        if (!fetched) {
            for (std::int64_t d = 0; d < dim; ++d) {
                __builtin_prefetch(block + (dim + d) * INT8_BLOCK);
                __builtin_prefetch(values + d * 64);
                feature(d);
            }
            fetched = true;
        } else {
            for (std::int64_t d = 0; d < dim; ++d) feature(d);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
            for (int i = 0; i < across; ++i) store(scores + g * STEP_KEYS + c + i * w, sum[g][i]);
    }
}

template <class T>
struct Int8Steps {
    using A = Arithmetic<T>;
    const Quantized& held;
    const Call& call;

    float value_scale(std::int64_t b, std::int64_t kv, std::int64_t j) const {
        return row_of<float>(held.value_scale, b, kv, 0)[j];
    }

    static constexpr std::int64_t ALIGNED = INT8_BLOCK;

    // A query with a block's scales, or as digits (no wider than itself); or 64 columns of a sum and
    // the digits of a step's weights.
    std::int64_t scratch_numbers(int heads) const {
        return heads * most(round_up(call.dim, W<A>), INT8_BLOCK + STEP_KEYS);
    }

#if defined(HEADWISE_QUADS)
    // A block's scores. False: not done, float must do it. Meanwhile the values that these keys weigh
    // are fetched.
    template <int G>
    HW_INLINE bool score_quads(const float* scale, const A* query, std::int64_t q_row, const Int8* block,
                               const Int8* values, A* spare, A* scores) const {
        Digits turned[G];
        const std::int64_t row = round_up(call.dim, W<A>);
        std::uint8_t* bytes = reinterpret_cast<std::uint8_t*>(spare);
        for (int g = 0; g < G; ++g) {
            turned[g] = {bytes + g * DIGITS<T> * row, row, 0};
            if (!write_digits<DIGITS<T>, true>(query + g * q_row, scale, call.dim, turned[g])) return false;
        }
        multiply_bytes<G, DIGITS<T>, true>(
            turned, block, INT8_BLOCK, call.dim, scores, STEP_KEYS, [&](std::int64_t d) {
                for (std::int64_t i = d; i < d + 4; ++i) __builtin_prefetch(values + i * INT8_BLOCK, 0, 2);
            });
        return true;
    }

    // How many columns of values are done; float does the others. Meanwhile the keys of the next step
    // are fetched.
    template <int G>
    HW_INLINE std::int64_t weigh_quads(const A* weights, const float* scale, const Int8* values,
                                       std::int64_t n, const Int8* next, const A* shrink, A* spare,
                                       A* out, std::int64_t out_row) const {
        Digits weight[G];
        if (call.value_dim < INT8_BLOCK) return 0;
        std::uint8_t* bytes = reinterpret_cast<std::uint8_t*>(spare + G * INT8_BLOCK);
        for (int g = 0; g < G; ++g) {
            weight[g] = {bytes + g * DIGITS<T> * STEP_KEYS, STEP_KEYS, 0};
            if (!write_digits<DIGITS<T>, false>(weights + g * STEP_KEYS, scale, n, weight[g])) return 0;
        }
        std::int64_t d = 0;
        for (; d + INT8_BLOCK <= call.value_dim; d += INT8_BLOCK) {
            const Int8* ahead = next + d * STEP_KEYS;
            multiply_bytes<G, DIGITS<T>, false>(
                weight, values + d, held.value.row, n, spare, INT8_BLOCK, [&](std::int64_t j) {
                    for (std::int64_t i = j; i < j + 4; ++i) __builtin_prefetch(ahead + i * INT8_BLOCK, 0, 2);
                });
            for (int g = 0; g < G; ++g)
                for (std::int64_t c = 0; c < INT8_BLOCK; c += W<A>) {
                    A* to = out + g * out_row + d + c;
                    store(to, fma(load(to), fill(shrink[g]), load(spare + g * INT8_BLOCK + c)));
                }
        }
        return d;
    }
#endif

    template <int G>
    HW_INLINE void score(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, const A* query,
                         std::int64_t q_row, A* folded, A* scores) const {
        const std::int64_t high = j + n, stored = least(high, held.sealed);
        std::int64_t at = j;
        while (at < stored) {
            const std::int64_t block = at / INT8_BLOCK, some = least(stored - at, INT8_BLOCK);
            const float* scale = row_of<float>(held.key_scale, b, kv, block);
            const Int8* keys = row_of<Int8>(held.key, b, kv, block);
            const Int8* values = row_of<Int8>(held.value, b, kv, at);
            A* to = scores + (at - j);
#if defined(HEADWISE_QUADS)
            if (score_quads<G>(scale, query, q_row, keys, values, folded, to)) {
                at += some;
                continue;
            }
#endif
            for (std::int64_t d = 0; d < call.dim; d += W<A>) {
                const VecOf<A> s = load_some(scale + d, call.dim - d);
                for (int g = 0; g < G; ++g)
                    store(folded + g * q_row + d, load(query + g * q_row + d) * s);
            }
            score_block<G>(folded, q_row, keys, call.dim, some, values, to);
            at += some;
        }
        if (at < high)
            dot_keys<G, T>(query, q_row, folded, row_of<T>(held.tail, b, kv, at - held.sealed),
                           held.tail.row, high - at, call.dim, static_cast<const T*>(nullptr), 0, 0,
                           scores + (at - j));
    }

    template <int G>
    HW_INLINE void weigh(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, A* weights,
                         const A* shrink, A* spare, A* out, std::int64_t out_row) const {
        const float* scale = row_of<float>(held.value_scale, b, kv, 0) + j;
        const Int8* values = row_of<Int8>(held.value, b, kv, j);
        std::int64_t done = 0;
#if defined(HEADWISE_QUADS)
        const Int8* next = row_of<Int8>(held.key, b, kv, (j + n) / INT8_BLOCK);
        done = weigh_quads<G>(weights, scale, values, n, next, shrink, spare, out, out_row);
        if (done == call.value_dim) return;
#else
        (void)spare;
#endif
        for (std::int64_t i = 0; i < n; i += W<A>) {
            const VecOf<A> s = load_some(scale + i, n - i);
            for (int g = 0; g < G; ++g)
                store(weights + g * STEP_KEYS + i, load(weights + g * STEP_KEYS + i) * s);
        }
        add_values<G, Int8>(weights, values + done, held.value.row, n, call.value_dim - done, shrink,
                            out + done, out_row, static_cast<const Int8*>(nullptr), 0);
    }

    // For rows that meet a number that is not finite: in double, as the definition has it.
    double dot(std::int64_t b, std::int64_t kv, std::int64_t j, const T* q) const {
        if (value_scale(b, kv, j) != value_scale(b, kv, j)) return NAN;
        double sum = 0;
        if (j >= held.sealed) {
            const T* k = row_of<T>(held.tail, b, kv, j - held.sealed);
            for (std::int64_t d = 0; d < call.dim; ++d)
                sum += static_cast<double>(widen(q[d])) * static_cast<double>(widen(k[d]));
            return sum;
        }
        const Int8* k = row_of<Int8>(held.key, b, kv, j / INT8_BLOCK) + j % INT8_BLOCK;
        const float* scale = row_of<float>(held.key_scale, b, kv, j / INT8_BLOCK);
        for (std::int64_t d = 0; d < call.dim; ++d)
            sum += static_cast<double>(widen(q[d])) *
                   (static_cast<double>(scale[d]) * k[d * INT8_BLOCK].bits);
        return sum;
    }
    void add(std::int64_t b, std::int64_t kv, std::int64_t j, double p, double* out) const {
        const Int8* v = row_of<Int8>(held.value, b, kv, j);
        const double scale = value_scale(b, kv, j);
        for (std::int64_t d = 0; d < call.value_dim; ++d) out[d] += p * (scale * v[d].bits);
    }
};

template <class T>
void decode_stored(const Quantized& held) {
    DecodePass<T, Int8Steps<T>>(held.forward, Int8Steps<T>{held, held.forward.call}).run();
}

void decode_int8(const Quantized& held) {
    switch (held.forward.call.dtype) {
        case Dtype::f32: decode_stored<float>(held); break;
        case Dtype::bf16: decode_stored<Bf16>(held); break;
        case Dtype::f16: decode_stored<F16>(held); break;
        case Dtype::f64: break;  // refused by the caller
    }
}

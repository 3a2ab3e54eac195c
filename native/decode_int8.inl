// One query a head over keys and values kept as int8: half the bytes of bf16 to read, and nothing is
// turned back into memory first.
//
// A key's scales belong to a block of keys and to each of its features, so they go onto the query, once
// a block: Σ q·(k·s) = Σ (q·s)·k. A value has one scale, which goes onto its softmax weight. Sums are
// float. (Keys by channel, values by token: Liu 2024, "KIVI", arXiv 2402.02750; there 2 bits.)

constexpr std::int64_t QUAD = 4;  // numbers that lie side by side

// Byte t of every lane, as float.
template <int t>
HW_INLINE VecOf<float> byte_of(IntOf<float> four) {
    return __builtin_convertvector((four << (24 - 8 * t)) >> 24, VecOf<float>);
}
template <class F>
HW_INLINE void each_byte(const F& f) {
    f(std::integral_constant<int, 0>{});
    f(std::integral_constant<int, 1>{});
    f(std::integral_constant<int, 2>{});
    f(std::integral_constant<int, 3>{});
}

// Scores of a block's first n keys, G queries, into rows STEP_KEYS apart; of whole vectors, so up to a
// block is written. Keys lie side by side, so nothing is summed across a vector; each key's sum is its
// own chain. Meanwhile the next block is fetched, and the values that these keys weigh.
template <int G>
HW_INLINE void score_block(const float* query, std::int64_t q_row, const Int8* block, std::int64_t quads,
                           std::int64_t n, const Int8* values, float* scores) {
    constexpr int w = W<float>, all = static_cast<int>(INT8_BLOCK) / w;
    constexpr int wanted = G == 1 ? 8 : G == 2 || REGISTERS == 32 ? 4 : 2, across = wanted < all ? wanted : all;
    for (std::int64_t c = 0; c < n; c += across * w) {
        VecOf<float> sum[G][across];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
            for (int i = 0; i < across; ++i) sum[g][i] = VecOf<float>{};
        for (std::int64_t q = 0; q < quads; ++q) {
            if (c == 0) {
                fetch(block + (quads + q) * QUAD * INT8_BLOCK, 4 * 64);
                fetch(values + q * QUAD * INT8_BLOCK, 4 * 64);
            }
            const Int8* four = block + (q * INT8_BLOCK + c) * QUAD;
            each_byte([&](auto t) __attribute__((always_inline)) {
                VecOf<float> x[G];
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g) x[g] = fill(query[g * q_row + QUAD * q + t.value]);
#pragma GCC unroll 8
                for (int i = 0; i < across; ++i) {
                    IntOf<float> k;
                    __builtin_memcpy(&k, four + i * BYTES, BYTES);
                    const VecOf<float> one = byte_of<t.value>(k);
#pragma GCC unroll 4
                    for (int g = 0; g < G; ++g) sum[g][i] = fma(x[g], one, sum[g][i]);
                }
            });
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
            for (int i = 0; i < across; ++i) store(scores + g * STEP_KEYS + c + i * w, sum[g][i]);
    }
}

// out (G, NV vectors) = out · shrink + weights (G, 4 · quads) · values. `some`: bytes of the last
// vector's that are there.
template <int G, int NV>
HW_INLINE void add_quads(const float* weights, const Int8* value, std::int64_t row, std::int64_t quads,
                         const float* shrink, float* out, std::int64_t out_row,
                         std::int64_t some = BYTES) {
    constexpr int w = W<float>;
    VecOf<float> total[G][NV];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) total[g][c] = VecOf<float>{};
    for (std::int64_t q = 0; q < quads; ++q) {
        IntOf<float> four[NV] = {};
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c)
            __builtin_memcpy(&four[c], value + q * row + c * BYTES,
                             NV == 1 && some < BYTES ? static_cast<std::size_t>(some) : BYTES);
        each_byte([&](auto t) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int c = 0; c < NV; ++c) {
                const VecOf<float> x = byte_of<t.value>(four[c]);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g)
                    total[g][c] = fma(fill(weights[g * STEP_KEYS + QUAD * q + t.value]), x, total[g][c]);
            }
        });
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) {
            float* to = out + g * out_row + c * w;
            store(to, fma(load(to), fill(shrink[g]), total[g][c]));
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

    // A query with a block's scales; or numbers and their digits, of a query or of a step's weights.
    std::int64_t scratch_numbers(int heads) const {
        return heads * most(round_up(call.dim, W<A>), MOST_DIM + MOST_DIM * 3 / 4);
    }

    // A row of `value` holds four keys.
    const Int8* values_of(std::int64_t b, std::int64_t kv, std::int64_t j) const {
        return row_of<Int8>(held.value, b, kv, j / QUAD);
    }
    std::int64_t quads() const { return (call.dim + QUAD - 1) / QUAD; }

#if defined(HEADWISE_QUADS)
    static constexpr std::int64_t FEW_DIM = 128, MOST_DIM = 512;
    // Vectors of sums that are kept in registers at once.
    static constexpr int across(int digits) { return digits * 4 + 5 <= REGISTERS ? 4 : 2; }

    // A block's scores. False: not done, float must do it. Meanwhile the values that these keys weigh
    // are fetched. ROW: room for the numbers of a query; little, so that all stays in the nearest cache.
    template <int G, std::int64_t ROW>
    HW_INLINE bool score_quads(const float* scale, const A* query, std::int64_t q_row, const Int8* block,
                               const Int8* values, A* spare, A* scores) const {
        constexpr int n = DIGITS<T>, vectors = across(G * n + 1), w = W<A>;
        static_assert(INT8_BLOCK % (vectors * w) == 0);
        std::uint8_t* digits = reinterpret_cast<std::uint8_t*>(spare + G * ROW);
        float unit[G];
        if (!write_digits<G, n, true, ROW>(query, q_row, scale, call.dim, spare, digits, unit))
            return false;
        for (std::int64_t c = 0; c < INT8_BLOCK; c += vectors * w)
            multiply_quads<G, n, true, ROW, vectors>(
                digits, unit, block + c * QUAD, INT8_BLOCK * QUAD, quads(),
                [&](std::int64_t q) __attribute__((always_inline)) {
                    fetch(values + c * call.dim + q * vectors * w * QUAD, vectors * w * QUAD);
                },
                [&](int g, int v, VecOf<A> sum) __attribute__((always_inline)) {
                    store(scores + g * STEP_KEYS + c + v * w, sum);
                });
        return true;
    }

    // How many columns of values are done; float does the others. Meanwhile the keys of the next step
    // are fetched.
    template <int G>
    HW_INLINE std::int64_t weigh_quads(const A* weights, const float* scale, const Int8* values,
                                       std::int64_t n, const Int8* next, const A* shrink, A* spare,
                                       A* out, std::int64_t out_row) const {
        constexpr int count = DIGITS<T>, w = W<A>;
        if (call.value_dim < w) return 0;
        std::uint8_t* digits = reinterpret_cast<std::uint8_t*>(spare + G * STEP_KEYS);
        float unit[G];
        if (!write_digits<G, count, false, STEP_KEYS>(weights, STEP_KEYS, scale, n, spare, digits, unit))
            return 0;
        std::int64_t d = 0;
        const auto columns = [&](auto some) __attribute__((always_inline)) {
            constexpr int vectors = some.value;
            for (; d + vectors * w <= call.value_dim; d += vectors * w) {
                const Int8* ahead = next + call.dim * 64 + d * 64;
                multiply_quads<G, count, false, STEP_KEYS, vectors>(
                    digits, unit, values + d * QUAD, held.value.row, (n + QUAD - 1) / QUAD,
                    [&](std::int64_t q) __attribute__((always_inline)) {
                        fetch(ahead + q * vectors * 32, vectors * 32);
                    },
                    [&](int g, int v, VecOf<A> sum) __attribute__((always_inline)) {
                        A* to = out + g * out_row + d + v * w;
                        store(to, fma(load(to), fill(shrink[g]), sum));
                    });
            }
        };
        columns(std::integral_constant<int, across(G * count)>{});
        columns(std::integral_constant<int, 1>{});
        return d;
    }
#else
    static constexpr std::int64_t MOST_DIM = 0;
#endif

    // Called after each head's softmax: a share of the next step's first keys is fetched.
    HW_INLINE void between(std::int64_t b, std::int64_t kv, std::int64_t j, int g, int heads) const {
        const Int8* next = row_of<Int8>(held.key, b, kv, (j + STEP_KEYS) / INT8_BLOCK);
        const std::int64_t from = call.dim * g / heads, to = call.dim * (g + 1) / heads;
        fetch(next + from * INT8_BLOCK, (to - from) * INT8_BLOCK);
    }

    template <int G>
    HW_INLINE void score(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, const A* query,
                         std::int64_t q_row, A* spare, A* scores) const {
        const std::int64_t high = j + n, stored = least(high, held.sealed);
        std::int64_t at = j;
        while (at < stored) {
            const std::int64_t block = at / INT8_BLOCK, some = least(stored - at, INT8_BLOCK);
            const float* scale = row_of<float>(held.key_scale, b, kv, block);
            const Int8* keys = row_of<Int8>(held.key, b, kv, block);
            const Int8* values = values_of(b, kv, at);
            A* to = scores + (at - j);
#if defined(HEADWISE_QUADS)
            const bool done =
                call.dim <= FEW_DIM
                    ? score_quads<G, FEW_DIM>(scale, query, q_row, keys, values, spare, to)
                    : call.dim <= MOST_DIM &&
                          score_quads<G, MOST_DIM>(scale, query, q_row, keys, values, spare, to);
            if (done) {
                at += some;
                continue;
            }
#endif
            for (std::int64_t d = 0; d < call.dim; d += W<A>) {
                const VecOf<A> s = load_some(scale + d, call.dim - d);
                for (int g = 0; g < G; ++g)
                    store(spare + g * q_row + d, load(query + g * q_row + d) * s);
            }
            score_block<G>(spare, q_row, keys, quads(), some, values, to);
            at += some;
        }
        if (at < high)
            dot_keys<G, T>(query, q_row, spare, row_of<T>(held.tail, b, kv, at - held.sealed),
                           held.tail.row, high - at, call.dim, static_cast<const T*>(nullptr), 0, 0,
                           scores + (at - j));
    }

    template <int G>
    HW_INLINE void weigh(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, A* weights,
                         const A* shrink, A* spare, A* out, std::int64_t out_row) const {
        constexpr int w = W<A>, vectors = G == 1 || REGISTERS == 32 ? 4 : 2;
        const float* scale = row_of<float>(held.value_scale, b, kv, 0) + j;
        const Int8* values = values_of(b, kv, j);
        std::int64_t d = 0;
#if defined(HEADWISE_QUADS)
        const Int8* next = row_of<Int8>(held.key, b, kv, (j + n) / INT8_BLOCK);
        d = weigh_quads<G>(weights, scale, values, n, next, shrink, spare, out, out_row);
        if (d == call.value_dim) return;
#else
        (void)spare;
#endif
        for (std::int64_t i = 0; i < n; i += w) {
            const VecOf<A> s = load_some(scale + i, n - i);
            for (int g = 0; g < G; ++g)
                store(weights + g * STEP_KEYS + i, load(weights + g * STEP_KEYS + i) * s);
        }
        const std::int64_t count = (n + QUAD - 1) / QUAD;
        for (; d + vectors * w <= call.value_dim; d += vectors * w)
            add_quads<G, vectors>(weights, values + d * QUAD, held.value.row, count, shrink, out + d, out_row);
        for (; d < call.value_dim; d += w)
            add_quads<G, 1>(weights, values + d * QUAD, held.value.row, count, shrink, out + d, out_row,
                            least<std::int64_t>(BYTES, (call.value_dim - d) * QUAD));
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
        const Int8* k = row_of<Int8>(held.key, b, kv, j / INT8_BLOCK) + j % INT8_BLOCK * QUAD;
        const float* scale = row_of<float>(held.key_scale, b, kv, j / INT8_BLOCK);
        for (std::int64_t d = 0; d < call.dim; ++d)
            sum += static_cast<double>(widen(q[d])) *
                   (static_cast<double>(scale[d]) *
                    k[d / QUAD * QUAD * INT8_BLOCK + d % QUAD].bits);
        return sum;
    }
    void add(std::int64_t b, std::int64_t kv, std::int64_t j, double p, double* out) const {
        const Int8* v = values_of(b, kv, j) + j % QUAD;
        const double scale = value_scale(b, kv, j);
        for (std::int64_t d = 0; d < call.value_dim; ++d) out[d] += p * (scale * v[d * QUAD].bits);
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

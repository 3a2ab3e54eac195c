// One query a head over a long cache: bound by how fast keys and values can be read, so each is read
// once, in place, for all query heads that share it.
//
// Keys are cut into splits of a fixed size, counted from the first that the batch element may see, so
// that one head's cache can be shared out over threads; the partial sums are joined in order (Dao 2023,
// "Flash-Decoding"). Within a split, keys are met in steps that stay in the nearest cache.

constexpr std::int64_t SPLIT_KEYS = 512;
constexpr std::int64_t STEP_KEYS = 128;
// Pieces of work for each thread, so that one that is late leaves some to the others.
constexpr std::int64_t RUNS_A_THREAD = 4;
// Query heads that one pass over keys or values serves.
template <class A>
constexpr std::int64_t MOST_GROUP = W<A> < 4 ? W<A> : 4;

// W vectors → one vector of their sums, in a fixed order.
template <int STEP, class A>
HW_INLINE VecOf<A> sum_each(VecOf<A>* v) {
    if constexpr (STEP == 0) {
        return v[0];
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < STEP; ++i) {
            using All = std::make_integer_sequence<int, W<A>>;
            v[i] = swap_lanes<STEP, false, A>(v[i], v[i + STEP], All{}) +
                   swap_lanes<STEP, true, A>(v[i], v[i + STEP], All{});
        }
        return sum_each<STEP / 2, A>(v);
    }
}

// a₀ b₀ a₁ b₁ …: the lower (or upper) half of what two vectors make, one by one.
template <bool UPPER, class A, int... I>
HW_INLINE VecOf<A> zip(VecOf<A> a, VecOf<A> b, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    return __builtin_shufflevector(a, b, ((I & 1) * n + I / 2 + (UPPER ? n / 2 : 0))...);
}

// How a step reads its keys: `turn` lays a query out for it, `STRIDE` numbers at a time are
// multiplied from there. What is left of a row after whole strides is read plainly.
template <class T>
struct KeyRead {
    using A = Arithmetic<T>;
    static constexpr int STRIDE = W<A>;
    static HW_INLINE void turn(const A* q, A* to) { store(to, load(q)); }
    static HW_INLINE VecOf<A> multiply(const A* q, const T* k, VecOf<A> sum) {
        return fma(load_wide(k), load(q), sum);
    }
};
template <>
struct KeyRead<Bf16> {
    static constexpr int STRIDE = 2 * W<float>;
#if defined(HEADWISE_PAIRS)
    static HW_INLINE void turn(const float* q, float* to) {
        store(to, (VecOf<float>)narrow_pairs(load(q), load(q + W<float>)));
    }
    static HW_INLINE VecOf<float> multiply(const float* q, const Bf16* k, VecOf<float> sum) {
        return dot_pairs((IntOf<float>)load(q), (IntOf<float>)load(reinterpret_cast<const float*>(k)),
                         sum);
    }
#else
    static HW_INLINE void turn(const float* q, float* to) {
        constexpr int w = W<float>;
        for (int i = 0; i < w; ++i) {
            to[i] = q[2 * i];
            to[w + i] = q[2 * i + 1];
        }
    }
    static HW_INLINE VecOf<float> multiply(const float* q, const Bf16* k, VecOf<float> sum) {
        VecOf<float> even, odd;
        load_two(k, even, odd);
        return fma(odd, load(q + W<float>), fma(even, load(q), sum));
    }
#endif
};

// Dot products of G queries (padded to whole vectors, q_row apart) with n keys → scores, STEP_KEYS
// apart. KEYS · G products at a time, summed together. Meanwhile the n values that follow are fetched.
template <int G, class T, class A = Arithmetic<T>>
HW_INLINE void dot_keys(const A* q, std::int64_t q_row, A* turned, const T* key, std::int64_t row,
                        std::int64_t n, std::int64_t dim, const T* value, std::int64_t value_row,
                        std::int64_t value_dim, A* scores) {
    using Read = KeyRead<T>;
    constexpr int w = W<A>, keys = w / G, stride = Read::STRIDE;
    const std::int64_t whole = dim / stride * stride;
    for (int g = 0; g < G; ++g)
        for (std::int64_t d = 0; d < whole; d += stride)
            Read::turn(q + g * q_row + d, turned + g * q_row + d);
    for (std::int64_t j = 0; j < n; j += keys) {
        const std::int64_t some = least<std::int64_t>(keys, n - j);
        const T* from[keys];
#pragma GCC unroll 16
        for (int i = 0; i < keys; ++i) from[i] = key + (j + (i < some ? i : 0)) * row;
        for (std::int64_t i = 0; i < some; ++i) fetch(value + (j + i) * value_row, value_dim);
        VecOf<A> part[w];
#pragma GCC unroll 16
        for (int i = 0; i < w; ++i) part[i] = VecOf<A>{};
        for (std::int64_t d = 0; d < whole; d += stride) {
#pragma GCC unroll 16
            for (int i = 0; i < keys; ++i)
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g)
                    part[i * G + g] = Read::multiply(turned + g * q_row + d, from[i] + d, part[i * G + g]);
        }
        for (std::int64_t d = whole; d < dim; d += w) {
#pragma GCC unroll 16
            for (int i = 0; i < keys; ++i) {
                const VecOf<A> k = load_some(from[i] + d, dim - d);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g)
                    part[i * G + g] = fma(k, load(q + g * q_row + d), part[i * G + g]);
            }
        }
        A found[w];
        store(found, sum_each<w / 2, A>(part));
        for (std::int64_t i = 0; i < some; ++i)
            for (int g = 0; g < G; ++g) scores[g * STEP_KEYS + j + i] = found[i * G + g];
    }
}

// NV vectors of storage at once, and back in order: bfloat16 comes two to a lane.
template <class T, int NV, class A = Arithmetic<T>>
HW_INLINE void load_columns(const T* p, VecOf<A>* x) {
    if constexpr (std::is_same_v<T, Bf16> && NV % 2 == 0) {
#pragma GCC unroll 8
        for (int c = 0; c < NV; c += 2) load_two(p + c * W<A>, x[c], x[c + 1]);
    } else {
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) x[c] = load_wide(p + c * W<A>);
    }
}
template <class T, int NV, class A = Arithmetic<T>>
HW_INLINE void order_columns(VecOf<A>* x) {
    if constexpr (std::is_same_v<T, Bf16> && NV % 2 == 0) {
        using All = std::make_integer_sequence<int, W<A>>;
#pragma GCC unroll 8
        for (int c = 0; c < NV; c += 2) {
            const VecOf<A> even = x[c], odd = x[c + 1];
            x[c] = zip<false, A>(even, odd, All{});
            x[c + 1] = zip<true, A>(even, odd, All{});
        }
    }
}

// out (G, NV vectors) = out · shrink + weights (G, n) · values (n, NV vectors). Meanwhile the same
// columns of n rows from `next` on are fetched.
template <int G, int NV, class T, class A = Arithmetic<T>>
HW_INLINE void add_columns(const A* weights, const T* value, std::int64_t row, std::int64_t n,
                           const A* shrink, A* out, std::int64_t out_row, const T* next,
                           std::int64_t next_row) {
    constexpr int w = W<A>;
    VecOf<A> total[G][NV];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) total[g][c] = VecOf<A>{};
    for (std::int64_t j = 0; j < n; ++j) {
        if (next) fetch(next + j * next_row, NV * w);
        VecOf<A> x[NV];
        load_columns<T, NV>(value + j * row, x);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const VecOf<A> weight = fill(weights[g * STEP_KEYS + j]);
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) total[g][c] = fma(weight, x[c], total[g][c]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        order_columns<T, NV>(total[g]);
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) {
            A* to = out + g * out_row + c * w;
            store(to, fma(load(to), fill(shrink[g]), total[g][c]));
        }
    }
}

// out (G, dim) = out · shrink + weights (G, n) · values (n, dim). The rows from `next` on (null: none)
// are those of the next step.
template <int G, class T, class A = Arithmetic<T>>
HW_INLINE void add_values(const A* weights, const T* value, std::int64_t row, std::int64_t n,
                          std::int64_t dim, const A* shrink, A* out, std::int64_t out_row,
                          const T* next, std::int64_t next_row) {
    constexpr int w = W<A>, vectors = G == 1 ? 8 : G == 2 ? 4 : REGISTERS == 32 ? 4 : 2;
    std::int64_t d = 0;
    const auto at = [&](std::int64_t column) { return next ? next + column : next; };
    for (; d + vectors * w <= dim; d += vectors * w)
        add_columns<G, vectors>(weights, value + d, row, n, shrink, out + d, out_row, at(d), next_row);
    if (vectors > 4 && d + 4 * w <= dim) {
        add_columns<G, 4>(weights, value + d, row, n, shrink, out + d, out_row, at(d), next_row);
        d += 4 * w;
    }
    if (vectors > 2 && d + 2 * w <= dim) {
        add_columns<G, 2>(weights, value + d, row, n, shrink, out + d, out_row, at(d), next_row);
        d += 2 * w;
    }
    if (d + w <= dim) {
        add_columns<G, 1>(weights, value + d, row, n, shrink, out + d, out_row, at(d), next_row);
        d += w;
    }
    if (d < dim) {
        VecOf<A> total[G] = {};
        for (std::int64_t j = 0; j < n; ++j) {
            const VecOf<A> v = load_some(value + j * row + d, dim - d);
            for (int g = 0; g < G; ++g)
                total[g] = fma(fill(weights[g * STEP_KEYS + j]), v, total[g]);
        }
        for (int g = 0; g < G; ++g) {
            A* to = out + g * out_row + d;
            store(to, fma(load(to), fill(shrink[g]), total[g]));
        }
    }
}

// A step of keys and values as they lie in a call.
template <class T>
struct PlainSteps : InPlace<T> {
    using A = Arithmetic<T>;
    using InPlace<T>::call;

    static constexpr std::int64_t ALIGNED = 1;  // a head's first step begins at a multiple of this

    std::int64_t scratch_numbers(int heads) const { return heads * round_up(call.dim, W<A>); }
    template <int G>
    HW_INLINE void score(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, const A* query,
                         std::int64_t q_row, A* turned, A* scores) const {
        dot_keys<G, T>(query, q_row, turned, row_of<T>(call.key, b, kv, j), call.key.row, n, call.dim,
                       row_of<T>(call.value, b, kv, j), call.value.row, call.value_dim, scores);
    }
    HW_INLINE void between(std::int64_t, std::int64_t, std::int64_t, int, int) const {}
    template <int G>
    HW_INLINE void weigh(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, A* weights,
                         const A* shrink, A*, A* out, std::int64_t out_row) const {
        add_values<G, T>(weights, row_of<T>(call.value, b, kv, j), call.value.row, n, call.value_dim,
                         shrink, out, out_row,
                         j + n < call.keys ? row_of<T>(call.key, b, kv, j + n) : nullptr, call.key.row);
    }
};

template <class T, class Steps>
struct DecodePass {
    using A = Arithmetic<T>;
    const Forward& job;
    const Call& call;
    Steps steps;
    Scores<A> how;
    std::int64_t groups, value_width;

    DecodePass(const Forward& j, const Steps& s)
        : job(j), call(j.call), steps(s), how(scores_of<A>(j.call)) {
        groups = call.groups();
        value_width = round_up(call.value_dim, W<A>);
    }

    // What a split leaves of each query head of its group: m, l, then value_width sums.
    std::int64_t part_numbers() const { return groups * (2 + value_width); }

    // Keys [low, high) of one key/value head, for all its query heads.
    void split(std::int64_t b, std::int64_t kv, std::int64_t low, std::int64_t high,
               A* part) const {
        for (std::int64_t g = 0; g < groups; g += MOST_GROUP<A>)
            few<MOST_GROUP<A>>(least(groups - g, MOST_GROUP<A>), b, kv, g, low, high,
                               part + g * (2 + value_width));
    }

    template <std::int64_t G>
    void few(std::int64_t count, std::int64_t b, std::int64_t kv, std::int64_t first,
             std::int64_t low, std::int64_t high, A* part) const {
        if constexpr (G > 1) {
            if (count < G) return few<G - 1>(count, b, kv, first, low, high, part);
        }
        heads<static_cast<int>(G)>(b, kv, first, low, high, part);
    }

    template <int G>
    void heads(std::int64_t b, std::int64_t kv, std::int64_t first, std::int64_t low,
               std::int64_t high, A* part) const {
        const std::int64_t q_row = round_up(call.dim, W<A>), stride = 2 + value_width;
        const Scratch scratch((G * q_row + G * STEP_KEYS + steps.scratch_numbers(G)) *
                              static_cast<std::int64_t>(sizeof(A)));
        A* query = scratch.as<A>();
        A* scores = query + G * q_row;
        A* spare = scores + G * STEP_KEYS;
        RowMask mask[G];
        RowState<A> state[G];
        A shrink[G];
        for (int g = 0; g < G; ++g) {
            const std::int64_t head = kv * groups + first + g;
            mask[g] = row_mask(call, b, head, 0);
            state[g] = {A(-INFINITY), A(0)};
            const T* from = row_of<T>(call.query, b, head, 0);
            for (std::int64_t d = 0; d < call.dim; d += W<A>)
                store(query + g * q_row + d, load_some(from + d, call.dim - d) * how.query_factor);
            __builtin_memset(part + g * stride, 0, static_cast<std::size_t>(stride) * sizeof(A));
        }
        for (std::int64_t j = low; j < high; j += STEP_KEYS) {
            const std::int64_t n = least(STEP_KEYS, high - j), width = round_up(n, W<A>);
            bool seen = false;
            for (int g = 0; g < G; ++g) seen = seen || !mask[g].none(j, j + n);
            if (!seen) continue;
            steps.template score<G>(b, kv, j, n, query, q_row, spare, scores);
            for (int g = 0; g < G; ++g) {
                A* s = scores + g * STEP_KEYS;
                const std::int64_t head = kv * groups + first + g;
                if (mask[g].none(j, j + n)) {
                    __builtin_memset(s, 0, static_cast<std::size_t>(width) * sizeof(A));
                    shrink[g] = A(1);
                    continue;
                }
                if (!how.plain) {
                    const Bias& bias = call.bias;
                    const T* from = static_cast<const T*>(bias.data);
                    if (from) from += b * bias.batch + head * bias.head + j * bias.key;
                    adjust_scores(s, n, how, from, bias.key);
                }
                if (!mask[g].all(j, j + width)) hide_scores(s, width, j, mask[g]);
                shrink[g] = weigh_row(s, width, how.slope, highest(s, width), state[g]);
                steps.between(b, kv, j, g, G);
                if (call.dropout > 0)
                    drop(s, n, draw_of(call, b, head, 0), j,
                         static_cast<A>(1.0 / (1.0 - call.dropout)));
            }
            steps.template weigh<G>(b, kv, j, n, scores, shrink, spare, part + 2, stride);
        }
        for (int g = 0; g < G; ++g) {
            part[g * stride] = state[g].m;
            part[g * stride + 1] = state[g].l;
        }
    }

    // Joins the splits of one query head, in order, and writes its row.
    void join(std::int64_t b, std::int64_t kv, std::int64_t g, std::int64_t splits, A* parts) const {
        const std::int64_t stride = 2 + value_width, step = part_numbers();
        A* first = parts + g * stride;
        RowState<A> state{first[0], first[1]};
        for (std::int64_t n = 1; n < splits; ++n) {
            const A* next = first + n * step;
            const A m = most(state.m, next[0]);
            if (m == A(-INFINITY)) continue;
            const A mine = exp2_one(state.m - m), its = exp2_one(next[0] - m);
            state = {m, state.l * mine + next[1] * its};
            for (std::int64_t d = 0; d < value_width; d += W<A>)
                store(first + 2 + d,
                      fma(load(next + 2 + d), fill(its), load(first + 2 + d) * mine));
        }
        const std::int64_t head = kv * groups + g;
        finish_row<T>(job, b, head, 0, row_mask(call, b, head, 0), state, state.l, first + 2,
                      steps);
    }

    void run() const {
        const std::int64_t all = call.batch * call.kv_heads;
        const Scratch table(all * static_cast<std::int64_t>(sizeof(Span) + sizeof(std::int64_t)));
        Span* spans = table.as<Span>();
        std::int64_t* before = reinterpret_cast<std::int64_t*>(spans + all);
        std::int64_t splits = 0, longest = 1;
        for (std::int64_t n = 0; n < all; ++n) {
            spans[n] = group_span(call, n / call.kv_heads, n % call.kv_heads);
            spans[n].low -= spans[n].low % Steps::ALIGNED;
            before[n] = splits;
            const std::int64_t own = splits_of(spans[n]);
            splits += own;
            longest = most(longest, own);
        }
        const Scratch scratch(splits * part_numbers() * static_cast<std::int64_t>(sizeof(A)));
        A* parts = scratch.as<A>();
        // Neighbouring splits go to one thread: what it fetches ahead at the end of one is the next.
        const std::int64_t run = most<std::int64_t>(
            1, least(longest, splits / (RUNS_A_THREAD * most(1, call.threads))));
        const std::int64_t runs = (longest + run - 1) / run;
        auto one = [&](std::int64_t item) {
            const std::int64_t n = item / runs, first = item % runs * run;
            for (std::int64_t t = first; t < least(first + run, splits_of(spans[n])); ++t) {
                const std::int64_t low = spans[n].low + t * SPLIT_KEYS;
                split(n / call.kv_heads, n % call.kv_heads, low,
                      least(low + SPLIT_KEYS, spans[n].high), parts + (before[n] + t) * part_numbers());
            }
        };
        // Too little work is not worth waking a thread for.
        const std::int64_t work = splits * SPLIT_KEYS * (call.dim + call.value_dim) * groups;
        const int threads = work < (1 << 15) ? 1 : call.threads;
        parallel_for(threads, all * runs, one);
        for (std::int64_t n = 0; n < all; ++n)
            for (std::int64_t g = 0; g < groups; ++g)
                join(n / call.kv_heads, n % call.kv_heads, g, splits_of(spans[n]),
                     parts + before[n] * part_numbers());
    }

    // At least one, so that a head that sees nothing has a part that says so.
    static std::int64_t splits_of(const Span& span) {
        return most<std::int64_t>(1, (span.high - span.low + SPLIT_KEYS - 1) / SPLIT_KEYS);
    }
};

template <class T>
void decode_plain(const Forward& job) {
    DecodePass<T, PlainSteps<T>>(job, PlainSteps<T>{{job.call}}).run();
}

void decode(const Forward& job) {
    switch (job.call.dtype) {
        case Dtype::f32: decode_plain<float>(job); break;
        case Dtype::bf16: decode_plain<Bf16>(job); break;
        case Dtype::f16: decode_plain<F16>(job); break;
        case Dtype::f64: decode_plain<double>(job); break;
    }
}

// One query a head over a long cache: bound by how fast keys and values can be read, so each is read
// once, in place, for all query heads that share it.
//
// Keys are cut into splits of a fixed size, counted from the first that the batch element may see, so
// that one head's cache can be shared out over threads; the partial sums are joined in order (Dao 2023,
// "Flash-Decoding"). Within a split, keys are met in steps that stay in the nearest cache.

constexpr std::int64_t SPLIT_KEYS = 512;
constexpr std::int64_t STEP_KEYS = 128;
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

// Dot products of G queries (padded to whole vectors, q_row apart) with n keys → scores, STEP_KEYS
// apart. KEYS · G products at a time, summed together.
template <int G, class T, class A = Arithmetic<T>>
HW_INLINE void dot_keys(const A* q, std::int64_t q_row, const T* key, std::int64_t row,
                        std::int64_t n, std::int64_t dim, A* scores) {
    constexpr int w = W<A>, keys = w / G;
    const std::int64_t whole = dim / w * w;
    for (std::int64_t j = 0; j < n; j += keys) {
        const std::int64_t some = least<std::int64_t>(keys, n - j);
        const T* from[keys];
#pragma GCC unroll 16
        for (int i = 0; i < keys; ++i) from[i] = key + (j + (i < some ? i : 0)) * row;
        VecOf<A> part[w];
#pragma GCC unroll 16
        for (int i = 0; i < w; ++i) part[i] = VecOf<A>{};
        for (std::int64_t d = 0; d < whole; d += w) {
#pragma GCC unroll 16
            for (int i = 0; i < keys; ++i) {
                const VecOf<A> k = load_wide(from[i] + d);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g)
                    part[i * G + g] = fma(k, load(q + g * q_row + d), part[i * G + g]);
            }
        }
        if (whole < dim) {
#pragma GCC unroll 16
            for (int i = 0; i < keys; ++i) {
                const VecOf<A> k = load_some(from[i] + whole, dim - whole);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g)
                    part[i * G + g] = fma(k, load(q + g * q_row + whole), part[i * G + g]);
            }
        }
        A found[w];
        store(found, sum_each<w / 2, A>(part));
        for (std::int64_t i = 0; i < some; ++i)
            for (int g = 0; g < G; ++g) scores[g * STEP_KEYS + j + i] = found[i * G + g];
    }
}

// out (G, dim) = out · shrink + weights (G, n) · values (n, dim)
template <int G, class T, class A = Arithmetic<T>>
HW_INLINE void add_values(const A* weights, const T* value, std::int64_t row, std::int64_t n,
                          std::int64_t dim, const A* shrink, A* out, std::int64_t out_row) {
    constexpr int w = W<A>, vectors = G == 1 ? 8 : G == 2 ? 4 : 2;
    std::int64_t d = 0;
    for (; d + vectors * w <= dim; d += vectors * w)
        value_panel<G, vectors>(weights, STEP_KEYS, 1, value + d, row, n, shrink, out + d, out_row);
    for (; d + w <= dim; d += w)
        value_panel<G, 1>(weights, STEP_KEYS, 1, value + d, row, n, shrink, out + d, out_row);
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

    std::int64_t scratch_numbers(int) const { return 0; }
    template <int G>
    HW_INLINE void score(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, const A* query,
                         std::int64_t q_row, A*, A* scores) const {
        dot_keys<G, T>(query, q_row, row_of<T>(call.key, b, kv, j), call.key.row, n, call.dim, scores);
    }
    template <int G>
    HW_INLINE void weigh(std::int64_t b, std::int64_t kv, std::int64_t j, std::int64_t n, A* weights,
                         const A* shrink, A* out, std::int64_t out_row) const {
        add_values<G, T>(weights, row_of<T>(call.value, b, kv, j), call.value.row, n, call.value_dim,
                         shrink, out, out_row);
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
                shrink[g] = weigh_row(s, width, how.slope, state[g]);
                if (call.dropout > 0)
                    drop(s, n, draw_of(call, b, head, 0), j,
                         static_cast<A>(1.0 / (1.0 - call.dropout)));
            }
            steps.template weigh<G>(b, kv, j, n, scores, shrink, part + 2, stride);
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
        finish_row<T>(job, b, head, 0, row_mask(call, b, head, 0), state, first + 2,
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
            before[n] = splits;
            const std::int64_t own = splits_of(spans[n]);
            splits += own;
            longest = most(longest, own);
        }
        const Scratch scratch(splits * part_numbers() * static_cast<std::int64_t>(sizeof(A)));
        A* parts = scratch.as<A>();
        auto one = [&](std::int64_t item) {
            const std::int64_t n = item / longest, t = item % longest;
            if (t >= splits_of(spans[n])) return;
            const std::int64_t low = spans[n].low + t * SPLIT_KEYS;
            split(n / call.kv_heads, n % call.kv_heads, low,
                  least(low + SPLIT_KEYS, spans[n].high), parts + (before[n] + t) * part_numbers());
        };
        // Too little work is not worth waking a thread for.
        const std::int64_t work = splits * SPLIT_KEYS * (call.dim + call.value_dim) * groups;
        const int threads = work < (1 << 15) ? 1 : call.threads;
        parallel_for(threads, all * longest, one);
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

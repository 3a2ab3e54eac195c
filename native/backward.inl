// Backward: weights are computed again from the logsumexp (Dao 2022, arXiv 2205.14135, appendix B),
//
//     ds = p · (z · ⟨dO, v⟩ − δ + dlse),  δ = ⟨dO, O⟩,  z = what dropout multiplied by,
//
// so memory is linear. Blocks of query rows meet tiles of keys: a block's dQ is finished in the cache,
// dK and dV of all keys are kept by the thread that works on the key/value head. M = Pairs: p and ds
// are rounded to bfloat16 for the products, as every fused kernel does; all sums are float. With few
// heads the blocks of each are dealt out to a fixed number of pieces, whose dK and dV are added in
// order: what is added to what never depends on the number of threads.

constexpr std::int64_t FEW_HEADS = 8;
constexpr std::int64_t MOST_KEPT = std::int64_t{1} << 26;

template <class T, class M = Singles<Arithmetic<T>>>
struct BackwardPass {
    using A = Arithmetic<T>;
    const Backward& job;
    const Call& call;
    Scores<A> how;
    std::int64_t groups, rows, blocks, heads, pieces;
    std::int64_t key_width, value_width;  // dim and value_dim, padded to whole panels of columns
    std::int64_t depth, value_depth;      // lanes of one packed key, and of one packed value
    std::int64_t room;                    // keys, padded to whole tiles
    A* delta = nullptr;                   // (batch, heads, queries): δ − dlse
    A* shift = nullptr;                   // lse in log2 units; +∞ for a row that adds nothing
    A* partial = nullptr;                 // of pieces: dK and dV
    A ones[TILE_KEYS];

    explicit BackwardPass(const Backward& j) : job(j), call(j.call), how(scores_of<A>(j.call)) {
        groups = call.groups();
        rows = call.queries * groups;
        blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
        heads = call.batch * call.kv_heads;
        pieces = heads >= FEW_HEADS ? 1 : least(blocks, (FEW_HEADS + heads - 1) / heads);
        key_width = round_up(call.dim, COLUMNS<A>);
        value_width = round_up(call.value_dim, COLUMNS<A>);
        depth = (call.dim + M::PER - 1) / M::PER;
        value_depth = (call.value_dim + M::PER - 1) / M::PER;
        room = round_up(call.keys, TILE_KEYS);
        // Fewer pieces where many would hold many copies of dK and dV: 256 MiB in float at the most.
        while (pieces > 1 && heads * pieces * grad_numbers() > MOST_KEPT) --pieces;
        for (A& one : ones) one = 1;
    }

    std::int64_t block_begin(std::int64_t block) const {
        const std::int64_t even = round_up((rows + blocks - 1) / blocks, KEY_ROWS);
        return least(rows, block * even);
    }
    std::int64_t grad_numbers() const { return room * (key_width + value_width); }

    static bool finite_rows(const Tensor& t, std::int64_t batch, std::int64_t heads,
                            std::int64_t rows, std::int64_t dim) {
        VecOf<A> bad{};
        for (std::int64_t b = 0; b < batch; ++b)
            for (std::int64_t h = 0; h < heads; ++h)
                for (std::int64_t i = 0; i < rows; ++i)
                    for (std::int64_t d = 0; d < dim; d += W<A>)
                        bad += load_some(row_of<T>(t, b, h, i) + d, dim - d) * A(0);
        return sum<A>(bad) == A(0);
    }

    // δ and the shift of every row. False where a number is not finite: such a call takes the exact
    // path, which knows which rows see it.
    bool prepare() {
        if (!finite_rows(call.query, call.batch, call.heads, call.queries, call.dim) ||
            !finite_rows(call.key, call.batch, call.kv_heads, call.keys, call.dim) ||
            !finite_rows(call.value, call.batch, call.kv_heads, call.keys, call.value_dim))
            return false;
        const A* lse = static_cast<const A*>(job.lse);
        const A* grad_lse = static_cast<const A*>(job.grad_lse);
        A bad = 0;
        for (std::int64_t b = 0; b < call.batch; ++b)
            for (std::int64_t h = 0; h < call.heads; ++h)
                for (std::int64_t i = 0; i < call.queries; ++i) {
                    const std::int64_t at = (b * call.heads + h) * call.queries + i;
                    const T* grad = row_of<T>(job.grad_output, b, h, i);
                    const T* out = row_of<T>(job.output, b, h, i);
                    VecOf<A> dot{}, size{};
                    for (std::int64_t d = 0; d < call.value_dim; d += W<A>) {
                        const VecOf<A> g = load_some(grad + d, call.value_dim - d);
                        dot = fma(g, load_some(out + d, call.value_dim - d), dot);
                        size = maximum(g < A(0) ? -g : g, size);
                        bad += sum<A>(g * A(0));
                    }
                    const A pull = grad_lse ? grad_lse[at] : A(0);
                    bad += pull * A(0);
                    // A row outside the loss, or one that sees nothing, adds nothing.
                    const bool still = largest<A>(size) == A(0) && pull == A(0);
                    if (still || lse[at] == A(-INFINITY)) {
                        delta[at] = 0;
                        shift[at] = A(INFINITY);
                        continue;
                    }
                    delta[at] = sum<A>(dot) - pull;
                    shift[at] = lse[at] * LOG2E<A>;
                    bad += delta[at] * A(0) + shift[at] * A(0);
                }
        return bad == A(0);
    }

    // The blocks number, number + pieces, … of one key/value head; its dK and dV go to `grads`.
    void piece(std::int64_t b, std::int64_t kv, std::int64_t number, A* grads) const {
        const Span span = group_span(call, b, kv);
        const std::int64_t keys = span.high - span.low, space = round_up(keys, TILE_KEYS);
        const std::int64_t q_row = key_width, o_row = value_width;
        const std::int64_t tile = MOST_ROWS * TILE_KEYS;
        const std::int64_t across = M::PER == 1 ? 0 : MOST_ROWS / M::PER * (q_row + o_row);
        const Scratch scratch((space * (depth + value_depth) + space / M::PER * key_width +
                               MOST_ROWS * (2 * q_row + o_row) + across + 3 * tile) *
                              static_cast<std::int64_t>(sizeof(A)));
        A* key_panels = scratch.as<A>();
        A* value_panels = key_panels + space * depth;
        A* key_columns = value_panels + space * value_depth;
        A* query = key_columns + space / M::PER * key_width;
        A* grad_query = query + MOST_ROWS * q_row;
        A* grad = grad_query + MOST_ROWS * q_row;
        A* p = grad + MOST_ROWS * o_row;
        A* ds = p + tile;
        A* slopes = ds + tile;
        // The same rows as dK and dV need them: a lane holds a column of PER rows.
        A* query_across = M::PER == 1 ? query : slopes + tile;
        A* grad_across = M::PER == 1 ? grad : query_across + MOST_ROWS / M::PER * q_row;
        const A* ds_across = M::PER == 1 ? ds : p + TILE_KEYS;
        A* grad_key = grads;
        A* grad_value = grads + room * key_width;
        __builtin_memset(grads, 0, static_cast<std::size_t>(grad_numbers()) * sizeof(A));
        if (keys > 0) {
            const T* key = row_of<T>(call.key, b, kv, span.low);
            pack_keys<T, M>(key, call.key.row, keys, call.dim, key_panels);
            pack_values<T, M>(key, call.key.row, keys, call.dim, space / M::PER, key_columns);
            pack_keys<T, M>(row_of<T>(call.value, b, kv, span.low), call.value.row, keys,
                            call.value_dim, value_panels);
        }
        for (std::int64_t n = number; n < blocks; n += pieces) {
            const std::int64_t begin = block_begin(n), count = block_begin(n + 1) - begin;
            if (count <= 0) continue;
            RowMask mask[MOST_ROWS];
            A row_delta[MOST_ROWS], row_shift[MOST_ROWS];
            Span seen{0, 0};
            for (std::int64_t r = 0; r < count; ++r) {
                const std::int64_t head = kv * groups + (begin + r) % groups;
                const std::int64_t i = (begin + r) / groups;
                const std::int64_t at = (b * call.heads + head) * call.queries + i;
                row_delta[r] = delta[at];
                row_shift[r] = shift[at];
                mask[r] = row_mask(call, b, head, i);
                const bool still = shift[at] == A(INFINITY);
                if (!still) widen_span(seen, mask[r]);
                for (std::int64_t d = 0; d < q_row; d += W<A>) {
                    const std::int64_t left = most<std::int64_t>(0, call.dim - d);
                    const T* from = row_of<T>(call.query, b, head, i) + least(d, call.dim);
                    M::put(query + r * q_row, d,
                           still ? VecOf<A>{} : load_some(from, left) * how.query_factor);
                    store(grad_query + r * q_row + d, VecOf<A>{});
                }
                for (std::int64_t d = 0; d < o_row; d += W<A>) {
                    const std::int64_t left = most<std::int64_t>(0, call.value_dim - d);
                    const T* from = row_of<T>(job.grad_output, b, head, i) + least(d, call.value_dim);
                    M::put(grad + r * o_row, d, still ? VecOf<A>{} : load_some(from, left));
                }
            }
            if constexpr (M::PER > 1) {
                turn_rows(query, q_row, count, query_across);
                turn_rows(grad, o_row, count, grad_across);
            }
            for (std::int64_t low = span.low + (seen.low - span.low) / TILE_KEYS * TILE_KEYS;
                 seen.low < seen.high && low < seen.high; low += TILE_KEYS) {
                const std::int64_t high = least(low + TILE_KEYS, seen.high);
                bool any = false;
                for (std::int64_t r = 0; r < count && !any; ++r) any = !mask[r].none(low, high);
                if (!any) continue;
                const std::int64_t from = low - span.low, n_keys = high - low;
                const std::int64_t width = round_up(n_keys, PANEL<A>);
                for (std::int64_t j = 0; j < width; j += PANEL<A>) {
                    score_rows<KEY_ROWS, A, M>(count, query, q_row, key_panels + (from + j) * depth,
                                               depth, p + j, TILE_KEYS);
                    score_rows<KEY_ROWS, A, M>(count, grad, o_row,
                                               value_panels + (from + j) * value_depth, value_depth,
                                               ds + j, TILE_KEYS);
                }
                for (std::int64_t r = 0; r < count; ++r) {
                    row(b, kv * groups + (begin + r) % groups, (begin + r) / groups, low, n_keys,
                        width, mask[r], row_delta[r], row_shift[r], p + r * TILE_KEYS,
                        ds + r * TILE_KEYS, slopes);
                    if constexpr (M::PER > 1) narrow_rows(r, count, width, p, ds);
                }
                const std::int64_t lanes = (n_keys + M::PER - 1) / M::PER;
                const std::int64_t row_lanes = (count + M::PER - 1) / M::PER;
                weigh_values<A, M>(count, call.dim,
                                   {ds, TILE_KEYS, 1, key_columns + from / M::PER * COLUMNS<A>,
                                    COLUMNS<A>, space / M::PER * COLUMNS<A>, lanes, ones},
                                   grad_query, q_row);
                weigh_values<A, M>(n_keys, call.dim,
                                   {ds_across, 1, M::PER * TILE_KEYS, query_across, q_row, COLUMNS<A>,
                                    row_lanes, ones},
                                   grad_key + low * key_width, key_width);
                weigh_values<A, M>(n_keys, call.value_dim,
                                   {p, 1, M::PER * TILE_KEYS, grad_across, o_row, COLUMNS<A>,
                                    row_lanes, ones},
                                   grad_value + low * value_width, value_width);
            }
            for (std::int64_t r = 0; r < count; ++r) {
                const std::int64_t head = kv * groups + (begin + r) % groups;
                const std::int64_t i = (begin + r) / groups;
                A* to = static_cast<A*>(job.grad_query) +
                        ((b * call.heads + head) * call.queries + i) * call.dim;
                const A scale = static_cast<A>(call.scale);
                for (std::int64_t d = 0; d < call.dim; ++d) to[d] = grad_query[r * q_row + d] * scale;
            }
        }
    }

#if defined(HEADWISE_PAIRS)
    // Rows of bfloat16 numbers, two side by side.
    static void turn_rows(const A* rows, std::int64_t row, std::int64_t count, A* across) {
        for (std::int64_t r = 0; r < count; r += 2, across += row)
            for (std::int64_t d = 0; d < row; d += W<A>)
                store(across + d, M::across(reinterpret_cast<const Bf16*>(rows + r * row) + d, 2 * row,
                                            count - r, W<A>));
    }

    // Once the second of two rows is there (or there is none): p of both goes, side by side, to where
    // the first's was, ds so to where the second's p was, and each row of ds to where it was.
    static void narrow_rows(std::int64_t r, std::int64_t count, std::int64_t width, A* p, A* ds) {
        constexpr int w = W<A>;
        if (r % 2 == 0 && r + 1 < count) return;
        const bool alone = r % 2 == 0;
        A *first = p + (r - r % 2) * TILE_KEYS, *second = first + TILE_KEYS;
        A *slope = ds + (r - r % 2) * TILE_KEYS, *other = slope + TILE_KEYS;
        const auto both = [&](A* to, VecOf<A> x, VecOf<A> y) __attribute__((always_inline)) {
            store(to, (VecOf<A>)interleave(narrow_pairs(x, y)));
        };
        for (std::int64_t j = 0; j < width; j += 2 * w) {
            VecOf<A> x[2], y[2], u[2], v[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                x[i] = load(first + j + i * w);
                y[i] = alone ? VecOf<A>{} : load(second + j + i * w);
                u[i] = load(slope + j + i * w);
                v[i] = alone ? VecOf<A>{} : load(other + j + i * w);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                both(first + j + i * w, x[i], y[i]);
                both(second + j + i * w, u[i], v[i]);
            }
            store(slope + j / 2, (VecOf<A>)narrow_pairs(u[0], u[1]));
            store(other + j / 2, (VecOf<A>)narrow_pairs(v[0], v[1]));
        }
    }
#endif

    // Raw scores and ⟨dO, v⟩ of one row become p (with dropout) and ds.
    void row(std::int64_t b, std::int64_t head, std::int64_t i, std::int64_t low, std::int64_t n,
             std::int64_t width, const RowMask& mask, A row_delta, A row_shift, A* p, A* ds,
             A* slopes) const {
        constexpr int w = W<A>;
        if (row_shift == A(INFINITY) || mask.none(low, low + n)) {
            __builtin_memset(p, 0, static_cast<std::size_t>(width) * sizeof(A));
            __builtin_memset(ds, 0, static_cast<std::size_t>(width) * sizeof(A));
            return;
        }
        if (how.cap > 0)
            for (std::int64_t j = 0; j < n; j += w) {
                const VecOf<A> t = tanh<A>(load(p + j) * how.natural * how.uncap);
                store(slopes + j, A(1) - t * t);
            }
        if (!how.plain) {
            const Bias& bias = call.bias;
            const T* from = static_cast<const T*>(bias.data);
            if (from) from += b * bias.batch + head * bias.head + i * bias.row + low * bias.key;
            adjust_scores(p, n, how, from, bias.key);
        }
        if (!mask.all(low, low + width)) hide_scores(p, width, low, mask);
        const VecOf<A> less = fill(-row_shift), slope = fill(how.slope), pull = fill(row_delta);
        Draw draw{};
        const A kept = static_cast<A>(1.0 / (1.0 - call.dropout));
        if (call.dropout > 0) {
            draw = draw_of(call, b, head, i);
            drop(ds, n, draw, low, kept);
        }
        for (std::int64_t j = 0; j < width; j += w) {
            const VecOf<A> weight = exp2(fma(load(p + j), slope, less));
            store(p + j, weight);
            store(ds + j, weight * (load(ds + j) - pull));
        }
        if (call.dropout > 0) drop(p, n, draw, low, kept);
        if (job.grad_bias) {
            const Bias& at = job.grad_bias_at;
            A* to = static_cast<A*>(job.grad_bias) + b * at.batch + head * at.head + i * at.row +
                    low * at.key;
            for (std::int64_t j = 0; j < n; ++j) to[j * at.key] += ds[j];
        }
        if (how.cap > 0)
            for (std::int64_t j = 0; j < n; j += w) store(ds + j, load(ds + j) * load(slopes + j));
    }

    // dK and dV of a head from those of its pieces, scaled, to where they are wanted.
    void collect(std::int64_t head, const A* grads) const {
        const A scale = static_cast<A>(call.scale / static_cast<double>(how.query_factor));
        A* key = static_cast<A*>(job.grad_key) + head * call.keys * call.dim;
        A* value = static_cast<A*>(job.grad_value) + head * call.keys * call.value_dim;
        for (std::int64_t j = 0; j < call.keys; ++j) {
            for (std::int64_t d = 0; d < call.dim; ++d) {
                A total = 0;
                for (std::int64_t n = 0; n < pieces; ++n)
                    total += grads[n * grad_numbers() + j * key_width + d];
                key[j * call.dim + d] = total * scale;
            }
            for (std::int64_t d = 0; d < call.value_dim; ++d) {
                A total = 0;
                for (std::int64_t n = 0; n < pieces; ++n)
                    total += grads[n * grad_numbers() + room * key_width + j * value_width + d];
                value[j * call.value_dim + d] = total;
            }
        }
    }

    void sinks() const {
        A* to = static_cast<A*>(job.grad_sinks);
        const A* lse = static_cast<const A*>(job.lse);
        for (std::int64_t h = 0; h < call.heads; ++h) {
            const double sink = widen(static_cast<const T*>(call.sinks)[h]);
            double total = 0;
            for (std::int64_t b = 0; b < call.batch; ++b)
                for (std::int64_t i = 0; i < call.queries; ++i) {
                    const std::int64_t at = (b * call.heads + h) * call.queries + i;
                    if (shift[at] != A(INFINITY)) total -= std::exp(sink - lse[at]) * delta[at];
                }
            to[h] = static_cast<A>(total);
        }
    }

    bool run() {
        const std::int64_t all = call.batch * call.heads * call.queries;
        const Scratch table(2 * all * static_cast<std::int64_t>(sizeof(A)));
        delta = table.as<A>();
        shift = delta + all;
        if (!prepare()) return false;
        const std::int64_t bytes = pieces * grad_numbers() * static_cast<std::int64_t>(sizeof(A));
        const Scratch kept(pieces > 1 ? heads * bytes : 0);
        partial = pieces > 1 ? kept.as<A>() : nullptr;
        // Pieces that add to one element of the bias's gradient go to one thread, in order.
        const Bias& at = job.grad_bias_at;
        const bool adds = job.grad_bias != nullptr;
        const std::int64_t b_apart = adds && !at.batch ? 1 : call.batch;
        const std::int64_t h_apart = adds && !at.head ? 1 : call.kv_heads;
        const std::int64_t p_apart = adds && !at.row ? 1 : pieces;
        auto one = [&](std::int64_t item) {
            for (std::int64_t b = item % b_apart; b < call.batch; b += b_apart)
                for (std::int64_t kv = item / b_apart % h_apart; kv < call.kv_heads; kv += h_apart)
                    for (std::int64_t n = item / b_apart / h_apart; n < pieces; n += p_apart) {
                        const std::int64_t head = b * call.kv_heads + kv;
                        if (partial) {
                            piece(b, kv, n, partial + (head * pieces + n) * grad_numbers());
                        } else {
                            const Scratch own(bytes);
                            piece(b, kv, n, own.as<A>());
                            collect(head, own.as<A>());
                        }
                    }
        };
        parallel_for(call.threads, b_apart * h_apart * p_apart, one);
        if (partial) {
            auto join = [&](std::int64_t head) {
                collect(head, partial + head * pieces * grad_numbers());
            };
            parallel_for(call.threads, heads, join);
        }
        if (job.grad_sinks) sinks();
        return true;
    }
};

bool backward(const Backward& job) {
    switch (job.call.dtype) {
        case Dtype::f32: return BackwardPass<float>(job).run();
        case Dtype::bf16:
#if defined(HEADWISE_PAIRS)
            // With dropout as forward does it.
            if (!(job.call.dropout > 0)) return BackwardPass<Bf16, Pairs>(job).run();
#endif
            return BackwardPass<Bf16>(job).run();
        case Dtype::f16: return BackwardPass<F16>(job).run();
        default: return BackwardPass<double>(job).run();
    }
}

// What dropout multiplies the weights by, keys side by side: (batch, heads, queries, keys) floats.
void draws(const Call& call, std::int64_t first_row, std::int64_t rows, std::int64_t first_key,
           std::int64_t keys, float* out) {
    const float kept = static_cast<float>(1.0 / (1.0 - call.dropout));
    for (std::int64_t b = 0; b < call.batch; ++b)
        for (std::int64_t h = 0; h < call.heads; ++h)
            for (std::int64_t i = 0; i < rows; ++i, out += keys) {
                for (std::int64_t j = 0; j < keys; ++j) out[j] = 1.0f;
                drop(out, keys, draw_of(call, b, h, first_row + i), first_key, kept);
            }
}

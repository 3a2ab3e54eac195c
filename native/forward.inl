// Forward: online softmax over tiles (Milakov 2018, arXiv 1805.02867; Dao 2022, 2205.14135).
//
// The query rows of all heads that share a key/value head are one list: row r is query r / groups of
// head r % groups, so keys and values are read once for a whole group. A block of rows meets its keys
// tile by tile: raw scores, softmax, weighted values, all within the cache.

constexpr std::int64_t TILE_KEYS = 256;
constexpr std::int64_t MOST_ROWS = 72;
constexpr std::int64_t VALUE_STEP = 2 * VALUE_ROWS;  // rows whose values are added in one go

template <class T, class M = Singles<Arithmetic<T>>>
struct ForwardPass {
    using A = Arithmetic<T>;
    const Forward& job;
    const Call& call;
    Scores<A> how;
    std::int64_t groups, rows, blocks, depth, value_width;  // depth: lanes of one packed key

    explicit ForwardPass(const Forward& j) : job(j), call(j.call), how(scores_of<A>(j.call)) {
        groups = call.groups();
        rows = call.queries * groups;
        blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
        depth = (call.dim + M::PER - 1) / M::PER;
        value_width = round_up(call.value_dim, COLUMNS<A>);
    }

    std::int64_t block_begin(std::int64_t block) const {
        // Even blocks, in whole register tiles where that is possible.
        const std::int64_t even = round_up((rows + blocks - 1) / blocks, KEY_ROWS);
        return least(rows, block * even);
    }
    std::int64_t padded(std::int64_t keys) const { return round_up(keys, TILE_KEYS); }
    std::int64_t packed_numbers(std::int64_t keys) const {
        return padded(keys) * depth + padded(keys) / M::PER * value_width;
    }

    // Keys and values [low, high) of one key/value head; keys first, then values.
    void pack(std::int64_t b, std::int64_t kv, std::int64_t low, std::int64_t high, std::int64_t room,
              A* keys, A* values) const {
        pack_keys<T, M>(row_of<T>(call.key, b, kv, low), call.key.row, high - low, call.dim, keys);
        pack_values<T, M>(row_of<T>(call.value, b, kv, low), call.value.row, high - low,
                          call.value_dim, room / M::PER, values);
    }

    // Working memory of one thread: queries, a tile of scores, sums, and a packed tile.
    std::int64_t block_numbers() const {
        return MOST_ROWS * (round_up(call.dim, 16) + TILE_KEYS + value_width + 2);
    }

    // One block of rows. `packed` holds the head's keys and values from `origin` on, in room for
    // `room` keys; null: they are packed here, tile by tile.
    void block(std::int64_t b, std::int64_t kv, std::int64_t number, std::int64_t origin,
               const A* packed, std::int64_t room) const {
        const std::int64_t begin = block_begin(number), count = block_begin(number + 1) - begin;
        if (count <= 0) return;
        const Scratch scratch(
            (block_numbers() + (packed ? 0 : packed_numbers(TILE_KEYS))) *
            static_cast<std::int64_t>(sizeof(A)));
        const std::int64_t q_row = round_up(call.dim, 16);
        A* scores = scratch.as<A>();
        A* sums = scores + MOST_ROWS * TILE_KEYS;
        A* query = sums + MOST_ROWS * value_width;
        A* shrink = query + MOST_ROWS * q_row;
        A* weighed = shrink + MOST_ROWS;
        A* fresh = weighed + MOST_ROWS;

        RowMask mask[MOST_ROWS];
        RowState<A> state[MOST_ROWS];
        Span span{0, 0};
        for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t head = kv * groups + (begin + r) % groups, i = (begin + r) / groups;
            mask[r] = row_mask(call, b, head, i);
            widen_span(span, mask[r]);
            state[r] = {A(-INFINITY), A(0)};
            const T* from = row_of<T>(call.query, b, head, i);
            for (std::int64_t d = 0; d < call.dim; d += W<A>)
                M::put(query + r * q_row, d, load_some(from + d, call.dim - d) * how.query_factor);
        }
        __builtin_memset(weighed, 0, static_cast<std::size_t>(count) * sizeof(A));
        __builtin_memset(sums, 0, static_cast<std::size_t>(count * value_width) * sizeof(A));
        if (span.low < span.high) {
            for (std::int64_t low = origin + (span.low - origin) / TILE_KEYS * TILE_KEYS;
                 low < span.high; low += TILE_KEYS) {
                const std::int64_t high = least(low + TILE_KEYS, span.high);
                bool seen = false;
                for (std::int64_t r = 0; r < count && !seen; ++r) seen = !mask[r].none(low, high);
                if (!seen) continue;
                const A *keys = fresh, *values = fresh + TILE_KEYS * depth;
                std::int64_t panel = TILE_KEYS / M::PER * COLUMNS<A>;
                if (packed) {
                    keys = packed + (low - origin) * depth;
                    values = packed + room * depth + (low - origin) / M::PER * COLUMNS<A>;
                    panel = room / M::PER * COLUMNS<A>;
                } else {
                    pack(b, kv, low, high, TILE_KEYS, fresh, fresh + TILE_KEYS * depth);
                }
                tile(b, kv, begin, count, low, high, mask, state, query, q_row, keys, values, panel,
                     scores, shrink, weighed, sums);
            }
        }
        finish(b, kv, begin, count, mask, state, weighed, sums);
    }

    void tile(std::int64_t b, std::int64_t kv, std::int64_t begin, std::int64_t count,
              std::int64_t low, std::int64_t high, const RowMask* mask, RowState<A>* state,
              const A* query, std::int64_t q_row, const A* keys, const A* values, std::int64_t panel,
              A* scores, A* shrink, A* weighed, A* sums) const {
        // What each row sees of the tile, in whole panels: under a causal mask much of a short call
        // lies outside.
        Span seen[MOST_ROWS];
        for (std::int64_t r = 0; r < count; ++r) seen[r] = panels(mask[r], low, high);
        for (std::int64_t j = 0; j < high - low; j += PANEL<A>) {
            std::int64_t from = 0, to = count;
            while (from < to && !(seen[from].low <= j && j < seen[from].high)) ++from;
            while (from < to && !(seen[to - 1].low <= j && j < seen[to - 1].high)) --to;
            from = from / KEY_ROWS * KEY_ROWS;  // whole register tiles
            to = least(count, round_up(to, KEY_ROWS));
            score_rows<KEY_ROWS, A, M>(to - from, query + from * q_row, q_row, keys + j * depth,
                                       depth, scores + from * TILE_KEYS + j, TILE_KEYS);
        }
        for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t from = seen[r].low, width = seen[r].high - from;
            const std::int64_t n = least(width, high - low - from), key = low + from;
            A* s = scores + r * TILE_KEYS + from;
            shrink[r] = A(1);
            if (width == 0) continue;
            const std::int64_t head = kv * groups + (begin + r) % groups, i = (begin + r) / groups;
            if (!how.plain) {
                const Bias& bias = call.bias;
                const T* added = static_cast<const T*>(bias.data);
                if (added)
                    added += b * bias.batch + head * bias.head + i * bias.row + key * bias.key;
                adjust_scores(s, n, how, added, bias.key);
            }
            if (!mask[r].all(key, key + width)) hide_scores(s, width, key, mask[r]);
            if constexpr (M::PER == 1) {
                shrink[r] = weigh_row(s, width, how.slope, state[r]);
                weighed[r] = state[r].l;
            } else {
                shrink[r] = weigh_pairs(s, width, how.slope, state[r], weighed[r], s - from / M::PER);
            }
            if (call.dropout > 0)
                drop(s, n, draw_of(call, b, head, i), key,
                     static_cast<A>(1.0 / (1.0 - call.dropout)));
        }
        for (std::int64_t r = 0; r < count; r += VALUE_STEP) {
            const std::int64_t some = least(VALUE_STEP, count - r);
            Span all{0, 0};
            for (std::int64_t k = r; k < r + some; ++k) {
                if (seen[k].low >= seen[k].high) continue;
                if (all.low >= all.high) all = seen[k];
                all = {least(all.low, seen[k].low), most(all.high, seen[k].high)};
            }
            if (all.low >= all.high) continue;
            for (std::int64_t k = r; k < r + some; ++k) {
                // Weights of 0 where others of the step see more.
                A* p = scores + k * TILE_KEYS;
                const Span own = seen[k].low < seen[k].high ? seen[k] : Span{all.high, all.high};
                clear(p + all.low / M::PER, (own.low - all.low) / M::PER);
                clear(p + own.high / M::PER, (all.high - own.high) / M::PER);
            }
            const std::int64_t first = all.low / M::PER;
            const std::int64_t n = least(all.high, high - low) - all.low;
            weigh_values<A, M>(some, call.value_dim,
                               {scores + r * TILE_KEYS + first, TILE_KEYS, 1,
                                values + first * COLUMNS<A>, COLUMNS<A>, panel,
                                (n + M::PER - 1) / M::PER, shrink + r},
                               sums + r * value_width, value_width);
        }
    }

    // The panels of the tile [low, high) in which a row sees keys, counted from `low`.
    static Span panels(const RowMask& row, std::int64_t low, std::int64_t high) {
        if (row.none(low, high)) return {0, 0};
        const std::int64_t first = most(row.first(), low) - low, last = least(row.last(), high) - low;
        return {first / PANEL<A> * PANEL<A>, round_up(last, PANEL<A>)};
    }

    static void clear(A* p, std::int64_t n) {
        __builtin_memset(p, 0, static_cast<std::size_t>(n) * sizeof(A));
    }

    void finish(std::int64_t b, std::int64_t kv, std::int64_t begin, std::int64_t count,
                const RowMask* mask, const RowState<A>* state, const A* weighed,
                const A* sums) const {
        for (std::int64_t r = 0; r < count; ++r)
            finish_row<T>(job, b, kv * groups + (begin + r) % groups, (begin + r) / groups, mask[r],
                          state[r], weighed[r], sums + r * value_width, InPlace<T>{call});
    }

    void run() const {
        const std::int64_t heads = call.batch * call.kv_heads;
        const auto origin_of = [&](std::int64_t n) {
            return group_span(call, n / call.kv_heads, n % call.kv_heads);
        };
        if (blocks == 1) {  // keys are met once: packed tile by tile, straight into the cache
            auto one = [&](std::int64_t n) {
                block(n / call.kv_heads, n % call.kv_heads, 0, origin_of(n).low, nullptr, 0);
            };
            parallel_for(call.threads, heads, one);
        } else if (heads % call.threads == 0 || heads >= 4 * call.threads) {
            // Whole heads to threads: what a thread packed is still near when it reads it.
            auto one = [&](std::int64_t n) {
                const Span span = origin_of(n);
                const std::int64_t b = n / call.kv_heads, kv = n % call.kv_heads;
                const std::int64_t room = padded(span.high - span.low);
                const Scratch scratch(packed_numbers(span.high - span.low) *
                                      static_cast<std::int64_t>(sizeof(A)));
                A* packed = scratch.as<A>();
                pack(b, kv, span.low, span.high, room, packed, packed + room * depth);
                for (std::int64_t k = blocks - 1; k >= 0; --k)
                    block(b, kv, k, span.low, packed, room);
            };
            parallel_for(call.threads, heads, one);
        } else {
            shared_heads(heads, origin_of);
        }
    }

    // Fewer heads than would keep the threads busy: all is packed first, then blocks are shared out,
    // those with the most keys (under a causal mask the last) first.
    template <class Origin>
    void shared_heads(std::int64_t heads, const Origin& origin_of) const {
        const Scratch table(heads * static_cast<std::int64_t>(3 * sizeof(std::int64_t)));
        std::int64_t* begin = table.as<std::int64_t>();
        Span* spans = reinterpret_cast<Span*>(begin + heads);
        std::int64_t numbers = 0;
        for (std::int64_t n = 0; n < heads; ++n) {
            spans[n] = origin_of(n);
            begin[n] = numbers;
            numbers += packed_numbers(spans[n].high - spans[n].low);
        }
        const Scratch scratch(numbers * static_cast<std::int64_t>(sizeof(A)));
        A* packed = scratch.as<A>();
        std::int64_t most_tiles = 0;
        for (std::int64_t n = 0; n < heads; ++n)
            most_tiles = most(most_tiles, padded(spans[n].high - spans[n].low) / TILE_KEYS);
        auto fill_tile = [&](std::int64_t item) {
            const std::int64_t n = item / most_tiles, t = item % most_tiles;
            const std::int64_t low = spans[n].low + t * TILE_KEYS;
            const std::int64_t high = least(low + TILE_KEYS, spans[n].high);
            if (low >= high) return;
            const std::int64_t room = padded(spans[n].high - spans[n].low);
            A* keys = packed + begin[n];
            pack(n / call.kv_heads, n % call.kv_heads, low, high, room,
                 keys + t * TILE_KEYS * depth,
                 keys + room * depth + t * (TILE_KEYS / M::PER) * COLUMNS<A>);
        };
        parallel_for(call.threads, heads * most_tiles, fill_tile);
        auto one = [&](std::int64_t item) {
            const std::int64_t n = item % heads, k = blocks - 1 - item / heads;
            block(n / call.kv_heads, n % call.kv_heads, k, spans[n].low, packed + begin[n],
                  padded(spans[n].high - spans[n].low));
        };
        parallel_for(call.threads, heads * blocks, one);
    }
};

void forward(const Forward& job) {
    switch (job.call.dtype) {
        case Dtype::f32: ForwardPass<float>(job).run(); break;
        case Dtype::bf16:
#if defined(HEADWISE_PAIRS)
            // Dropout's factor 1/(1 − p) would be rounded together with the weight.
            if (!(job.call.dropout > 0)) return ForwardPass<Bf16, Pairs>(job).run();
#endif
            ForwardPass<Bf16>(job).run();
            break;
        case Dtype::f16: ForwardPass<F16>(job).run(); break;
        case Dtype::f64: ForwardPass<double>(job).run(); break;
    }
}

// Forward: online softmax over tiles (Milakov 2018, arXiv 1805.02867; Dao 2022, 2205.14135).
//
// The query rows of all heads that share a key/value head are one list: row r is query r / groups of
// head r % groups, so keys and values are read once for a whole group. A block of rows meets its keys
// tile by tile: raw scores, softmax, weighted values, all within the cache.

constexpr std::int64_t TILE_KEYS = 256;
constexpr std::int64_t MOST_ROWS = 72;
constexpr std::int64_t STEP = 2 * VALUE_ROWS;  // rows that meet a tile in one go
static_assert(STEP % KEY_ROWS == 0);
// Keys and values of the next head are fetched while they and this head's, packed, fit a core's cache.
constexpr std::int64_t MOST_FETCHED = 256 << 10;
// Values are read in place where their rows lie no farther apart than so many bytes.
constexpr std::int64_t FARTHEST_ROW = 1024;

template <class T, class M = Singles<Arithmetic<T>>>
struct ForwardPass {
    using A = Arithmetic<T>;
    const Forward& job;
    const Call& call;
    Scores<A> how;
    std::int64_t groups, rows, blocks, depth, value_width;  // depth: lanes of one packed key
    bool in_place;  // values lie as the product reads them

    explicit ForwardPass(const Forward& j) : job(j), call(j.call), how(scores_of<A>(j.call)) {
        groups = call.groups();
        rows = call.queries * groups;
        blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
        depth = (call.dim + M::PER - 1) / M::PER;
        value_width = round_up(call.value_dim, COLUMNS<A>);
        in_place = std::is_same_v<T, A> && call.value_dim % W<A> == 0 &&
                   call.value.row * static_cast<std::int64_t>(sizeof(T)) <= FARTHEST_ROW;
    }

    std::int64_t block_begin(std::int64_t block) const {
        // Even blocks, in whole register tiles where that is possible.
        const std::int64_t even = round_up((rows + blocks - 1) / blocks, KEY_ROWS);
        return least(rows, block * even);
    }
    std::int64_t padded(std::int64_t keys) const { return round_up(keys, TILE_KEYS); }
    std::int64_t packed_numbers(std::int64_t keys) const {
        return padded(keys) * depth + (in_place ? 0 : padded(keys) / M::PER * value_width);
    }

    // Keys and values [low, high) of one key/value head; keys first, then values.
    void pack(std::int64_t b, std::int64_t kv, std::int64_t low, std::int64_t high, std::int64_t room,
              A* keys, A* values) const {
        pack_keys<T, M>(row_of<T>(call.key, b, kv, low), call.key.row, high - low, call.dim, keys);
        if (in_place) return;
        pack_values<T, M>(row_of<T>(call.value, b, kv, low), call.value.row, high - low,
                          call.value_dim, room / M::PER, values);
    }

    // Working memory of one thread: queries, a tile of scores, sums, and a packed tile.
    std::int64_t block_numbers() const {
        return STEP * TILE_KEYS + MOST_ROWS * (round_up(call.dim, 16) + value_width + 1);
    }

    // What this thread works on after a block, fetched from memory meanwhile: rows of queries, and
    // keys with their values. Heads of all batch elements are numbered on.
    struct Next {
        std::int64_t query_head = 0, begin = 0, end = 0;
        std::int64_t key_head = 0, low = 0, high = 0;
    };
    void add_queries(Next& next, std::int64_t head, std::int64_t number) const {
        next.query_head = head;
        next.begin = block_begin(number);
        next.end = block_begin(number + 1);
    }
    // What a part of a head begins with.
    Next next_of(std::int64_t head, std::int64_t part, std::int64_t parts) const {
        Next next;
        add_queries(next, head, part + (blocks - 1 - part) / parts * parts);
        const Span span = group_span(call, head / call.kv_heads, head % call.kv_heads);
        const std::int64_t bytes = (span.high - span.low) * (call.dim + call.value_dim) *
                                   static_cast<std::int64_t>(sizeof(T));
        if (bytes <= MOST_FETCHED) {
            next.key_head = head;
            next.low = span.low;
            next.high = span.high;
        }
        return next;
    }
    // So many rows, then so many keys, of what is next; what was fetched is taken off.
    HW_INLINE void fetch_some(Next& next, std::int64_t rows_each, std::int64_t keys_each) const {
        const std::int64_t b = next.key_head / call.kv_heads, kv = next.key_head % call.kv_heads;
        for (std::int64_t n = rows_each; n > 0 && next.begin < next.end; --n, ++next.begin)
            fetch(row_of<T>(call.query, next.query_head / call.kv_heads,
                            next.query_head % call.kv_heads * groups + next.begin % groups,
                            next.begin / groups),
                  call.dim);
        for (std::int64_t n = keys_each; n > 0 && next.low < next.high; --n, ++next.low) {
            fetch(row_of<T>(call.key, b, kv, next.low), call.dim);
            fetch(row_of<T>(call.value, b, kv, next.low), call.value_dim);
        }
    }

    // One block of rows. `packed` holds the head's keys and values from `origin` on, in room for
    // `room` keys; null: they are packed here, tile by tile.
    void block(std::int64_t b, std::int64_t kv, std::int64_t number, std::int64_t origin,
               const A* packed, std::int64_t room, Next next) const {
        const std::int64_t begin = block_begin(number), count = block_begin(number + 1) - begin;
        if (count <= 0) return;
        const Scratch scratch(
            (block_numbers() + (packed ? 0 : packed_numbers(TILE_KEYS))) *
            static_cast<std::int64_t>(sizeof(A)));
        const std::int64_t q_row = round_up(call.dim, 16);
        A* scores = scratch.as<A>();
        A* sums = scores + STEP * TILE_KEYS;
        A* query = sums + MOST_ROWS * value_width;
        A* weighed = query + MOST_ROWS * q_row;
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
            const std::int64_t begin_tile = (span.low - origin) / TILE_KEYS;
            const std::int64_t end_tile = (span.high - origin + TILE_KEYS - 1) / TILE_KEYS;
            const std::int64_t steps = (end_tile - begin_tile) * count;
            const std::int64_t rows_each = (next.end - next.begin + steps - 1) / steps;
            const std::int64_t keys_each = (next.high - next.low + steps - 1) / steps;
            const auto meanwhile = [&] { fetch_some(next, rows_each, keys_each); };
            for (std::int64_t low = origin + begin_tile * TILE_KEYS; low < span.high;
                 low += TILE_KEYS) {
                const std::int64_t high = least(low + TILE_KEYS, span.high);
                bool seen = false;
                for (std::int64_t r = 0; r < count && !seen; ++r) seen = !mask[r].none(low, high);
                if (!seen) continue;
                const A *keys = fresh, *values = fresh + TILE_KEYS * depth;
                std::int64_t value_row = COLUMNS<A>, panel = TILE_KEYS / M::PER * COLUMNS<A>;
                if (packed) {
                    keys = packed + (low - origin) * depth;
                    values = packed + room * depth + (low - origin) / M::PER * COLUMNS<A>;
                    panel = room / M::PER * COLUMNS<A>;
                } else {
                    pack(b, kv, low, high, TILE_KEYS, fresh, fresh + TILE_KEYS * depth);
                }
                if (in_place) {
                    values = reinterpret_cast<const A*>(row_of<T>(call.value, b, kv, low));
                    value_row = call.value.row;
                    panel = COLUMNS<A>;
                }
                tile(b, kv, begin, count, low, high, mask, state, query, q_row, keys, values,
                     value_row, panel, scores, weighed, sums, meanwhile);
            }
        }
        finish(b, kv, begin, count, mask, state, weighed, sums);
    }

    // A tile's rows, STEP at a time: their scores stay in the nearest cache until they have weighed the
    // values. meanwhile() is called once a row.
    template <class Meanwhile>
    void tile(std::int64_t b, std::int64_t kv, std::int64_t begin, std::int64_t count,
              std::int64_t low, std::int64_t high, const RowMask* mask, RowState<A>* state,
              const A* query, std::int64_t q_row, const A* keys, const A* values, std::int64_t value_row,
              std::int64_t panel, A* scores, A* weighed, A* sums, const Meanwhile& meanwhile) const {
        for (std::int64_t first = 0; first < count; first += STEP) {
            const std::int64_t some = least(STEP, count - first);
            const RowMask* rows = mask + first;
            // What each row sees of the tile, and what any of them does, in whole panels: under a
            // causal mask much of a short call lies outside.
            Span seen[STEP], all{0, 0};
            for (std::int64_t r = 0; r < some; ++r) {
                meanwhile();
                seen[r] = panels(rows[r], low, high);
                if (seen[r].low >= seen[r].high) continue;
                if (all.low >= all.high) all = seen[r];
                all = {least(all.low, seen[r].low), most(all.high, seen[r].high)};
            }
            if (all.low >= all.high) continue;
            for (std::int64_t j = all.low; j < all.high; j += PANEL<A>)
                score_rows<KEY_ROWS, A, M>(some, query + first * q_row, q_row, keys + j * depth, depth,
                                           scores + j, TILE_KEYS);
            A shrink[STEP], top[STEP];
            for (std::int64_t r = 0; r < some; ++r) {
                const std::int64_t from = seen[r].low, width = seen[r].high - from;
                if (width == 0) continue;
                const std::int64_t key = low + from, row = begin + first + r;
                A* s = scores + r * TILE_KEYS + from;
                if (!how.plain) {
                    const Bias& bias = call.bias;
                    const T* added = static_cast<const T*>(bias.data);
                    if (added)
                        added += b * bias.batch + (kv * groups + row % groups) * bias.head +
                                 row / groups * bias.row + key * bias.key;
                    adjust_scores(s, least(width, high - key), how, added, bias.key);
                }
                if (!rows[r].all(key, key + width)) hide_scores(s, width, key, rows[r]);
                top[r] = highest(s, width);
            }
            for (std::int64_t r = 0; r < some; ++r) {
                const std::int64_t from = seen[r].low, width = seen[r].high - from;
                A* s = scores + r * TILE_KEYS;
                // Weights of 0 where others of the step see more.
                const auto hide = [&](std::int64_t left, std::int64_t right) {
                    __builtin_memset(s + left / M::PER, 0,
                                     static_cast<std::size_t>((right - left) / M::PER) * sizeof(A));
                };
                shrink[r] = A(1);
                if (width == 0) {
                    hide(all.low, all.high);
                    continue;
                }
                RowState<A>& own = state[first + r];
                if constexpr (M::PER == 1) {
                    shrink[r] = weigh_row(s + from, width, how.slope, top[r], own);
                    weighed[first + r] = own.l;
                } else {
                    shrink[r] = weigh_pairs(s + from, width, how.slope, top[r], own,
                                            weighed[first + r], s + from / M::PER);
                }
                if (call.dropout > 0) {
                    const std::int64_t key = low + from, row = begin + first + r;
                    drop(s + from, least(width, high - key),
                         draw_of(call, b, kv * groups + row % groups, row / groups), key,
                         static_cast<A>(1.0 / (1.0 - call.dropout)));
                }
                hide(all.low, seen[r].low);
                hide(seen[r].high, all.high);
            }
            const std::int64_t n = least(all.high, high - low) - all.low, lane = all.low / M::PER;
            weigh_values<A, M>(some, call.value_dim,
                               {scores + lane, TILE_KEYS, 1, values + lane * value_row, value_row,
                                panel, (n + M::PER - 1) / M::PER, shrink},
                               sums + first * value_width, value_width);
        }
    }

    // The panels of the tile [low, high) in which a row sees keys, counted from `low`.
    static Span panels(const RowMask& row, std::int64_t low, std::int64_t high) {
        if (row.none(low, high)) return {0, 0};
        const std::int64_t first = most(row.first(), low) - low, last = least(row.last(), high) - low;
        return {first / PANEL<A> * PANEL<A>, round_up(last, PANEL<A>)};
    }

    void finish(std::int64_t b, std::int64_t kv, std::int64_t begin, std::int64_t count,
                const RowMask* mask, const RowState<A>* state, const A* weighed,
                const A* sums) const {
        for (std::int64_t r = 0; r < count; ++r)
            finish_row<T>(job, b, kv * groups + (begin + r) % groups, (begin + r) / groups, mask[r],
                          state[r], weighed[r], sums + r * value_width, InPlace<T>{call});
    }

    // Part `part` of the `parts` of a head, every parts-th block of its rows. What it reads often it
    // packs itself: memory that another core has written or read is slow to come by.
    void part_of_head(std::int64_t head, std::int64_t part, std::int64_t parts, const Next& after) const {
        const std::int64_t b = head / call.kv_heads, kv = head % call.kv_heads;
        const Span span = group_span(call, b, kv);
        const std::int64_t own = (blocks - part + parts - 1) / parts;
        if (own == 1)  // keys are met once: packed tile by tile, straight into the cache
            return block(b, kv, part, span.low, nullptr, 0, after);
        const std::int64_t room = padded(span.high - span.low);
        const Scratch scratch(packed_numbers(span.high - span.low) *
                              static_cast<std::int64_t>(sizeof(A)));
        A* packed = scratch.as<A>();
        pack(b, kv, span.low, span.high, room, packed, packed + room * depth);
        for (std::int64_t k = own - 1; k >= 0; --k) {
            Next next = after;
            if (k > 0) add_queries(next, head, part + (k - 1) * parts);
            const std::int64_t keys = after.high - after.low;
            next.low = after.low + keys * (own - 1 - k) / own;
            next.high = after.low + keys * (own - k) / own;
            block(b, kv, part + k * parts, span.low, packed, room, next);
        }
    }

    void run() const {
        const std::int64_t heads = call.batch * call.kv_heads;
        // As few parts a head as give every thread the same work.
        const std::int64_t uneven = heads >= 4 * call.threads ? 0 : heads % call.threads;
        const std::int64_t parts =
            uneven ? least(blocks, call.threads / std::gcd(uneven, std::int64_t{call.threads})) : 1;
        auto one = [&](std::int64_t item) {
            Next after;
            if (const std::int64_t next = item + call.threads; next < heads * parts)
                after = next_of(next / parts, next % parts, parts);
            part_of_head(item / parts, item % parts, parts, after);
        };
        parallel_for(call.threads, heads * parts, one);
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

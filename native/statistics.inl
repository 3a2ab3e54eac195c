// Statistics of every head of one batch element: row quantities, then every sum over rows.
//
// A block of rows meets its keys twice. First, head by head, an online pass finds each row's
// maximum, sum, entropy, spread of scores and strongest keys. Then all heads' weights of a tile
// stand side by side, as √p: one exponential gives √p and p, and products of two heads' √p give both
// Σ √(p p') and, squared, Σ p p'. Memory is linear in queries plus keys.
//
// Sums over rows are kept apart in a number of parts that the sizes alone decide, and added in
// their order: the bits do not depend on the number of threads.

template <class A>
struct StatisticsPass {
    static constexpr std::int64_t TILE = 128;
    // √p of one tile, all heads: about a quarter of a megabyte.
    static constexpr std::int64_t ALL_HEADS = 512;
    static constexpr std::int64_t MOST_PARTS = 16;
    static constexpr std::int64_t PART_BYTES = std::int64_t{96} << 20;
    static constexpr int w = W<A>;

    const Statistics& job;
    const Call& call;
    Scores<A> how;
    std::int64_t heads, groups, height, item_rows, items, q_row, parts, part_numbers;
    A* packed = nullptr;
    double* shared = nullptr;

    explicit StatisticsPass(const Statistics& j)
        : job(j), call(j.call), how(scores_of<A>(j.call)), heads(j.call.heads) {
        groups = call.groups();
        height = least<std::int64_t>(54, most<std::int64_t>(1, ALL_HEADS / heads));
        if (height > KEY_ROWS) height = height / KEY_ROWS * KEY_ROWS;
        // A cell of the pooled map belongs to one item, so items may be worked at side by side.
        item_rows = job.block_q * most<std::int64_t>(1, height / job.block_q);
        items = (call.queries + item_rows - 1) / item_rows;
        q_row = round_up(call.dim, 16);
        part_numbers = heads * (call.keys + job.distances_count + job.places_count + 3) +
                       2 * heads * heads;
        parts = PART_BYTES / (part_numbers * static_cast<std::int64_t>(sizeof(double)));
        parts = most<std::int64_t>(1, least(MOST_PARTS, least(parts, items)));
    }

    // What the rows of one part add up to.
    struct Part {
        double *received, *distances, *sinks, *duplicate, *induction, *hidden, *gram, *overlap;
    };
    Part part_of(std::int64_t number) const {
        double* at = shared + number * part_numbers;
        const auto next = [&at](std::int64_t n) {
            double* here = at;
            at += n;
            return here;
        };
        Part part;
        part.received = next(heads * call.keys);
        part.distances = next(heads * job.distances_count);
        part.sinks = next(heads * job.places_count);
        part.duplicate = next(heads);
        part.induction = next(heads);
        part.hidden = next(heads);
        part.gram = next(heads * heads);
        part.overlap = next(heads * heads);
        return part;
    }

    struct Row {
        RowMask mask;
        bool counts;
        A shift;    // m, the running maximum in log2 units, rounded up to a whole number
        A highest;  // the largest raw score
        double sum, weighted;  // Σ 2^(t − m) and Σ 2^(t − m)·(t − m)
        double seen, mean, squares;
        double whole;  // sum, and the sink's share
        A root;        // 1/√whole
    };

    // The working memory of one thread.
    struct Work {
        A *query, *scores, *root, *columns, *diagonals, *strongest;
        std::int64_t* strongest_keys;
        std::int64_t* match;
        Row* rows;
    };
    std::int64_t reach() const { return round_up(height + TILE, 16) + 16; }
    std::int64_t work_bytes() const {
        const std::int64_t all = heads * height;
        return (all * q_row + height * TILE + all * TILE + TILE + reach() + all * job.top) *
                   static_cast<std::int64_t>(sizeof(A)) +
               (all * job.top + 4 * height) * static_cast<std::int64_t>(sizeof(std::int64_t)) +
               all * static_cast<std::int64_t>(sizeof(Row)) + 64 * 9;
    }
    Work work_of(const Scratch& scratch) const {
        char* at = scratch.as<char>();
        const auto next = [&at](std::int64_t bytes) {
            char* here = at;
            at += round_up(bytes, 64);
            return here;
        };
        const std::int64_t all = heads * height, a = sizeof(A), i = sizeof(std::int64_t);
        Work work;
        work.query = reinterpret_cast<A*>(next(all * q_row * a));
        work.scores = reinterpret_cast<A*>(next(height * TILE * a));
        work.root = reinterpret_cast<A*>(next(all * TILE * a));
        work.columns = reinterpret_cast<A*>(next(TILE * a));
        work.diagonals = reinterpret_cast<A*>(next(reach() * a));
        work.strongest = reinterpret_cast<A*>(next(all * job.top * a));
        work.strongest_keys = reinterpret_cast<std::int64_t*>(next(all * job.top * i));
        work.match = reinterpret_cast<std::int64_t*>(next(4 * height * i));
        work.rows = reinterpret_cast<Row*>(next(all * static_cast<std::int64_t>(sizeof(Row))));
        return work;
    }

    const A* bias_of(std::int64_t h, std::int64_t i, std::int64_t key) const {
        const A* from = static_cast<const A*>(call.bias.data);
        return from ? from + h * call.bias.head + i * call.bias.row + key * call.bias.key : nullptr;
    }

    // Raw scores of `count` rows of one head and keys [low, high), −∞ where hidden, whole vectors
    // wide. Rows that see nothing of the tile are left alone.
    void score(std::int64_t h, std::int64_t begin, std::int64_t count, std::int64_t low,
               std::int64_t high, const Work& work) const {
        const std::int64_t width = round_up(high - low, PANEL<A>);
        const A* keys = packed + (h / groups * round_up(call.keys, PANEL<A>) + low) * call.dim;
        const A* query = work.query + h * height * q_row;
        for (std::int64_t j = 0; j < width; j += PANEL<A>)
            score_rows<KEY_ROWS>(count, query, q_row, keys + j * call.dim, call.dim,
                                 work.scores + j, TILE);
        for (std::int64_t r = 0; r < count; ++r) {
            const Row& row = work.rows[h * height + r];
            if (!row.counts || row.mask.none(low, high)) continue;
            A* s = work.scores + r * TILE;
            if (!how.plain)
                adjust_scores(s, high - low, how, bias_of(h, begin + r, low), call.bias.key);
            if (!row.mask.all(low, low + width)) hide_scores(s, width, low, row.mask);
        }
    }

    // --- the first pass: what one row is -------------------------------------------------------

    void absorb(Row& row, const A* s, std::int64_t low, std::int64_t width, A* strongest,
                std::int64_t* strongest_keys) const {
        const bool all = row.mask.all(low, low + width);
        const A nothing = A(-INFINITY);
        VecOf<A> high = fill(nothing), total{}, seen{};
        if (all) {
            for (std::int64_t j = 0; j < width; j += w) {
                const VecOf<A> x = load(s + j);
                high = maximum(x, high);
                total += x;
            }
        } else {
            for (std::int64_t j = 0; j < width; j += w) {
                const VecOf<A> x = load(s + j);
                high = maximum(x, high);
                total += x > nothing ? x : VecOf<A>{};
                seen += x > nothing ? fill(A(1)) : VecOf<A>{};
            }
        }
        const A top = largest<A>(high);
        if (!(top > nothing)) return;
        const double count = all ? static_cast<double>(width) : sum<A>(seen);
        const A mean = static_cast<A>(sum<A>(total) / count);
        if (top > row.highest) {
            row.highest = top;
            const A m = std::ceil(top * how.slope);
            if (m > row.shift) {
                if (row.sum > 0) {
                    const double fall = static_cast<double>(row.shift) - m;
                    const double shrink = std::exp2(fall);
                    row.weighted = shrink * (row.weighted + fall * row.sum);
                    row.sum *= shrink;
                }
                row.shift = m;
            }
        }
        const VecOf<A> times = fill(how.slope), less = fill(-row.shift), middle = fill(mean);
        // 2^floor is 0, and 0 · floor is 0 where 0 · (−∞) would be NaN.
        const VecOf<A> floor = fill(A(sizeof(A) == 4 ? -200 : -1100));
        VecOf<A> l{}, acc{}, square{};
        for (std::int64_t j = 0; j < width; j += w) {
            const VecOf<A> x = load(s + j);
            const VecOf<A> t = maximum(fma(x, times, less), floor);
            const VecOf<A> e = exp2(t);
            l += e;
            acc = fma(e, t, acc);
            const VecOf<A> apart = all ? x - middle : (x > nothing ? x - middle : VecOf<A>{});
            square = fma(apart, apart, square);
        }
        row.sum += sum<A>(l);
        row.weighted += sum<A>(acc);
        // Chan 1979 (Stanford STAN-CS-79-773, equations 2.1): means and squares merge exactly.
        const double both = row.seen + count, gap = row.seen > 0 ? mean - row.mean : 0.0;
        row.squares += sum<A>(square) + gap * gap * row.seen * count / both;
        row.mean = row.seen > 0 ? row.mean + gap * count / both : mean;
        row.seen = both;
        if (job.top) offer(s, low, width, strongest, strongest_keys);
    }

    // The strongest keys of a row, strongest first.
    void offer(const A* s, std::int64_t low, std::int64_t width, A* strongest,
               std::int64_t* keys) const {
        const std::int64_t last = job.top - 1;
        constexpr std::int64_t step = 2 * w;
        for (std::int64_t j = 0; j < width; j += step) {
            if (!(largest<A>(maximum(load(s + j), load(s + j + w))) > strongest[last])) continue;
            for (std::int64_t i = j; i < j + step; ++i) {
                if (!(s[i] > strongest[last])) continue;
                std::int64_t place = last;
                for (; place > 0 && s[i] > strongest[place - 1]; --place) {
                    strongest[place] = strongest[place - 1];
                    keys[place] = keys[place - 1];
                }
                strongest[place] = s[i];
                keys[place] = low + i;
            }
        }
    }

    void finish(std::int64_t h, std::int64_t i, Row& row, const A* strongest,
                const std::int64_t* keys) const {
        constexpr double LN2 = 0.6931471805599453;
        double from_sink = 0;
        if (call.sinks) {
            const double sink = static_cast<const A*>(call.sinks)[h] / LN2;
            if (sink > row.shift) {
                const double m = std::ceil(sink), fall = static_cast<double>(row.shift) - m;
                const double shrink = std::exp2(fall);
                row.weighted = shrink * (row.weighted + fall * row.sum);
                row.sum *= shrink;
                row.shift = static_cast<A>(m);
            }
            from_sink = std::exp2(sink - row.shift);
        }
        row.whole = row.sum + from_sink;
        row.root = static_cast<A>(1 / std::sqrt(row.whole));
        const double log = std::log(row.whole), mass = row.sum / row.whole;
        const std::int64_t at = h * call.queries + i;
        job.lse[at] = static_cast<double>(row.shift) * LN2 + log;
        job.mass[at] = mass;
        // H = −Σ p ln p with ln p = (s − m) − ln l. Rounding may leave a hair below 0.
        job.entropy[at] = most(0.0, mass * log - row.weighted * LN2 / row.whole);
        const auto weight = [&](A s) {
            return std::exp2(static_cast<double>(s) * how.slope - row.shift) / row.whole;
        };
        job.largest[at] = weight(row.highest);
        job.sink[at] = from_sink / row.whole;
        job.spread[at] = std::sqrt(row.squares) * how.slope * LN2;
        A* weights = static_cast<A*>(job.top_weights) + at * job.top;
        for (std::int64_t k = 0; k < job.top && keys[k] >= 0; ++k) {
            weights[k] = static_cast<A>(weight(strongest[k]));
            job.top_keys[at * job.top + k] = keys[k];
        }
    }

    // --- the second pass: sums over rows -----------------------------------------------------------

    // One row's scores become √p, and p joins the columns and the diagonals.
    void weigh(const Row& row, const A* s, std::int64_t width, A* root, A* columns,
               A* diagonals) const {
        const VecOf<A> times = fill(how.slope / 2), less = fill(-row.shift / 2);
        const VecOf<A> share = fill(row.root);
        for (std::int64_t j = 0; j < width; j += w) {
            const VecOf<A> u = exp2(fma(load(s + j), times, less)) * share;
            const VecOf<A> p = u * u;
            store(root + j, u);
            store(columns + j, load(columns + j) + p);
            store(diagonals + j, load(diagonals + j) + p);
        }
    }

    void add_columns(std::int64_t h, std::int64_t cell_row, std::int64_t low, std::int64_t high,
                     A* columns, const Part& part) const {
        double* received = part.received + h * call.keys;
        double* cells = job.cells + (h * job.cell_rows + cell_row) * job.cell_columns;
        for (std::int64_t j = low; j < high;) {
            const std::int64_t cell = j / job.block_k;
            const std::int64_t end = least(high, (cell + 1) * job.block_k);
            double all = 0;
            for (; j < end; ++j) {
                received[j] += columns[j - low];
                all += columns[j - low];
            }
            cells[cell] += all;
        }
        __builtin_memset(columns, 0, TILE * sizeof(A));
    }

    void add_diagonals(std::int64_t h, std::int64_t begin, std::int64_t count, std::int64_t low,
                       std::int64_t high, A* diagonals, const Part& part) const {
        // Element k holds the weights at key − row = low − begin − (count − 1) + k.
        double* distances = part.distances + h * job.distances_count;
        const std::int64_t reach = count - 1 + high - low;
        const std::int64_t farthest = job.at + begin + (count - 1) - low - job.distance_low;
        for (std::int64_t k = 0; k < reach; ++k) distances[farthest - k] += diagonals[k];
        __builtin_memset(diagonals, 0, static_cast<std::size_t>(count + TILE) * sizeof(A));
    }

    // What needs single weights of a row: distances of uneven positions, first tokens, matches,
    // weight outside the declared mask.
    void single_weights(std::int64_t h, std::int64_t i, const Row& row, std::int64_t low,
                        std::int64_t high, const A* root, const std::int64_t* match,
                        const Part& part) const {
        const auto p = [&](std::int64_t key) {
            return static_cast<double>(root[key - low]) * root[key - low];
        };
        if (!job.even) {
            double* distances = part.distances + h * job.distances_count;
            for (std::int64_t j = low; j < high; ++j)
                if (root[j - low] != 0)
                    distances[job.query_at[i] - job.key_at[j] - job.distance_low] += p(j);
        }
        for (std::int64_t n = 0; n < job.first_count; ++n) {
            const std::int64_t key = job.first_keys[2 * n], place = job.first_keys[2 * n + 1];
            if (key >= low && key < high && job.query_at[i] >= job.places[place])
                part.sinks[h * job.places_count + place] += p(key);
        }
        if (match) {
            for (std::int64_t n = match[0]; n < match[1]; ++n) part.duplicate[h] += p(job.order[n]);
            for (std::int64_t n = match[2]; n < match[3]; ++n)
                part.induction[h] += p(job.order[n] + 1);
        }
        if (job.has_declared) {
            Call stated;
            stated.keys = call.keys;
            stated.mask = job.declared;
            const RowMask mask = row_mask(stated, 0, h, i);
            const std::int64_t first = most(low, row.mask.first()), last = least(high, row.mask.last());
            if (first < last && !mask.all(first, last))
                for (std::int64_t j = first; j < last; ++j)
                    if (root[j - low] != 0 && !mask.sees(j)) part.hidden[h] += p(j);
        }
    }

    // Which of a row's matches lie in a tile: [0], [1] the keys themselves, [2], [3] those whose next
    // key does.
    void find_matches(std::int64_t i, std::int64_t low, std::int64_t high, std::int64_t* match) const {
        const std::int64_t* begin = job.order + job.match_first[i];
        const std::int64_t* end = begin + job.match_count[i];
        const auto place = [&](std::int64_t key) {
            const std::int64_t *a = begin, *b = end;
            while (a < b) {
                const std::int64_t* middle = a + (b - a) / 2;
                if (*middle < key) {
                    a = middle + 1;
                } else {
                    b = middle;
                }
            }
            return a - job.order;
        };
        match[0] = place(low);
        match[1] = place(high);
        match[2] = place(low - 1);
        match[3] = place(high - 1);
    }

    // Σ √(p p') and Σ p p' of NH × NG pairs of heads over the rows of a tile.
    template <int NH, int NG>
    HW_INLINE void gram_of(std::int64_t h, std::int64_t g, std::int64_t count, std::int64_t width,
                           const A* root, const Part& part) const {
        VecOf<A> overlap[NH][NG] = {}, gram[NH][NG] = {};
        const std::int64_t step = height * TILE;
        const A *a = root + h * step, *b = root + g * step;
        for (std::int64_t r = 0; r < count; ++r, a += TILE, b += TILE)
            for (std::int64_t j = 0; j < width; j += w) {
                VecOf<A> x[NH], y[NG];
#pragma GCC unroll 4
                for (int n = 0; n < NH; ++n) x[n] = load(a + n * step + j);
#pragma GCC unroll 4
                for (int n = 0; n < NG; ++n) y[n] = load(b + n * step + j);
#pragma GCC unroll 4
                for (int n = 0; n < NH; ++n)
#pragma GCC unroll 4
                    for (int k = 0; k < NG; ++k) {
                        const VecOf<A> both = x[n] * y[k];
                        overlap[n][k] += both;
                        gram[n][k] = fma(both, both, gram[n][k]);
                    }
            }
        for (int n = 0; n < NH; ++n)
            for (int k = 0; k < NG; ++k) {
                part.overlap[(h + n) * heads + g + k] += sum<A>(overlap[n][k]);
                part.gram[(h + n) * heads + g + k] += sum<A>(gram[n][k]);
            }
    }

    // Pairs on and above the diagonal; a block of two by two holds one below it too, which the end
    // overwrites.
    void grams(std::int64_t count, std::int64_t width, const A* root, const Part& part) const {
        if (!job.pairs) {
            for (std::int64_t h = 0; h < heads; ++h) gram_of<1, 1>(h, h, count, width, root, part);
            return;
        }
        for (std::int64_t h = 0; h < heads; h += 2) {
            const bool wide = h + 1 < heads;
            for (std::int64_t g = h; g < heads; g += 2) {
                if (g + 1 < heads) {
                    gram_of<2, 2>(h, g, count, width, root, part);
                } else if (wide) {
                    gram_of<2, 1>(h, g, count, width, root, part);
                } else {
                    gram_of<1, 1>(h, g, count, width, root, part);
                }
            }
        }
    }

    // --- a block of rows ---------------------------------------------------------------------------

    bool counts(std::int64_t h, std::int64_t i) const {
        return job.active[h * job.active_head + i];
    }

    void start(std::int64_t begin, std::int64_t count, const Work& work, Span& span) const {
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t r = 0; r < count; ++r) {
                Row& row = work.rows[h * height + r];
                row = {};
                row.mask = row_mask(call, 0, h, begin + r);
                row.counts = counts(h, begin + r);
                row.shift = row.highest = A(-INFINITY);
                if (row.counts) widen_span(span, row.mask);
                const A* from = row_of<A>(call.query, 0, h, begin + r);
                A* to = work.query + (h * height + r) * q_row;
                for (std::int64_t d = 0; d < call.dim; d += w)
                    store(to + d, load_some(from + d, call.dim - d) * how.query_factor);
                for (std::int64_t k = 0; k < job.top; ++k) {
                    work.strongest[(h * height + r) * job.top + k] = A(-INFINITY);
                    work.strongest_keys[(h * height + r) * job.top + k] = -1;
                }
            }
    }

    void block(std::int64_t begin, std::int64_t count, const Work& work, const Part& part) const {
        Span span{0, 0};
        start(begin, count, work, span);
        if (span.low >= span.high) return;
        const std::int64_t first = span.low / TILE * TILE;
        for (std::int64_t h = 0; h < heads; ++h) {
            Row* rows = work.rows + h * height;
            A* strongest = work.strongest + h * height * job.top;
            std::int64_t* keys = work.strongest_keys + h * height * job.top;
            for (std::int64_t low = first; low < span.high; low += TILE) {
                const std::int64_t high = least(low + TILE, span.high);
                if (!seen(rows, count, low, high)) continue;
                score(h, begin, count, low, high, work);
                for (std::int64_t r = 0; r < count; ++r)
                    if (rows[r].counts && !rows[r].mask.none(low, high))
                        absorb(rows[r], work.scores + r * TILE, low, round_up(high - low, PANEL<A>),
                               strongest + r * job.top, keys + r * job.top);
            }
            for (std::int64_t r = 0; r < count; ++r)
                if (rows[r].counts)
                    finish(h, begin + r, rows[r], strongest + r * job.top, keys + r * job.top);
        }
        __builtin_memset(work.columns, 0, TILE * sizeof(A));
        __builtin_memset(work.diagonals, 0, static_cast<std::size_t>(reach()) * sizeof(A));
        for (std::int64_t low = first; low < span.high; low += TILE)
            add_tile(begin, count, low, least(low + TILE, span.high), work, part);
    }

    bool seen(const Row* rows, std::int64_t count, std::int64_t low, std::int64_t high) const {
        for (std::int64_t r = 0; r < count; ++r)
            if (rows[r].counts && !rows[r].mask.none(low, high)) return true;
        return false;
    }

    void add_tile(std::int64_t begin, std::int64_t count, std::int64_t low, std::int64_t high,
                  const Work& work, const Part& part) const {
        const std::int64_t width = round_up(high - low, PANEL<A>);
        bool any = false;
        for (std::int64_t h = 0; h < heads && !any; ++h)
            any = seen(work.rows + h * height, count, low, high);
        if (!any) return;
        if (job.order)
            for (std::int64_t r = 0; r < count; ++r)
                find_matches(begin + r, low, high, work.match + 4 * r);
        for (std::int64_t h = 0; h < heads; ++h) {
            const Row* rows = work.rows + h * height;
            A* root = work.root + h * height * TILE;
            if (!seen(rows, count, low, high)) {
                __builtin_memset(root, 0, static_cast<std::size_t>(count * TILE) * sizeof(A));
                continue;
            }
            score(h, begin, count, low, high, work);
            std::int64_t cell_row = begin / job.block_q;
            for (std::int64_t r = 0; r < count; ++r) {
                const std::int64_t i = begin + r;
                if (i / job.block_q != cell_row) {
                    add_columns(h, cell_row, low, high, work.columns, part);
                    cell_row = i / job.block_q;
                }
                if (!rows[r].counts || rows[r].mask.none(low, high)) {
                    __builtin_memset(root + r * TILE, 0, static_cast<std::size_t>(width) * sizeof(A));
                    continue;
                }
                weigh(rows[r], work.scores + r * TILE, width, root + r * TILE, work.columns,
                      work.diagonals + (count - 1 - r));
                single_weights(h, i, rows[r], low, high, root + r * TILE,
                               job.order ? work.match + 4 * r : nullptr, part);
            }
            add_columns(h, cell_row, low, high, work.columns, part);
            if (job.even) add_diagonals(h, begin, count, low, high, work.diagonals, part);
        }
        grams(count, width, work.root, part);
    }

    // --- all of it ---------------------------------------------------------------------------------

    void run() {
        const std::int64_t room = round_up(call.keys, PANEL<A>);
        const Scratch keys(call.kv_heads * room * call.dim * static_cast<std::int64_t>(sizeof(A)));
        packed = keys.as<A>();
        constexpr std::int64_t step = 1024;  // a whole number of panels
        const std::int64_t steps = (call.keys + step - 1) / step;
        auto pack = [&](std::int64_t n) {
            const std::int64_t kv = n / steps, low = n % steps * step;
            pack_keys(row_of<A>(call.key, 0, kv, low), call.key.row, least(step, call.keys - low),
                      call.dim, packed + (kv * room + low) * call.dim);
        };
        parallel_for(call.threads, call.kv_heads * steps, pack);

        const Scratch sums(parts * part_numbers * static_cast<std::int64_t>(sizeof(double)));
        shared = sums.as<double>();
        __builtin_memset(shared, 0,
                         static_cast<std::size_t>(parts * part_numbers) * sizeof(double));
        auto one = [&](std::int64_t number) {
            const Scratch scratch(work_bytes());
            const Work work = work_of(scratch);
            const Part part = part_of(number);
            // Items in turn: under a causal mask every part then has about as much to do.
            for (std::int64_t item = number; item < items; item += parts) {
                const std::int64_t end = least(call.queries, (item + 1) * item_rows);
                for (std::int64_t begin = item * item_rows; begin < end; begin += height)
                    block(begin, least(height, end - begin), work, part);
            }
        };
        parallel_for(call.threads, parts, one);
        for (std::int64_t number = 0; number < parts; ++number) join(part_of(number));
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t g = 0; g < h && job.pairs; ++g) {
                job.gram[h * heads + g] = job.gram[g * heads + h];
                job.overlap[h * heads + g] = job.overlap[g * heads + h];
            }
    }

    static void add(double* to, const double* from, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
    }
    void join(const Part& part) const {
        add(job.received, part.received, heads * call.keys);
        add(job.distances, part.distances, heads * job.distances_count);
        add(job.sink_sums, part.sinks, heads * job.places_count);
        add(job.duplicate, part.duplicate, heads);
        add(job.induction, part.induction, heads);
        add(job.hidden, part.hidden, heads);
        if (job.pairs) {
            add(job.gram, part.gram, heads * heads);
            add(job.overlap, part.overlap, heads * heads);
        } else {
            for (std::int64_t h = 0; h < heads; ++h) job.gram[h] += part.gram[h * heads + h];
        }
    }
};

void statistics(const Statistics& job) {
    if (job.call.dtype == Dtype::f64) {
        StatisticsPass<double>(job).run();
    } else {
        StatisticsPass<float>(job).run();
    }
}

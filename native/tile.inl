// The two matrix products of a tile, held in registers. Each number is its own chain of fused
// multiply-adds in one order, whatever the number of rows beside it.
//
// M says what one lane holds (pack.inl): a number, or with AVX512-BF16 a pair of them. Sizes along
// the sums (dim, n) count lanes.

// scores (MR, PANEL) = q (MR, dim) · panel (dim, PANEL)
template <int MR, class A, class M = Singles<A>>
HW_INLINE void score_panel(const A* q, std::int64_t q_row, const A* panel, std::int64_t dim, A* scores,
                           std::int64_t row) {
    constexpr int w = W<A>;
    VecOf<A> sum[MR][KEY_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < KEY_VECTORS; ++n) sum[i][n] = VecOf<A>{};
    for (std::int64_t d = 0; d < dim; ++d) {
        VecOf<A> k[KEY_VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < KEY_VECTORS; ++n) k[n] = load(panel + d * KEY_VECTORS * w + n * w);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const auto x = M::spread(q + i * q_row + d);
#pragma GCC unroll 4
            for (int n = 0; n < KEY_VECTORS; ++n) sum[i][n] = M::multiply(x, k[n], sum[i][n]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < KEY_VECTORS; ++n) store(scores + i * row + n * w, sum[i][n]);
}

// out (MR, NV vectors) = out · shrink + p (MR, n) · v (n, NV vectors), where weight (i, j) of p lies
// at i · p_row + j · p_step: a turned-over p costs nothing, each weight is spread over a vector anyway.
template <int MR, int NV, class T, class A = Arithmetic<T>, class M = Singles<A>>
HW_INLINE void value_panel(const A* p, std::int64_t p_row, std::int64_t p_step, const T* v,
                           std::int64_t v_row, std::int64_t n, const A* shrink, A* out,
                           std::int64_t out_row) {
    constexpr int w = W<A>;
    VecOf<A> sum[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) sum[i][c] = VecOf<A>{};
    for (std::int64_t j = 0; j < n; ++j) {
        VecOf<A> x[NV];
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) x[c] = load_wide(v + j * v_row + c * w);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const auto weight = M::spread(p + i * p_row + j * p_step);
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) sum[i][c] = M::multiply(weight, x[c], sum[i][c]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
        const VecOf<A> less = fill(shrink[i]);
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) {
            A* to = out + i * out_row + c * w;
            store(to, fma(load(to), less, sum[i][c]));
        }
    }
}

// The same for any number of rows, in as few steps as there are registers for.
template <int MR, class A, class M = Singles<A>>
HW_INLINE void score_rows(std::int64_t rows, const A* q, std::int64_t q_row, const A* panel,
                          std::int64_t dim, A* scores, std::int64_t row) {
    if constexpr (MR == KEY_ROWS) {
        for (; rows >= MR; rows -= MR, q += MR * q_row, scores += MR * row)
            score_panel<MR, A, M>(q, q_row, panel, dim, scores, row);
    }
    if constexpr (MR > 1) {
        if (rows == MR - 1) return score_panel<MR - 1, A, M>(q, q_row, panel, dim, scores, row);
        return score_rows<MR - 1, A, M>(rows, q, q_row, panel, dim, scores, row);
    }
}

// What a product weighs its values by, and where they lie: panels `panel` numbers apart, rows of a
// panel `v_row` apart.
template <class A>
struct Weighing {
    const A* p;
    std::int64_t p_row, p_step;
    const A* v;
    std::int64_t v_row, panel;
    std::int64_t n;
    const A* shrink;
};

template <int MR, int NV, class M, class A>
HW_INLINE void value_rows(std::int64_t rows, Weighing<A> by, A* out, std::int64_t out_row) {
    if constexpr (MR == VALUE_ROWS) {
        for (; rows >= MR; rows -= MR, by.p += MR * by.p_row, by.shrink += MR, out += MR * out_row)
            value_panel<MR, NV, A, A, M>(by.p, by.p_row, by.p_step, by.v, by.v_row, by.n,
                                         by.shrink, out, out_row);
    }
    if constexpr (MR > 1) {
        if (rows == MR - 1)
            return value_panel<MR - 1, NV, A, A, M>(by.p, by.p_row, by.p_step, by.v, by.v_row,
                                                    by.n, by.shrink, out, out_row);
        return value_rows<MR - 1, NV, M>(rows, by, out, out_row);
    }
}

// out (rows, dim) = out · shrink + p · v: full panels, then the vectors that are left. Columns up to
// a whole number of vectors are written.
template <class A, class M = Singles<A>>
void weigh_values(std::int64_t rows, std::int64_t dim, Weighing<A> by, A* out,
                  std::int64_t out_row) {
    constexpr int w = W<A>, columns = COLUMNS<A>;
    for (std::int64_t c = 0; c < dim; c += columns, by.v += by.panel, out += columns) {
        const std::int64_t vectors = (least<std::int64_t>(columns, dim - c) + w - 1) / w;
        if (vectors == VALUE_VECTORS)
            value_rows<VALUE_ROWS, VALUE_VECTORS, M>(rows, by, out, out_row);
        else if (vectors == 1)
            value_rows<VALUE_ROWS, 1, M>(rows, by, out, out_row);
        else if (VALUE_VECTORS > 2 && vectors == 2)
            value_rows<VALUE_ROWS, 2, M>(rows, by, out, out_row);
        else if (VALUE_VECTORS > 3)
            value_rows<VALUE_ROWS, 3, M>(rows, by, out, out_row);
    }
}

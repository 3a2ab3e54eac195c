// Keys and values laid out as the inner loops read them, converted to arithmetic once.
//
// K: panels of PANEL keys, each (dim, PANEL): one step of the dot product reads consecutive numbers.
// V: panels of COLUMNS columns, each (keys, COLUMNS). Both are padded with zeros.

template <class A>
constexpr int W = Vec<A>::lanes;
// Vectors across and rows down in one register tile: QKᵀ and PV. They fill the register file, less
// what one step loads.
constexpr int KEY_VECTORS = 2;
constexpr int KEY_ROWS = REGISTERS == 32 ? 12 : 6;
constexpr int VALUE_VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int VALUE_ROWS = 6;
template <class A>
constexpr int PANEL = KEY_VECTORS * W<A>;
template <class A>
constexpr int COLUMNS = VALUE_VECTORS * W<A>;

// What one lane holds, how it is loaded from storage, and what multiplies two of them. Singles: one
// number. Pairs (pairs.inl): two bfloat16 numbers side by side.
template <class A>
struct Singles {
    static constexpr int PER = 1;
    // Lanes lane … lane + W − 1 of a row of `dim` numbers, zeros after them.
    template <class T>
    static HW_INLINE VecOf<A> along(const T* row, std::int64_t lane, std::int64_t dim) {
        return load_some(row + lane, dim - lane);
    }
    // PER rows, `apart` numbers apart, of which `rows` are there; the first `width` columns.
    template <class T>
    static HW_INLINE VecOf<A> across(const T* p, std::int64_t, std::int64_t, std::int64_t width) {
        return load_some(p, width);
    }
    // Stores W numbers of a row, number `d` first.
    static HW_INLINE void put(A* row, std::int64_t d, VecOf<A> x) { store(row + d, x); }
    static HW_INLINE VecOf<A> spread(const A* lane) { return fill(*lane); }
    static HW_INLINE VecOf<A> multiply(VecOf<A> x, VecOf<A> y, VecOf<A> sum) { return fma(x, y, sum); }
};

template <int STEP, bool UPPER, class A, int... I>
HW_INLINE VecOf<A> swap_lanes(VecOf<A> a, VecOf<A> b, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    if constexpr (UPPER) {
        return __builtin_shufflevector(a, b, ((I & STEP) ? n + I : I + STEP)...);
    } else {
        return __builtin_shufflevector(a, b, ((I & STEP) ? n + I - STEP : I)...);
    }
}

// A square of vectors turned over its diagonal: blocks off the diagonal change places, halves first.
template <int STEP, class A>
HW_INLINE void transpose(VecOf<A>* v) {
    if constexpr (STEP > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < W<A>; ++i) {
            if (i & STEP) continue;
            const VecOf<A> a = v[i], b = v[i + STEP];
            using All = std::make_integer_sequence<int, W<A>>;
            v[i] = swap_lanes<STEP, false, A>(a, b, All{});
            v[i + STEP] = swap_lanes<STEP, true, A>(a, b, All{});
        }
        transpose<STEP / 2, A>(v);
    }
}

// n keys from `key` on, `row` numbers apart, into as many panels as they need.
template <class T, class M = Singles<Arithmetic<T>>>
void pack_keys(const T* key, std::int64_t row, std::int64_t n, std::int64_t dim,
               Arithmetic<T>* packed) {
    using A = Arithmetic<T>;
    constexpr int w = W<A>, panel = PANEL<A>;
    const std::int64_t depth = (dim + M::PER - 1) / M::PER;
    for (std::int64_t j = 0; j < n; j += w) {
        A* to = packed + j / panel * panel * depth + j % panel;
        const std::int64_t some = least<std::int64_t>(w, n - j);
        const T* from = key + j * row;
        for (std::int64_t d = 0; d < depth; d += w) {
            const std::int64_t width = least<std::int64_t>(w, depth - d);
            VecOf<A> v[w];
#pragma GCC unroll 16
            for (int i = 0; i < w; ++i)
                v[i] = i < some ? M::along(from + i * row, d, dim) : VecOf<A>{};
            transpose<w / 2, A>(v);
#pragma GCC unroll 16
            for (int i = 0; i < w; ++i)
                if (i < width) store(to + (d + i) * panel, v[i]);
        }
    }
    const std::int64_t written = round_up(n, w);
    if (written % panel) {
        A* last = packed + written / panel * panel * depth;
        for (std::int64_t d = 0; d < depth; ++d)
            for (std::int64_t j = written % panel; j < panel; ++j) last[d * panel + j] = 0;
    }
}

// n values into panels that hold `keys` lanes each (keys, or pairs of keys).
template <class T, class M = Singles<Arithmetic<T>>>
void pack_values(const T* value, std::int64_t row, std::int64_t n, std::int64_t dim,
                 std::int64_t keys, Arithmetic<T>* packed) {
    using A = Arithmetic<T>;
    constexpr int w = W<A>, columns = COLUMNS<A>;
    for (std::int64_t c = 0; c < dim; c += columns) {
        A* to = packed + c * keys;
        for (std::int64_t j = 0; j < n; j += M::PER)
            for (std::int64_t d = 0; d < columns; d += w) {
                const std::int64_t width = most<std::int64_t>(0, dim - c - d);
                const VecOf<A> v =
                    width > 0 ? M::across(value + j * row + c + d, row, n - j, width) : VecOf<A>{};
                store(to + j / M::PER * columns + d, v);
            }
    }
}

// One row, in double precision, exactly as the definition has it. Rows come here where the fast path
// met a number that is not finite: a NaN or infinity in a key or value, seen or hidden, or a product
// that left float's range.

template <class T>
inline const T* row_of(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t i) {
    return static_cast<const T*>(t.data) + b * t.batch + h * t.head + i * t.row;
}

// Keys and values as they lie in a call. Other ways to store them offer the same two.
template <class T>
struct InPlace {
    const Call& call;

    double dot(std::int64_t b, std::int64_t kv, std::int64_t j, const T* q) const {
        const T* k = row_of<T>(call.key, b, kv, j);
        double part[4] = {};
        std::int64_t d = 0;
        for (; d + 4 <= call.dim; d += 4)
            for (int n = 0; n < 4; ++n)
                part[n] += static_cast<double>(widen(q[d + n])) * static_cast<double>(widen(k[d + n]));
        for (; d < call.dim; ++d)
            part[0] += static_cast<double>(widen(q[d])) * static_cast<double>(widen(k[d]));
        return (part[0] + part[1]) + (part[2] + part[3]);
    }
    // out += p · value
    void add(std::int64_t b, std::int64_t kv, std::int64_t j, double p, double* out) const {
        const T* v = row_of<T>(call.value, b, kv, j);
        for (std::int64_t d = 0; d < call.value_dim; ++d)
            out[d] += p * static_cast<double>(widen(v[d]));
    }
};

// The final score of one visible key: scaled, capped, biased. −inf where the bias hides it.
template <class T, class Stored>
inline double slow_score(const Call& call, const Stored& stored, std::int64_t b, std::int64_t h,
                         std::int64_t i, std::int64_t j) {
    double s = stored.dot(b, h / call.groups(), j, row_of<T>(call.query, b, h, i)) * call.scale;
    if (call.softcap > 0) s = call.softcap * std::tanh(s / call.softcap);
    if (call.bias.data) {
        const double bias = widen(static_cast<const T*>(
            call.bias.data)[b * call.bias.batch + h * call.bias.head + i * call.bias.row +
                            j * call.bias.key]);
        if (bias == -INFINITY) return -INFINITY;
        s += bias;
    }
    return s;
}

// Whether the bias hides all that the mask shows: common for padding in dense additive masks, and then
// there is nothing to compute.
template <class T>
inline bool bias_hides_all(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i,
                           const RowMask& mask) {
    if (!call.bias.data || mask.empty()) return false;
    const T* bias = static_cast<const T*>(call.bias.data) + b * call.bias.batch +
                    h * call.bias.head + i * call.bias.row;
    for (std::int64_t j = mask.first(); j < mask.last(); ++j)
        if (mask.sees(j) && !(widen(bias[j * call.bias.key]) == -INFINITY)) return false;
    return true;
}

// Writes the row's output (value_dim numbers) and returns its logsumexp.
template <class T, class Stored>
inline double slow_row(const Call& call, const Stored& stored, std::int64_t b, std::int64_t h,
                       std::int64_t i, T* output) {
    const RowMask mask = row_mask(call, b, h, i);
    if (bias_hides_all<T>(call, b, h, i, mask)) {
        for (std::int64_t d = 0; d < call.value_dim; ++d) output[d] = narrow<T>(0);
        return -INFINITY;
    }
    const std::int64_t low = mask.empty() ? 0 : mask.first(), high = mask.empty() ? 0 : mask.last();
    const Scratch scratch((high - low + call.value_dim) * static_cast<std::int64_t>(sizeof(double)));
    double* score = scratch.as<double>();
    double* out = score + (high - low);
    double top = -INFINITY;
    bool nan = false;
    for (std::int64_t j = low; j < high; ++j) {
        const double s = mask.sees(j) ? slow_score<T>(call, stored, b, h, i, j) : -INFINITY;
        score[j - low] = s;
        if (s > top) top = s;
        nan = nan || s != s;
    }
    for (std::int64_t d = 0; d < call.value_dim; ++d) out[d] = 0;
    double lse = -INFINITY;
    if (top > -INFINITY || nan) {
        double total = 0;
        if (nan) top = NAN;
        if (call.sinks) {
            const double sink = widen(static_cast<const T*>(call.sinks)[h]);
            if (sink > top || sink != sink) top = sink;
            total = std::exp(sink - top);
        }
        for (std::int64_t j = low; j < high; ++j)
            if (score[j - low] != -INFINITY) total += std::exp(score[j - low] - top);
        const Draw draw = draw_of(call, b, h, i);
        for (std::int64_t j = low; j < high; ++j) {
            if (score[j - low] == -INFINITY) continue;
            double p = std::exp(score[j - low] - top) / total;
            if (call.dropout > 0) p = keeps(draw, j) ? p / (1 - call.dropout) : 0;
            stored.add(b, h / call.groups(), j, p, out);
        }
        lse = top + std::log(total);
    }
    for (std::int64_t d = 0; d < call.value_dim; ++d) output[d] = narrow<T>(out[d]);
    return lse;
}

// The end of a row: its weighted sums become the output, its state the logsumexp.

// sums: value_dim numbers, padded to whole vectors, weighed by weights whose sum is `weighed`.
template <class T, class Stored = InPlace<T>>
void finish_row(const Forward& job, std::int64_t b, std::int64_t head, std::int64_t i,
                const RowMask& mask, const RowState<Arithmetic<T>>& state,
                Arithmetic<T> weighed, const Arithmetic<T>* sums, const Stored& stored) {
    using A = Arithmetic<T>;
    const Call& call = job.call;
    T* out = static_cast<T*>(job.output.data) + b * job.output.batch + head * job.output.head +
             i * job.output.row;
    double m = state.m, l = state.l, norm = weighed, lse = -INFINITY;
    bool fine = mask.empty();
    if (fine) {
        for (std::int64_t d = 0; d < call.value_dim; ++d) out[d] = narrow<T>(0);
    } else if (m > -INFINITY && m < INFINITY) {
        double less = 1;
        if (call.sinks) {
            const double sink =
                widen(static_cast<const T*>(call.sinks)[head]) * 1.4426950408889634;
            // The sink joins the denominator; it may be far above every score.
            const double top = sink > m ? sink : m;
            less = std::exp2(m - top);
            l = l * less + std::exp2(sink - top);
            norm = norm * less + std::exp2(sink - top);
            m = top;
        }
        if (job.lse) lse = m * 0.6931471805599453 + std::log(l);
        const A share = static_cast<A>(less / norm);
        VecOf<A> bad{};
        for (std::int64_t d = 0; d < call.value_dim; d += W<A>) {
            const VecOf<A> x = load(sums + d) * share;
            bad += x * A(0);  // 0 where x is finite, else NaN
            store_some(out + d, x, call.value_dim - d);
        }
        fine = l > 0 && l < INFINITY && sum<A>(bad) == A(0);
    }
    if (!fine) lse = slow_row<T>(call, stored, b, head, i, out);
    if (job.lse)
        static_cast<A*>(job.lse)[(b * call.heads + head) * call.queries + i] = static_cast<A>(lse);
}

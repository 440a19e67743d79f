// One hop over some rows: of graphs too large for the cache, and of every gradient.
//
// Layout: `in`, `add`, `out` row-major [N, d]. Parallel axis: rows; the caller splits them, each row is one thread's,
// so results do not depend on the number of threads. Accumulator: double in CSR order, rounded once.

template <class T, class I>
double factor_of(const Hop<T, I>& hop, int64_t v, int64_t e) {
  const double factor = hop.left ? hop.left[v] * hop.right[hop.indices[e]] + hop.plain : hop.plain;
  return hop.weight ? factor * static_cast<double>(hop.weight[e]) : factor;
}

// Edges between asking for a neighbour and reading it: each is a miss of the caches.
constexpr int64_t prefetch_distance = 128;

// K vectors of L lanes of row v from `column` on; the last one may overlap the one before, it then computes the same.
template <int L, int K, class T, class I>
void hop_tile(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t v, int64_t column, int64_t last) {
  constexpr int64_t bytes = K * L * static_cast<int64_t>(sizeof(T));
  Lanes<L, double> sum[K] = {};
  const int64_t end = hop.indptr[v + 1];
  for (int64_t e = hop.indptr[v]; e < end; ++e) {
    const int64_t ahead = e + prefetch_distance < hop.edges ? e + prefetch_distance : e;
    const auto* soon = reinterpret_cast<const char*>(in + hop.indices[ahead] * hop.width + column);
    if (hop.right) __builtin_prefetch(hop.right + hop.indices[ahead]);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(soon + byte);
    __builtin_prefetch(soon + bytes - 1);  // rows need not begin with a line of the cache
    const double factor = factor_of(hop, v, e);
    const T* row = in + hop.indices[e] * hop.width + column;
    for (int k = 0; k < K; ++k) sum[k] += factor * load<L, double>(row + (k < K - 1 ? k * L : last));
  }
  const int64_t at = v * hop.width + column;
  for (int k = 0; k < K; ++k) {
    const int64_t j = at + (k < K - 1 ? k * L : last);
    if (add) sum[k] += load<L, double>(add + j);
    store<L, double>(out + j, sum[k]);
  }
}

// Vectors of L lanes, or of fewer where a row is shorter.
template <class T, class I, int L = lanes<double>>
void hop_rows(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t begin, int64_t end) {
  if constexpr (L > 1)
    if (hop.width < L) return hop_rows<T, I, L / 2>(hop, in, add, out, begin, end);
  for (int64_t v = begin; v < end; ++v)
    for (int64_t column = 0; column < hop.width; column += 8 * L) {
      int64_t from = column, columns = hop.width - column;
      if (columns < L) from = hop.width - L, columns = L;
      const int64_t vectors = (columns + L - 1) / L, last = columns - L;
      if (columns >= 8 * L)
        hop_tile<L, 8>(hop, in, add, out, v, from, 7 * L);
      else if (vectors > 4)
        hop_tile<L, 4>(hop, in, add, out, v, from, 3 * L),
            hop_tile<L, 4>(hop, in, add, out, v, from + columns - 4 * L, 3 * L);
      else if (vectors == 4)
        hop_tile<L, 4>(hop, in, add, out, v, from, last);
      else if (vectors == 3)
        hop_tile<L, 3>(hop, in, add, out, v, from, last);
      else if (vectors == 2)
        hop_tile<L, 2>(hop, in, add, out, v, from, last);
      else
        hop_tile<L, 1>(hop, in, add, out, v, from, last);
    }
}

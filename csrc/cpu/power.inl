// One hop of the powers of a graph operator.
//
// Layout: `in`, `add`, `out` row-major [N, d]. Parallel axis: rows; the caller splits them, each row is one thread's,
// so results do not depend on the number of threads. Accumulator: float64 in CSR order, rounded once, so that float32
// rows of nodes with equal neighbourhoods get equal bits whatever the order of their neighbours.

template <int W, class T, class I>
void hop_tile(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t v, int64_t column) {
  double sum[W] = {};
  const int64_t end = hop.indptr[v + 1];
  for (int64_t e = hop.indptr[v]; e < end; ++e) {
    const int64_t u = hop.indices[e];
    double factor = hop.left ? hop.left[v] * hop.right[u] + hop.plain : hop.plain;
    if (hop.weight) factor *= static_cast<double>(hop.weight[e]);
    const T* row = in + u * hop.width + column;
    for (int j = 0; j < W; ++j) sum[j] += factor * static_cast<double>(row[j]);
  }
  const int64_t at = v * hop.width + column;
  if (add)
    for (int j = 0; j < W; ++j) sum[j] += static_cast<double>(add[at + j]);
  for (int j = 0; j < W; ++j) out[at + j] = static_cast<T>(sum[j]);
}

template <class T, class I>
void hop(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t begin, int64_t end) {
  for (int64_t v = begin; v < end; ++v) {
    int64_t column = 0;
    for (; column + 32 <= hop.width; column += 32) hop_tile<32>(hop, in, add, out, v, column);
    const int64_t rest = hop.width - column;
    if (rest & 16) hop_tile<16>(hop, in, add, out, v, column), column += 16;
    if (rest & 8) hop_tile<8>(hop, in, add, out, v, column), column += 8;
    if (rest & 4) hop_tile<4>(hop, in, add, out, v, column), column += 4;
    if (rest & 2) hop_tile<2>(hop, in, add, out, v, column), column += 2;
    if (rest & 1) hop_tile<1>(hop, in, add, out, v, column);
  }
}

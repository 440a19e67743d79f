// One hop of the powers of a graph operator.
//
// Layout: `in`, `add`, `out` row-major [N, d]. Parallel axis: rows; the caller splits them, each row is one thread's,
// so results do not depend on the number of threads. Accumulator: float64 in CSR order, rounded once, so that float32
// nodes with equal neighbourhoods get equal bits in almost every order of their neighbours: what deduplication
// compares.

typedef double Lanes __attribute__((vector_size(vector_bytes)));
constexpr int doubles = vector_bytes / sizeof(double);

template <class T, class I>
double factor_of(const Hop<T, I>& hop, int64_t v, int64_t e) {
  const double factor = hop.left ? hop.left[v] * hop.right[hop.indices[e]] + hop.plain : hop.plain;
  return hop.weight ? factor * static_cast<double>(hop.weight[e]) : factor;
}

// W >= 8 columns of row v, their sums in vector registers.
template <int W, class T, class I>
void hop_tile(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t v, int64_t column) {
  typedef T Row __attribute__((vector_size(doubles * sizeof(T)), aligned(alignof(T)), may_alias));
  constexpr int K = W / doubles;
  Lanes sum[K] = {};
  const int64_t end = hop.indptr[v + 1];
  for (int64_t e = hop.indptr[v]; e < end; ++e) {
    const double factor = factor_of(hop, v, e);
    const Row* row = reinterpret_cast<const Row*>(in + hop.indices[e] * hop.width + column);
    for (int k = 0; k < K; ++k) sum[k] += factor * __builtin_convertvector(row[k], Lanes);
  }
  const int64_t at = v * hop.width + column;
  if (add)
    for (int k = 0; k < K; ++k) sum[k] += __builtin_convertvector(reinterpret_cast<const Row*>(add + at)[k], Lanes);
  for (int k = 0; k < K; ++k) reinterpret_cast<Row*>(out + at)[k] = __builtin_convertvector(sum[k], Row);
}

// W < 8 columns of row v, where d < 8.
template <int W, class T, class I>
void hop_narrow(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t v, int64_t column) {
  double sum[W] = {};
  const int64_t end = hop.indptr[v + 1];
  for (int64_t e = hop.indptr[v]; e < end; ++e) {
    const double factor = factor_of(hop, v, e);
    const T* row = in + hop.indices[e] * hop.width + column;
    for (int j = 0; j < W; ++j) sum[j] += factor * static_cast<double>(row[j]);
  }
  const int64_t at = v * hop.width + column;
  if (add)
    for (int j = 0; j < W; ++j) sum[j] += static_cast<double>(add[at + j]);
  for (int j = 0; j < W; ++j) out[at + j] = static_cast<T>(sum[j]);
}

template <class T, class I>
void hop(const Hop<T, I>& hop, const T* in, const T* add, T* out, int64_t begin, int64_t end) {
  const int64_t width = hop.width;
  for (int64_t v = begin; v < end; ++v) {
    if (width < 8) {
      if (width & 4) hop_narrow<4>(hop, in, add, out, v, 0);
      if (width & 2) hop_narrow<2>(hop, in, add, out, v, width & 4);
      if (width & 1) hop_narrow<1>(hop, in, add, out, v, width - 1);
      continue;
    }
    int64_t column = 0;
    for (; column + 32 <= width; column += 32) hop_tile<32>(hop, in, add, out, v, column);
    // The last tile may overlap the one before: it writes the same values again, in fewer passes over the neighbours.
    const int64_t rest = width - column;
    if (rest > 16 && width >= 32) {
      hop_tile<32>(hop, in, add, out, v, width - 32);
      continue;
    }
    if (rest >= 16) hop_tile<16>(hop, in, add, out, v, column);
    if (rest % 16 > 8 && width >= 16) {
      hop_tile<16>(hop, in, add, out, v, width - 16);
      continue;
    }
    if (rest % 16 > 8) hop_tile<8>(hop, in, add, out, v, column);
    if (rest % 8 || rest % 16 == 8) hop_tile<8>(hop, in, add, out, v, width - 8);
  }
}

// Sum and attention readouts and their gradients.
//
// Layout: z row-major [rows, h]; readouts [G, (R + 1) * h], the branches of a graph side by side. Parallel axis:
// segments forward, segments and then rows backward; the caller splits them, each segment or row is one thread's and
// nothing is added atomically, so results do not depend on the number of threads. Accumulator: blocks of 64 entries in
// T, added up in float64, so the error of a segment does not grow with its length; the softmax denominator and dw in
// float64.

constexpr int64_t block = 64;

struct Run {
  int64_t begin, end;  // entries
  int64_t branch, place;
};

template <class I>
Run run_of(const Segments<I>& seg, int64_t s) {
  const int64_t branch = s / seg.graphs, graph = s % seg.graphs;
  const int64_t* ptr = seg.ptr + branch * seg.ptr_stride + graph;
  const int64_t shift = branch * seg.entry_stride;
  return {ptr[0] + shift, ptr[1] + shift, branch, graph * seg.branches + branch};
}

template <class I>
int64_t row_of(const Segments<I>& seg, int64_t entry) {
  return seg.index ? static_cast<int64_t>(seg.index[entry]) : entry;
}

template <class T>
T dot(const T* a, const T* b, int64_t width) {
  constexpr int lanes = 64 / sizeof(T);
  T part[lanes] = {};
  int64_t j = 0;
  for (; j + lanes <= width; j += lanes)
    for (int k = 0; k < lanes; ++k) part[k] += a[j + k] * b[j + k];
  for (int k = 0; j < width; ++j, ++k) part[k] += a[j] * b[j];
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) part[k] += part[k + half];
  return part[0];
}

// W columns of sum_e scale_e z[row_e] over one run; the scale is alpha, else count, else 1.
template <int W, class T, class I>
void weighted_sum_tile(const Segments<I>& seg, const Run& run, const T* z, const T* alpha, T* out, int64_t column) {
  double sum[W] = {};
  for (int64_t start = run.begin; start < run.end; start += block) {
    const int64_t stop = start + block < run.end ? start + block : run.end;
    T part[W] = {};
    for (int64_t e = start; e < stop; ++e) {
      const T* row = z + row_of(seg, e) * seg.width + column;
      const T scale = alpha ? alpha[e] : seg.count ? static_cast<T>(seg.count[e]) : T(1);
      for (int j = 0; j < W; ++j) part[j] += scale * row[j];
    }
    for (int j = 0; j < W; ++j) sum[j] += static_cast<double>(part[j]);
  }
  for (int j = 0; j < W; ++j) out[column + j] = static_cast<T>(sum[j]);
}

template <class T, class I>
void weighted_sum(const Segments<I>& seg, const Run& run, const T* z, const T* alpha, T* out) {
  int64_t column = 0;
  for (; column + 16 <= seg.width; column += 16) weighted_sum_tile<16>(seg, run, z, alpha, out, column);
  const int64_t rest = seg.width - column;
  if (rest & 8) weighted_sum_tile<8>(seg, run, z, alpha, out, column), column += 8;
  if (rest & 4) weighted_sum_tile<4>(seg, run, z, alpha, out, column), column += 4;
  if (rest & 2) weighted_sum_tile<2>(seg, run, z, alpha, out, column), column += 2;
  if (rest & 1) weighted_sum_tile<1>(seg, run, z, alpha, out, column);
}

template <class T, class I>
void sum_readout(const Segments<I>& seg, const T* z, T* readout, int64_t begin, int64_t end) {
  for (int64_t s = begin; s < end; ++s) {
    const Run run = run_of(seg, s);
    weighted_sum(seg, run, z, static_cast<const T*>(nullptr), readout + run.place * seg.width);
  }
}

template <class T, class I>
void attention_readout(const Segments<I>& seg, const T* z, const T* w, T* readout, T* alpha, int64_t begin,
                       int64_t end) {
  for (int64_t s = begin; s < end; ++s) {
    const Run run = run_of(seg, s);
    T top = 0;  // beta = ReLU(...) is never below 0
    for (int64_t e = run.begin; e < run.end; ++e) {
      const T logit = dot(w + run.branch * seg.width, z + row_of(seg, e) * seg.width, seg.width);
      alpha[e] = logit < 0 ? T(0) : logit;
      if (alpha[e] > top) top = alpha[e];
    }
    double total = 0;
    for (int64_t e = run.begin; e < run.end; ++e) {
      alpha[e] = std::exp(alpha[e] - top);
      if (seg.count) alpha[e] *= static_cast<T>(seg.count[e]);
      total += static_cast<double>(alpha[e]);
    }
    for (int64_t e = run.begin; e < run.end; ++e) alpha[e] = static_cast<T>(static_cast<double>(alpha[e]) / total);
    weighted_sum(seg, run, z, static_cast<const T*>(alpha), readout + run.place * seg.width);
  }
}

// With t = sum_e alpha_e (<ds, z_e> + dalpha_e) = <ds, s> + sum_e alpha_e dalpha_e:
//   dbeta_e = alpha_e (<ds, z_e> + dalpha_e - t), 0 where the ReLU is shut;  dw = sum_e dbeta_e z_e.
template <class T, class I>
void attention_backward(const Segments<I>& seg, const T* grad, const T* grad_alpha, const T* z, const T* w,
                        const T* readout, const T* alpha, T* dbeta, double* dw, int64_t begin, int64_t end) {
  const int64_t width = seg.width;
  for (int64_t s = begin; s < end; ++s) {
    const Run run = run_of(seg, s);
    const T* ds = grad + run.place * width;
    double t = static_cast<double>(dot(ds, readout + run.place * width, width));
    if (grad_alpha)
      for (int64_t e = run.begin; e < run.end; ++e)
        t += static_cast<double>(alpha[e]) * static_cast<double>(grad_alpha[e]);
    for (int64_t e = run.begin; e < run.end; ++e) {
      const T* row = z + row_of(seg, e) * width;
      dbeta[e] = 0;
      if (dot(w + run.branch * width, row, width) <= 0) continue;
      double dalpha = static_cast<double>(dot(ds, row, width));
      if (grad_alpha) dalpha += static_cast<double>(grad_alpha[e]);
      dbeta[e] = static_cast<T>(static_cast<double>(alpha[e]) * (dalpha - t));
      for (int64_t j = 0; j < width; ++j) dw[j] += static_cast<double>(dbeta[e]) * static_cast<double>(row[j]);
    }
  }
}

// A row that several entries refer to: the sum in float64.
template <int W, class T>
void shared_row_tile(const EntriesOfRow& of, const T* grad, const int32_t* count, const T* alpha, const T* dbeta,
                     const T* w, T* dz, int64_t u, int64_t column) {
  double sum[W] = {};
  for (int64_t i = of.offsets[u]; i < of.offsets[u + 1]; ++i) {
    const int64_t e = of.entries[i];
    const T* ds = grad + of.place[e] * of.width + column;
    const double scale = alpha ? static_cast<double>(alpha[e]) : count ? static_cast<double>(count[e]) : 1.0;
    for (int j = 0; j < W; ++j) sum[j] += scale * static_cast<double>(ds[j]);
    if (!dbeta) continue;
    const T* vector = w + of.place[e] % of.branches * of.width + column;
    for (int j = 0; j < W; ++j) sum[j] += static_cast<double>(dbeta[e]) * static_cast<double>(vector[j]);
  }
  for (int j = 0; j < W; ++j) dz[u * of.width + column + j] = static_cast<T>(sum[j]);
}

// The row of the one entry e.
template <class T>
void own_row(const EntriesOfRow& of, const T* grad, const int32_t* count, const T* alpha, const T* dbeta, const T* w,
             T* dz, int64_t e) {
  const T* ds = grad + of.place[e] * of.width;
  const T scale = alpha ? alpha[e] : count ? static_cast<T>(count[e]) : T(1);
  T* row = dz + e * of.width;
  if (!dbeta) {
    for (int64_t j = 0; j < of.width; ++j) row[j] = scale * ds[j];
    return;
  }
  const T* vector = w + of.place[e] % of.branches * of.width;
  for (int64_t j = 0; j < of.width; ++j) row[j] = scale * ds[j] + dbeta[e] * vector[j];
}

template <class T>
void rows_backward(const EntriesOfRow& of, const T* grad, const int32_t* count, const T* alpha, const T* dbeta,
                   const T* w, T* dz, int64_t begin, int64_t end) {
  if (!of.offsets) {
    for (int64_t e = begin; e < end; ++e) own_row(of, grad, count, alpha, dbeta, w, dz, e);
    return;
  }
  for (int64_t u = begin; u < end; ++u) {
    int64_t column = 0;
    for (; column + 16 <= of.width; column += 16) shared_row_tile<16>(of, grad, count, alpha, dbeta, w, dz, u, column);
    const int64_t rest = of.width - column;
    if (rest & 8) shared_row_tile<8>(of, grad, count, alpha, dbeta, w, dz, u, column), column += 8;
    if (rest & 4) shared_row_tile<4>(of, grad, count, alpha, dbeta, w, dz, u, column), column += 4;
    if (rest & 2) shared_row_tile<2>(of, grad, count, alpha, dbeta, w, dz, u, column), column += 2;
    if (rest & 1) shared_row_tile<1>(of, grad, count, alpha, dbeta, w, dz, u, column);
  }
}

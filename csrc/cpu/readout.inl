// Sum and attention readouts and their gradients.
//
// Layout: z row-major [rows, h]; readouts [G, (R + 1) * h], the branches of a graph side by side. Parallel axis: pieces
// of some thousand entries (see Piece), each one thread's; nothing is added atomically, so results do not depend on the
// number of threads. Accumulator: blocks of 64 entries in T, added up in float64, so the error of a segment does not
// grow with its length; the softmax denominator and dw in float64.
//
// A block is read from memory once and again from the L1 cache: scores, then weights, then the weighted sum, which a
// higher maximum in a later block scales down. Its rows are z's own where they fill whole registers and follow each
// other, else a padded copy of them. V is the number of registers in a row, or 0 where it is not known to the compiler.

struct Run {
  int64_t begin, end;  // entries
  int64_t branch, place;
};

template <class I>
Run run_of(const Segments<I>& seg, const Piece& piece, int64_t s) {
  const int64_t branch = s / seg.graphs, graph = s % seg.graphs, place = graph * seg.branches + branch;
  if (piece.split) return {piece.first, piece.last, branch, place};
  const int64_t* ptr = seg.ptr + branch * seg.ptr_stride + graph;
  const int64_t shift = branch * seg.entry_stride;
  return {ptr[0] + shift, ptr[1] + shift, branch, place};
}

template <class T>
int64_t vectors_of(int64_t width) {
  return (width + lanes<T> - 1) / lanes<T>;
}

// A row filled up with zeros to whole registers.
template <class T>
const T* padded(const T* row, int64_t width, T* copy) {
  const int64_t stride = vectors_of<T>(width) * lanes<T>;
  if (width == stride) return row;
  for (int64_t j = 0; j < width; ++j) copy[j] = row[j];
  for (int64_t j = width; j < stride; ++j) copy[j] = 0;
  return copy;
}

// The rows of n entries; there may be anything in the rows after them up to a multiple of the number of lanes.
template <class S, class I, class T = Compute<S>>
const T* block_rows(const Segments<I>& seg, const S* z, int64_t first, int64_t n, T* copy) {
  const int64_t stride = vectors_of<T>(seg.width) * lanes<T>;
  if constexpr (std::is_same_v<S, T>) {
    const int64_t groups = (n + lanes<T> - 1) / lanes<T>;
    if (!seg.index && seg.width == stride && first + groups * lanes<T> <= seg.rows) return z + first * stride;
  }
  for (int64_t i = 0; i < n; ++i) {
    const S* row = z + (seg.index ? static_cast<int64_t>(seg.index[first + i]) : first + i) * seg.width;
    for (int64_t j = 0; j < stride; j += lanes<T>) store(copy + i * stride + j, load_first(row + j, seg.width - j));
  }
  return copy;
}

// Fetches what stands some blocks further on than `from`. The processor alone looks less far ahead, and stops looking
// while it works on a block in the L1 cache.
template <class T>
inline __attribute__((always_inline)) void prefetch(const T* from, int64_t size) {
  constexpr int64_t line = 64, ahead = 8192;
  const char* next = reinterpret_cast<const char*>(from) + ahead;
  for (int64_t at = 0; at < size * static_cast<int64_t>(sizeof(T)); at += line) __builtin_prefetch(next + at);
}

// <rows_i, v> for Rows rows: the products of halves of the rows are added lane by lane until one lane is one row.
template <int Rows, int V, class T>
inline __attribute__((always_inline)) Vector<T> dots(const T* rows, const T* v, int64_t vectors) {
  const int64_t number = V ? V : vectors, stride = number * lanes<T>;
  if constexpr (Rows > 1) {
    const Vector<T> low = dots<Rows / 2, V>(rows, v, vectors);
    return merge<T, Rows>(low, dots<Rows / 2, V>(rows + Rows / 2 * stride, v, vectors));
  } else {
    Vector<T> sum = {};
    for (int64_t k = 0; k < number; ++k) sum += load(rows + k * lanes<T>) * load(v + k * lanes<T>);
    return sum;
  }
}

// sum[0 .. K registers) = factor * sum + sum_i weight_i rows_i.
template <int K, class T>
void add_columns(const T* rows, int64_t stride, const T* weight, int64_t n, double factor, double* sum) {
  constexpr int chains = K <= 2 ? 4 : K <= 4 ? 2 : 1;  // independent sums, to hide the latency of an addition
  Vector<T> part[chains][K] = {};
  int64_t i = 0;
  for (; i + chains <= n; i += chains) {
    prefetch(rows + i * stride, chains * K * lanes<T>);
    for (int c = 0; c < chains; ++c)
      for (int k = 0; k < K; ++k) part[c][k] += weight[i + c] * load(rows + (i + c) * stride + k * lanes<T>);
  }
  for (; i < n; ++i)
    for (int k = 0; k < K; ++k) part[0][k] += weight[i] * load(rows + i * stride + k * lanes<T>);
  for (int k = 0; k < K; ++k) {
    for (int c = 1; c < chains; ++c) part[0][k] += part[c][k];
    add_scaled<T>(sum + k * lanes<T>, factor, part[0][k]);
  }
}

template <int V, class T>
void add_rows(const T* rows, int64_t vectors, const T* weight, int64_t n, double factor, double* sum) {
  constexpr int L = lanes<T>;
  if constexpr (V > 0 && V <= 8) {
    add_columns<V>(rows, V * L, weight, n, factor, sum);
  } else {
    const int64_t stride = vectors * L;
    int64_t k = 0;
    for (; k + 8 <= vectors; k += 8) add_columns<8>(rows + k * L, stride, weight, n, factor, sum + k * L);
    if (vectors & 4) add_columns<4>(rows + k * L, stride, weight, n, factor, sum + k * L), k += 4;
    if (vectors & 2) add_columns<2>(rows + k * L, stride, weight, n, factor, sum + k * L), k += 2;
    if (vectors & 1) add_columns<1>(rows + k * L, stride, weight, n, factor, sum + k * L);
  }
}

template <class T>
void store_readout(const double* sum, double scale, int64_t width, T* readout) {
  for (int64_t j = 0; j < width; ++j) readout[j] = static_cast<T>(sum[j] * scale);
}

template <int V, class S, class I, class T = Compute<S>>
void sum_piece(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, T* readout) {
  const int64_t vectors = V ? V : vectors_of<T>(seg.width);
  double* sum = piece.split ? piece.partial + 2 : scratch.sum;
  T weight[block];
  for (T& one : weight) one = 1;
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const Run run = run_of(seg, piece, s);
    for (int64_t j = 0; j < vectors * lanes<T>; ++j) sum[j] = 0;
    for (int64_t first = run.begin; first < run.end; first += block) {
      const int64_t n = run.end - first < block ? run.end - first : block;
      if (seg.count)
        for (int64_t i = 0; i < n; ++i) weight[i] = static_cast<T>(seg.count[first + i]);
      add_rows<V>(block_rows(seg, z, first, n, scratch.rows), vectors, weight, n, 1.0, sum);
    }
    if (!piece.split) store_readout(sum, 1.0, seg.width, readout + run.place * seg.width);
  }
}

template <class T, class I>
void attention_weights(const Segments<I>& seg, const Piece& piece, T top, double total, T* alpha) {
  const T scale = static_cast<T>(1 / total);
  for (int64_t e = piece.first; e < piece.last; e += lanes<T>) {
    const int64_t n = piece.last - e;
    Vector<T> beta = {};
    if (n >= lanes<T>)
      beta = load(alpha + e);
    else
      __builtin_memcpy(&beta, alpha + e, n * sizeof(T));
    store_first(alpha + e, exp_of<T>(beta - top) * scale, n);
  }
  if (seg.count)
    for (int64_t e = piece.first; e < piece.last; ++e) alpha[e] *= static_cast<T>(seg.count[e]);
}

template <int V, class S, class I, class T = Compute<S>>
void attention_piece(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, const T* w,
                     T* readout, T* alpha) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(seg.width), stride = vectors * L;
  const T* vector = padded(w + piece.begin / seg.graphs * seg.width, seg.width, scratch.w);
  double* sum = piece.split ? piece.partial + 2 : scratch.sum;
  // A register of alpha may spill over into the entries after its segment, which this piece writes later.
  const int64_t last = run_of(seg, piece, piece.end - 1).end;
  T weight[block];
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const Run run = run_of(seg, piece, s);
    const bool one_block = !piece.split && run.end - run.begin <= block;
    T top = 0;  // beta = ReLU(...) is never below 0
    double total = 0;
    for (int64_t j = 0; j < stride; ++j) sum[j] = 0;
    for (int64_t first = run.begin; first < run.end; first += block) {
      const int64_t n = run.end - first < block ? run.end - first : block;
      const T* rows = block_rows(seg, z, first, n, scratch.rows);
      Vector<T> highest = {};
      for (int64_t i = 0; i < n; i += L) {
        prefetch(rows + i * stride, L * stride);
        const Vector<T> logit = first_lanes<T>(dots<L, V>(rows + i * stride, vector, vectors), n - i);
        const Vector<T> beta = logit < 0 ? Vector<T>{} : logit;
        store(weight + i, beta);
        highest = beta > highest ? beta : highest;
        if (!one_block) store_first(alpha + first + i, beta, last - first - i);
      }
      const T block_top = maximum_of<T>(highest);
      double factor = 1;
      if (block_top > top) {
        if (first > run.begin) factor = __builtin_exp(static_cast<double>(top) - static_cast<double>(block_top));
        top = block_top;
      }
      Vector<T> mass = {};
      for (int64_t i = 0; i < n; i += L) {
        Vector<T> weights = first_lanes<T>(exp_of<T>(load(weight + i) - top), n - i);
        if (seg.count) {
          store(weight + i, weights);
          for (int64_t k = i; k < i + L && k < n; ++k) weight[k] *= static_cast<T>(seg.count[first + k]);
          weights = load(weight + i);
        }
        store(weight + i, weights);
        mass += weights;
      }
      total = total * factor + static_cast<double>(sum_of<T>(mass));
      add_rows<V>(rows, vectors, weight, n, factor, sum);
    }
    if (piece.split) {
      piece.partial[0] = static_cast<double>(top);
      piece.partial[1] = total;
      continue;
    }
    const double scale = run.end > run.begin ? 1 / total : 0;
    store_readout(sum, scale, seg.width, readout + run.place * seg.width);
    if (one_block)
      for (int64_t i = 0; i < run.end - run.begin; i += L)
        store_first(alpha + run.begin + i, load(weight + i) * static_cast<T>(scale), last - run.begin - i);
    else
      attention_weights(seg, {s, s + 1, run.begin, run.end, true, nullptr}, top, total, alpha);
  }
}

// n values of a, if it is not null, up to a register; reads beyond them where a has so many.
template <class T>
Vector<T> some(const T* a, int64_t at, int64_t n, int64_t size) {
  if (at + lanes<T> <= size) return load(a + at);
  Vector<T> v = {};
  __builtin_memcpy(&v, a + at, (n < lanes<T> ? n : lanes<T>)*sizeof(T));
  return v;
}

// dz rows of n entries: scale_i grad + dbeta_i w.
template <int V, bool Bypass, class S, class T = Compute<S>>
void write_rows(int64_t width, const T* grad, const T* w, const T* scale, const T* dbeta, int64_t n, S* dz) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(width);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < vectors; ++k) {
      Vector<T> row = scale[i] * load(grad + k * L);
      if (w) row += dbeta[i] * load(w + k * L);
      S* to = dz + i * width + k * L;
      if (Bypass)
        bypass(to, &row);
      else if (V)
        store(to, row);
      else
        store_first(to, row, width - k * L);
    }
}

template <int V, class S, class I, class T = Compute<S>>
void sum_backward_piece(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch,
                        const Gradients<S>& gradients) {
  const T* no_rows = nullptr;
  T weight[block];
  for (T& one : weight) one = 1;
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const Run run = run_of(seg, piece, s);
    const T* grad = padded(gradients.grad + run.place * seg.width, seg.width, scratch.grad);
    for (int64_t first = run.begin; first < run.end; first += block) {
      const int64_t n = run.end - first < block ? run.end - first : block;
      if (seg.count)
        for (int64_t i = 0; i < n; ++i) weight[i] = static_cast<T>(seg.count[first + i]);
      S* dz = gradients.dz + first * seg.width;
      if (V && gradients.bypass)
        write_rows<V, V != 0>(seg.width, grad, no_rows, weight, no_rows, n, dz);
      else
        write_rows<V, false>(seg.width, grad, no_rows, weight, no_rows, n, dz);
    }
  }
  if (gradients.bypass) settle();
}

// <a, b> in float64.
template <class T>
double wide_dot(const T* a, const T* b, int64_t width) {
  Vector<double> sum = {};
  int64_t j = 0;
  for (; j + lanes<double> <= width; j += lanes<double>) sum += load_wide(a + j) * load_wide(b + j);
  double rest = 0;
  for (; j < width; ++j) rest += static_cast<double>(a[j]) * static_cast<double>(b[j]);
  return rest + sum_of<double>(sum);
}

// With t = sum_e alpha_e (<ds, z_e> + dalpha_e) = <ds, s> + sum_e alpha_e dalpha_e:
//   dbeta_e = alpha_e (<ds, z_e> + dalpha_e - t), 0 where the ReLU is shut;  dw = sum_e dbeta_e z_e;
//   dz_e = alpha_e ds + dbeta_e w.
template <int V, class S, class I, class T = Compute<S>>
void attention_backward_piece(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch,
                              const Gradients<S>& gradients) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(seg.width), stride = vectors * L;
  const T* w = padded(gradients.w + piece.begin / seg.graphs * seg.width, seg.width, scratch.w);
  T dbeta[block];
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const Run run = run_of(seg, piece, s);
    const T *grad = gradients.grad + run.place * seg.width, *readout = gradients.readout + run.place * seg.width;
    const T t =
        static_cast<T>(wide_dot(grad, readout, seg.width) + (gradients.from_alpha ? gradients.from_alpha[s] : 0));
    grad = padded(grad, seg.width, scratch.grad);
    for (int64_t first = run.begin; first < run.end; first += block) {
      const int64_t n = run.end - first < block ? run.end - first : block;
      const T* rows = block_rows(seg, gradients.z, first, n, scratch.rows);
      for (int64_t i = 0; i < n; i += L) {
        prefetch(rows + i * stride, L * stride);
        const Vector<T> logit = dots<L, V>(rows + i * stride, w, vectors);
        Vector<T> dalpha = dots<L, V>(rows + i * stride, grad, vectors);
        if (gradients.grad_alpha) dalpha += some(gradients.grad_alpha, first + i, n - i, seg.entries);
        const Vector<T> opened = some(gradients.alpha, first + i, n - i, seg.entries) * (dalpha - t);
        store(dbeta + i, logit <= 0 ? Vector<T>{} : opened);
      }
      add_rows<V>(rows, vectors, dbeta, n, 1.0, piece.partial);
      if (seg.index)
        for (int64_t i = 0; i < n; ++i) gradients.dbeta[first + i] = dbeta[i];
      else if (V && gradients.bypass)
        write_rows<V, V != 0>(seg.width, grad, w, gradients.alpha + first, dbeta, n, gradients.dz + first * seg.width);
      else
        write_rows<V, false>(seg.width, grad, w, gradients.alpha + first, dbeta, n, gradients.dz + first * seg.width);
    }
  }
  if (gradients.bypass) settle();
}

// Calls kernel<V>: the rows of widths 16, 32 and 64 are whole registers in every instruction set.
#define SPIN_FAST_BY_WIDTH(kernel, T, width, ...)                      \
  switch (width % lanes<T> == 0 && width > 0 ? width / lanes<T> : 0) { \
    case 1:                                                            \
      return kernel<1>(__VA_ARGS__);                                   \
    case 2:                                                            \
      return kernel<2>(__VA_ARGS__);                                   \
    case 4:                                                            \
      return kernel<4>(__VA_ARGS__);                                   \
    case 8:                                                            \
      return kernel<8>(__VA_ARGS__);                                   \
    case 16:                                                           \
      return kernel<16>(__VA_ARGS__);                                  \
    default:                                                           \
      return kernel<0>(__VA_ARGS__);                                   \
  }

template <class S, class I, class T = Compute<S>>
void sum_readout(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, T* readout) {
  SPIN_FAST_BY_WIDTH(sum_piece, T, seg.width, seg, piece, scratch, z, readout)
}

template <class S, class I, class T = Compute<S>>
void attention_readout(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, const T* w,
                       T* readout, T* alpha) {
  SPIN_FAST_BY_WIDTH(attention_piece, T, seg.width, seg, piece, scratch, z, w, readout, alpha)
}

template <class S, class I, class T = Compute<S>>
void sum_backward(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch, const Gradients<S>& of) {
  SPIN_FAST_BY_WIDTH(sum_backward_piece, T, seg.width, seg, piece, scratch, of)
}

template <class S, class I, class T = Compute<S>>
void attention_backward(const Segments<I>& seg, const Piece& piece, const Scratch<T>& scratch, const Gradients<S>& of) {
  SPIN_FAST_BY_WIDTH(attention_backward_piece, T, seg.width, seg, piece, scratch, of)
}

// W columns of dz_u, summed up in float64.
template <int W, class S, class T = Compute<S>>
void shared_row_tile(const EntriesOfRow& of, const T* grad, const int32_t* count, const T* alpha, const T* dbeta,
                     const T* w, S* dz, int64_t u, int64_t column) {
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
  T values[W > lanes<T> ? W : lanes<T>] = {};
  for (int j = 0; j < W; ++j) values[j] = static_cast<T>(sum[j]);
  for (int j = 0; j < W; j += lanes<T>) store_first(dz + u * of.width + column + j, load(values + j), W - j);
}

template <class S, class T = Compute<S>>
void rows_backward(const EntriesOfRow& of, const T* grad, const int32_t* count, const T* alpha, const T* dbeta,
                   const T* w, S* dz, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; ++u) {
    int64_t column = 0;
    for (; column + 32 <= of.width; column += 32) shared_row_tile<32>(of, grad, count, alpha, dbeta, w, dz, u, column);
    for (; column + 16 <= of.width; column += 16) shared_row_tile<16>(of, grad, count, alpha, dbeta, w, dz, u, column);
    const int64_t rest = of.width - column;
    if (rest & 8) shared_row_tile<8>(of, grad, count, alpha, dbeta, w, dz, u, column), column += 8;
    if (rest & 4) shared_row_tile<4>(of, grad, count, alpha, dbeta, w, dz, u, column), column += 4;
    if (rest & 2) shared_row_tile<2>(of, grad, count, alpha, dbeta, w, dz, u, column), column += 2;
    if (rest & 1) shared_row_tile<1>(of, grad, count, alpha, dbeta, w, dz, u, column);
  }
}

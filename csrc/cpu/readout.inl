// Sum and attention readouts and their gradients.
//
// Layout: z row-major [rows, h]; readouts [G, (R + 1) * h], the branches of a graph side by side. Parallel axis: pieces
// of some thousand entries (see Piece), each one thread's; nothing is added atomically, so results do not depend on the
// number of threads. Accumulator: tiles of 64 entries in T, added up in float64 where a segment has more, so its error
// does not grow with its length; the softmax denominator of those and dw in float64.
//
// A tile is part of one segment, or several short segments. It is read from memory once and again from the L1 cache:
// scores, then weights, then the weighted sum, which a higher maximum in a later tile of the segment scales down. Its
// rows are z's own where they fill whole registers and follow each other, else a padded copy of them. V is the number
// of registers in a row, or 0 where it is not known to the compiler.

struct EntryRange {
  int64_t begin, end;
  int64_t place;  // of the segment's row among the readouts
};

// The entries of segment s in a piece, all of which is of one branch.
inline EntryRange entries_of(const Segments& seg, const Piece& piece, int64_t branch, int64_t s) {
  const int64_t graph = s - branch * seg.graphs, place = graph * seg.branches + branch;
  if (piece.split) return {piece.first, piece.last, place};
  const int64_t* ptr = seg.ptr + branch * seg.ptr_stride + graph;
  const int64_t shift = branch * seg.entry_stride;
  return {ptr[0] + shift, ptr[1] + shift, place};
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

inline bool has_index(const Segments& seg) { return seg.narrow_index || seg.wide_index; }

inline int64_t row_of(const Segments& seg, int64_t entry) {
  return seg.narrow_index ? seg.narrow_index[entry] : seg.wide_index ? seg.wide_index[entry] : entry;
}

// The rows of n entries; there may be anything in the rows after them up to a multiple of the number of lanes.
template <class S, class T = Compute<S>>
const T* rows_of_tile(const Segments& seg, const S* z, int64_t first, int64_t n, T* copy) {
  const int64_t stride = vectors_of<T>(seg.width) * lanes<T>;
  if constexpr (std::is_same_v<S, T>) {
    const int64_t groups = (n + lanes<T> - 1) / lanes<T>;
    if (!has_index(seg) && seg.width == stride && first + groups * lanes<T> <= seg.rows) return z + first * stride;
  }
  for (int64_t i = 0; i < n; ++i) {
    const S* row = z + row_of(seg, first + i) * seg.width;
    for (int64_t j = 0; j < stride; j += lanes<T>) store(copy + i * stride + j, load_first(row + j, seg.width - j));
  }
  return copy;
}

// Whether z is larger than what of the last cache a core is likely to have.
template <class S>
inline bool is_far(const Segments& seg, const S*) {
  return seg.rows * seg.width * static_cast<int64_t>(sizeof(S)) > int64_t{16} << 20;
}

// Prefetches what is some tiles further on than `from`. The processor alone looks less far ahead, and stops looking
// while it works on a tile in the L1 cache. What comes from memory goes to the L2 cache, which waits for more lines at
// once than L1 can.
template <bool Far, class T>
inline __attribute__((always_inline)) void prefetch(const T* from, int64_t size) {
  constexpr int64_t ahead = 8192;
  const char* next = reinterpret_cast<const char*>(from) + ahead;
  for (int64_t at = 0; at < size * static_cast<int64_t>(sizeof(T)); at += cache_line)
    __builtin_prefetch(next + at, 0, Far ? 2 : 3);
}

// <row(i), with(i)> for Rows pairs: the products of halves of the rows are added lane by lane until one lane is one
// row.
template <int Rows, class T, class F, class G>
inline __attribute__((always_inline)) Vector<T> products(F row, G with, int64_t stride, int first = 0) {
  if constexpr (Rows > 1) {
    const Vector<T> low = products<Rows / 2, T>(row, with, stride, first);
    return merge<T, Rows>(low, products<Rows / 2, T>(row, with, stride, first + Rows / 2));
  } else {
    const T *a = row(first), *b = with(first);
    Vector<T> sum = {};
    for (int64_t j = 0; j < stride; j += lanes<T>) sum += load(a + j) * load(b + j);
    return sum;
  }
}

// take(k, sum_i weight(i) register k of row i) for K registers of a row, of which `first` comes before them.
template <int K, bool Far, class T, class W, class F>
inline void add_columns(const T* rows, int64_t stride, W weight, int64_t n, int64_t first, F take) {
  constexpr int chains = K <= 2 ? 4 : K <= 4 ? 2 : 1;  // independent sums, to hide the latency of an addition
  Vector<T> part[chains][K] = {};
  rows += first * lanes<T>;
  int64_t i = 0;
  for (; i + chains <= n; i += chains) {
    prefetch<Far>(rows + i * stride, chains * K * lanes<T>);
    for (int c = 0; c < chains; ++c)
      for (int k = 0; k < K; ++k) part[c][k] += weight(i + c) * load(rows + (i + c) * stride + k * lanes<T>);
  }
  for (; i < n; ++i)
    for (int k = 0; k < K; ++k) part[0][k] += weight(i) * load(rows + i * stride + k * lanes<T>);
  for (int k = 0; k < K; ++k) {
    for (int c = 1; c < chains; ++c) part[0][k] += part[c][k];
    take(first + k, part[0][k]);
  }
}

// The same for all registers of the rows.
template <int V, bool Far = true, class T, class W, class F>
inline void add_rows(const T* rows, int64_t vectors, W weight, int64_t n, bool far, F take) {
  if constexpr (Far)
    if (!far) return add_rows<V, false>(rows, vectors, weight, n, far, take);
  if constexpr (V > 0 && V <= 8) {
    add_columns<V, Far>(rows, V * lanes<T>, weight, n, 0, take);
  } else {
    const int64_t stride = vectors * lanes<T>;
    int64_t k = 0;
    for (; k + 8 <= vectors; k += 8) add_columns<8, Far>(rows, stride, weight, n, k, take);
    if (vectors & 4) add_columns<4, Far>(rows, stride, weight, n, k, take), k += 4;
    if (vectors & 2) add_columns<2, Far>(rows, stride, weight, n, k, take), k += 2;
    if (vectors & 1) add_columns<1, Far>(rows, stride, weight, n, k, take);
  }
}

// Calls f with the first of each register of n rows.
template <bool Far = true, class T, class F>
inline __attribute__((always_inline)) void for_each_register(const T* rows, int64_t stride, int64_t n, bool far, F f) {
  if constexpr (Far)
    if (!far) return for_each_register<false>(rows, stride, n, far, f);
  for (int64_t i = 0; i < n; i += lanes<T>) {
    prefetch<Far>(rows + i * stride, lanes<T> * stride);
    f(i);
  }
}

template <int V, class S, class T = Compute<S>>
void sum_piece(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, T* readout) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(seg.width), branch = piece.begin / seg.graphs;
  double* sum = piece.split ? piece.partial + 2 : scratch.sum;
  const bool far = is_far(seg, z);
  const auto add_tile = [&](int64_t first, int64_t n, auto take) {
    const T* rows = rows_of_tile(seg, z, first, n, scratch.rows);
    if (!seg.count) return add_rows<V>(rows, vectors, [](int64_t) { return static_cast<T>(1); }, n, far, take);
    T weight[tile_entries];
    for (int64_t i = 0; i < n; ++i) weight[i] = static_cast<T>(seg.count[first + i]);
    add_rows<V>(rows, vectors, [&](int64_t i) { return weight[i]; }, n, far, take);
  };
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const EntryRange entries = entries_of(seg, piece, branch, s);
    T* to = readout + entries.place * seg.width;
    if (!piece.split && entries.end - entries.begin <= tile_entries) {
      add_tile(entries.begin, entries.end - entries.begin,
               [&](int64_t k, Vector<T> v) { store_first(to + k * L, v, V ? L : seg.width - k * L); });
      continue;
    }
    for (int64_t j = 0; j < vectors * L; ++j) sum[j] = 0;
    for (int64_t first = entries.begin; first < entries.end; first += tile_entries)
      add_tile(first, entries.end - first < tile_entries ? entries.end - first : tile_entries,
               [&](int64_t k, Vector<T> v) { add_scaled<T>(sum + k * L, 1.0, v); });
    for (int64_t j = 0; !piece.split && j < seg.width; ++j) to[j] = static_cast<T>(sum[j]);
  }
}

// n values of a, up to a register; reads beyond them where a has so many.
template <class T>
Vector<T> some(const T* a, int64_t at, int64_t n, int64_t size) {
  if (at + lanes<T> <= size) return load(a + at);
  Vector<T> v = {};
  __builtin_memcpy(&v, a + at, (n < lanes<T> ? n : lanes<T>)*sizeof(T));
  return v;
}

template <class T>
void attention_weights(const Segments& seg, const Piece& piece, T top, double total, T* alpha) {
  const T scale = static_cast<T>(1 / total);
  for (int64_t e = piece.first; e < piece.last; e += lanes<T>) {
    const int64_t n = piece.last - e;
    store_first(alpha + e, exp_of<T>(some(alpha, e, n, piece.last) - top) * scale, n);
  }
  if (seg.count)
    for (int64_t e = piece.first; e < piece.last; ++e) alpha[e] *= static_cast<T>(seg.count[e]);
}

// beta of the entries [0, n) of a tile: up to a register more is written.
template <int V, class T>
inline Vector<T> write_scores(const T* rows, const T* w, int64_t vectors, int64_t n, bool far, T* beta) {
  constexpr int L = lanes<T>;
  const int64_t stride = (V ? V : vectors) * L;
  Vector<T> highest = {};
  for_each_register(rows, stride, n, far, [&](int64_t i) __attribute__((always_inline)) {
    const auto row = [&](int k) { return rows + (i + k) * stride; };
    const Vector<T> logit = first_lanes<T>(products<L, T>(row, [&](int) { return w; }, stride), n - i);
    const Vector<T> score = logit < 0 ? Vector<T>{} : logit;
    store(beta + i, score);
    highest = score > highest ? score : highest;
  });
  return highest;
}

// weight = count exp(beta - top) of n entries, up to a register more; their sum.
template <class T>
inline Vector<T> write_weights(const T* beta, T top, const int32_t* count, int64_t n, T* weight) {
  constexpr int L = lanes<T>;
  Vector<T> mass = {};
  for (int64_t i = 0; i < n; i += L) {
    Vector<T> weights = first_lanes<T>(exp_of<T>(load(beta + i) - top), n - i);
    store(weight + i, weights);
    if (count) {
      for (int64_t k = i; k < i + L && k < n; ++k) weight[k] *= static_cast<T>(count[k]);
      weights = load(weight + i);
    }
    mass += weights;
  }
  return mass;
}

// Several whole segments whose entries make up one tile at most. Step by step for all of them: what one step of a
// segment has to wait for is filled with the same step of the next.
template <int V, class S, class T = Compute<S>>
void attention_of_short(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, const T* w,
                        int64_t branch, int64_t begin, int64_t end, int64_t last, T* readout, T* alpha) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(seg.width);
  const int64_t first = entries_of(seg, piece, branch, begin).begin,
                n = entries_of(seg, piece, branch, end - 1).end - first;
  const T* rows = rows_of_tile(seg, z, first, n, scratch.rows);
  T beta[tile_entries + L], weight[tile_entries + L], scale[tile_entries];
  const bool far = is_far(seg, z);
  write_scores<V>(rows, w, vectors, n, far, beta);
  for (int64_t s = begin; s < end; ++s) {
    const EntryRange entries = entries_of(seg, piece, branch, s);
    const int64_t at = entries.begin - first, size = entries.end - entries.begin;
    Vector<T> highest = {};
    for (int64_t i = 0; i < size; i += L) {
      const Vector<T> score = first_lanes<T>(load(beta + at + i), size - i);
      highest = score > highest ? score : highest;
    }
    const int32_t* count = seg.count ? seg.count + entries.begin : nullptr;
    const Vector<T> mass = write_weights(beta + at, maximum_of<T>(highest), count, size, weight + at);
    scale[s - begin] = size > 0 ? 1 / sum_of<T>(mass) : 0;
  }
  for (int64_t s = begin; s < end; ++s) {
    const EntryRange entries = entries_of(seg, piece, branch, s);
    const T *weights = weight + (entries.begin - first), factor = scale[s - begin];
    T* to = readout + entries.place * seg.width;
    add_rows<V>(
        rows + (entries.begin - first) * vectors * L, vectors, [&](int64_t i) { return weights[i]; },
        entries.end - entries.begin, far,
        [&](int64_t k, Vector<T> v) { store_first(to + k * L, factor * v, V ? L : seg.width - k * L); });
    for (int64_t e = entries.begin; e < entries.end; e += L)
      store_first(alpha + e, factor * load(weights + (e - entries.begin)), last - e);
  }
}

template <int V, class S, class T = Compute<S>>
void attention_piece(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, const T* w,
                     T* readout, T* alpha) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(seg.width), branch = piece.begin / seg.graphs;
  const T* vector = padded(w + branch * seg.width, seg.width, scratch.w);
  double* sum = piece.split ? piece.partial + 2 : scratch.sum;
  // A register of alpha may spill over into the entries after its segment, which this piece writes later.
  const int64_t last = entries_of(seg, piece, branch, piece.end - 1).end;
  T weight[tile_entries + L];
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const EntryRange entries = entries_of(seg, piece, branch, s);
    if (!piece.split && entries.end - entries.begin <= tile_entries) {
      int64_t end = s + 1;
      while (end < piece.end && end - s < tile_entries &&
             entries_of(seg, piece, branch, end).end - entries.begin <= tile_entries)
        ++end;
      attention_of_short<V>(seg, piece, scratch, z, vector, branch, s, end, last, readout, alpha);
      s = end - 1;
      continue;
    }
    T top = 0;  // beta = ReLU(...) is never below 0
    double total = 0;
    for (int64_t j = 0; j < vectors * L; ++j) sum[j] = 0;
    for (int64_t first = entries.begin; first < entries.end; first += tile_entries) {
      const int64_t n = entries.end - first < tile_entries ? entries.end - first : tile_entries;
      const T* rows = rows_of_tile(seg, z, first, n, scratch.rows);
      const T tile_top = maximum_of<T>(write_scores<V>(rows, vector, vectors, n, is_far(seg, z), weight));
      for (int64_t i = 0; i < n; i += L) store_first(alpha + first + i, load(weight + i), last - first - i);
      double factor = 1;
      if (tile_top > top) {
        if (first > entries.begin) factor = __builtin_exp(static_cast<double>(top) - static_cast<double>(tile_top));
        top = tile_top;
      }
      const Vector<T> mass = write_weights(weight, top, seg.count ? seg.count + first : nullptr, n, weight);
      total = total * factor + static_cast<double>(sum_of<T>(mass));
      add_rows<V>(
          rows, vectors, [&](int64_t i) { return weight[i]; }, n, is_far(seg, z),
          [&](int64_t k, Vector<T> v) { add_scaled<T>(sum + k * L, factor, v); });
    }
    if (piece.split) {
      piece.partial[0] = static_cast<double>(top);
      piece.partial[1] = total;
      continue;
    }
    T* const to = readout + entries.place * seg.width;
    for (int64_t j = 0; j < seg.width; ++j) to[j] = static_cast<T>(sum[j] * (1 / total));
    attention_weights(seg, {s, s + 1, entries.begin, entries.end, true, nullptr}, top, total, alpha);
  }
}

// dz rows of n entries: scale_i grad(i) + dbeta_i w.
template <int V, bool Bypass, class S, class F, class T = Compute<S>>
void write_rows(int64_t width, F grad, const T* w, const T* scale, const T* dbeta, int64_t n, S* dz) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(width);
  for (int64_t i = 0; i < n; ++i) {
    const T* from = grad(i);
    for (int64_t k = 0; k < vectors; ++k) {
      Vector<T> row = scale[i] * load(from + k * L);
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
}

template <int V, class S, class T = Compute<S>>
void sum_backward_piece(const Segments& seg, const Piece& piece, const Scratch<T>& scratch,
                        const Gradients<S>& gradients) {
  const T* no_rows = nullptr;
  const int64_t branch = piece.begin / seg.graphs;
  T weight[tile_entries];
  for (T& one : weight) one = 1;
  for (int64_t s = piece.begin; s < piece.end; ++s) {
    const EntryRange entries = entries_of(seg, piece, branch, s);
    const T* grad = padded(gradients.grad + entries.place * seg.width, seg.width, scratch.grad);
    for (int64_t first = entries.begin; first < entries.end; first += tile_entries) {
      const int64_t n = entries.end - first < tile_entries ? entries.end - first : tile_entries;
      if (seg.count)
        for (int64_t i = 0; i < n; ++i) weight[i] = static_cast<T>(seg.count[first + i]);
      S* dz = gradients.dz + first * seg.width;
      const auto same = [&](int64_t) { return grad; };
      if (V && gradients.bypass)
        write_rows<V, V != 0>(seg.width, same, no_rows, weight, no_rows, n, dz);
      else
        write_rows<V, false>(seg.width, same, no_rows, weight, no_rows, n, dz);
    }
  }
  if (gradients.bypass) settle();
}

// <a, b> in float64.
template <class T>
double wide_dot(const T* a, const T* b, int64_t width) {
  Vector<double> sum = {};
  int64_t j = 0;
  for (; j + lanes<double> <= width; j += lanes<double>)
    sum += load<lanes<double>, double>(a + j) * load<lanes<double>, double>(b + j);
  double rest = 0;
  for (; j < width; ++j) rest += static_cast<double>(a[j]) * static_cast<double>(b[j]);
  return rest + sum_of<double>(sum);
}

// With t = sum_e alpha_e (<ds, z_e> + dalpha_e) = <ds, s> + sum_e alpha_e dalpha_e:
//   dbeta_e = alpha_e (<ds, z_e> + dalpha_e - t), 0 where the ReLU is shut;  dw = sum_e dbeta_e z_e;
//   dz_e = alpha_e ds + dbeta_e w.
// For one tile of entries, `grad(i)` and t being those of the segment of entry i.
template <int V, class S, class F, class T = Compute<S>>
void attention_backward_of_tile(const Segments& seg, const Piece& piece, const Scratch<T>& scratch,
                                const Gradients<S>& gradients, const T* w, int64_t first, int64_t n, F grad,
                                const T* t) {
  constexpr int L = lanes<T>;
  const int64_t vectors = V ? V : vectors_of<T>(seg.width), stride = vectors * L;
  const T* rows = rows_of_tile(seg, gradients.z, first, n, scratch.rows);
  const T* alpha = gradients.alpha + first;
  S* dz = gradients.dz + first * seg.width;
  const bool far = is_far(seg, gradients.z);
  T dbeta[tile_entries + L];
  for_each_register(rows, stride, n, far, [&](int64_t i) __attribute__((always_inline)) {
    const auto row = [&](int k) { return rows + (i + k) * stride; };
    const Vector<T> logit = products<L, T>(row, [&](int) { return w; }, stride);
    Vector<T> dalpha = products<L, T>(row, [&](int k) { return grad(i + k); }, stride);
    if (gradients.grad_alpha) dalpha += some(gradients.grad_alpha, first + i, n - i, seg.entries);
    const Vector<T> opened = some(gradients.alpha, first + i, n - i, seg.entries) * (dalpha - load(t + i));
    store(dbeta + i, logit <= 0 ? Vector<T>{} : opened);
  });
  add_rows<V>(
      rows, vectors, [&](int64_t i) { return dbeta[i]; }, n, far,
      [&](int64_t k, Vector<T> v) { add_scaled<T>(piece.partial + k * L, 1.0, v); });
  if (has_index(seg))
    for (int64_t i = 0; i < n; ++i) gradients.dbeta[first + i] = dbeta[i];
  else if (V && gradients.bypass)
    write_rows<V, V != 0>(seg.width, grad, w, alpha, dbeta, n, dz);
  else
    write_rows<V, false>(seg.width, grad, w, alpha, dbeta, n, dz);
}

// Tiles of several short segments, or of a piece of a long one.
template <int V, class S, class T = Compute<S>>
void attention_backward_piece(const Segments& seg, const Piece& piece, const Scratch<T>& scratch,
                              const Gradients<S>& gradients) {
  constexpr int L = lanes<T>;
  const int64_t stride = (V ? V : vectors_of<T>(seg.width)) * L;
  const int64_t branch = piece.begin / seg.graphs, last = entries_of(seg, piece, branch, piece.end - 1).end;
  const T* w = padded(gradients.w + branch * seg.width, seg.width, scratch.w);
  const T* grad[tile_entries + L];
  T t[tile_entries + L];
  int64_t s = piece.begin;
  for (int64_t first = entries_of(seg, piece, branch, s).begin; first < last; first += tile_entries) {
    const int64_t n = last - first < tile_entries ? last - first : tile_entries;
    int64_t segments = 0;
    for (int64_t i = 0; i < n; ++s) {
      const EntryRange entries = entries_of(seg, piece, branch, s);
      if (entries.end <= first + i) continue;
      const int64_t end = entries.end - first < n ? entries.end - first : n;
      const T* row = gradients.grad + entries.place * seg.width;
      const double product = wide_dot(row, gradients.readout + entries.place * seg.width, seg.width);
      const T of_segment = static_cast<T>(product + (gradients.from_alpha ? gradients.from_alpha[s] : 0));
      row = padded(row, seg.width, scratch.grad + segments++ * stride);
      for (; i < end; ++i) grad[i] = row, t[i] = of_segment;
      if (entries.end > first + n) break;  // the rest of it is the next tile's
    }
    for (int64_t i = n; i < n + L; ++i) grad[i] = grad[0], t[i] = 0;
    const auto of_all = [row = grad[0]](int64_t) { return row; };
    const auto of_entry = [&](int64_t i) { return grad[i]; };
    if (segments == 1)
      attention_backward_of_tile<V>(seg, piece, scratch, gradients, w, first, n, of_all, t);
    else
      attention_backward_of_tile<V>(seg, piece, scratch, gradients, w, first, n, of_entry, t);
  }
  if (gradients.bypass) settle();
}

// Registers of a row, where they are whole and not too many.
template <class T>
constexpr int registers_of(int width) {
  return width / lanes<T> <= 16 ? width / lanes<T> : 0;
}

// Calls kernel<V>.
#define SPIN_FAST_BY_WIDTH(kernel, T, width, ...)      \
  switch (width) {                                     \
    case 16:                                           \
      return kernel<registers_of<T>(16)>(__VA_ARGS__); \
    case 32:                                           \
      return kernel<registers_of<T>(32)>(__VA_ARGS__); \
    case 64:                                           \
      return kernel<registers_of<T>(64)>(__VA_ARGS__); \
    default:                                           \
      return kernel<0>(__VA_ARGS__);                   \
  }

template <class S, class T = Compute<S>>
void sum_readout(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, T* readout) {
  SPIN_FAST_BY_WIDTH(sum_piece, T, seg.width, seg, piece, scratch, z, readout)
}

template <class S, class T = Compute<S>>
void attention_readout(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const S* z, const T* w,
                       T* readout, T* alpha) {
  SPIN_FAST_BY_WIDTH(attention_piece, T, seg.width, seg, piece, scratch, z, w, readout, alpha)
}

template <class S, class T = Compute<S>>
void sum_backward(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const Gradients<S>& of) {
  SPIN_FAST_BY_WIDTH(sum_backward_piece, T, seg.width, seg, piece, scratch, of)
}

template <class S, class T = Compute<S>>
void attention_backward(const Segments& seg, const Piece& piece, const Scratch<T>& scratch, const Gradients<S>& of) {
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

// All powers of a graph operator, a few graphs at a time in cache.
//
// Layout: x row-major [N, d], out row-major [R + 1, N, d]. Parallel axis: graphs; each is one thread's, so results do
// not depend on the number of threads. Accumulator: A, in the order in which a row stores its neighbours. With A =
// double, rounded once for the output, nodes with equal neighbourhoods get equal bits in almost every order of their
// neighbours: what deduplication compares.
//
// A chunk is one graph, or several small ones. Its nodes are taken in the order of their degrees: loops over neighbours
// then have the same length again and again, which branch prediction rewards, and a normalisation by degrees is a
// constant. Sources are kept scaled (y_u = right_u p_u) and padded to whole vectors, so that a hop is one addition per
// neighbour and vector:
//   p_v = left_v sum_u y_u.
// Edge weights, and sums of operators, need a factor per edge instead (then left = right = 1).

constexpr int long_class = 16;  // degrees 0 .. 15 are a class each, all above are one: of long rows
constexpr int classes = long_class + 1;
constexpr int class_padding = 16;  // between the neighbours of two classes: they are copied in whole vectors

template <class A>
struct GraphChunk {
  int64_t first;  // node
  int32_t nodes;
  int32_t stride;                     // of a row of sources
  uint32_t* place;                    // [n] a node's rank in its quarter and class, times 32, plus its class
  int32_t* order;                     // [n] nodes by class, counted from the first
  int32_t* neighbours;                // [edges + padding] where the rows of the neighbours begin in y, in that order
  A* factors;                         // beside `neighbours`, or null for ones
  int32_t* long_degrees;              // of the nodes of the long class
  A* long_scales;                     // their left and, where that is not 1, their right
  A *y, *next;                        // [n, stride] sources of this hop and the next
  A left[classes], right[classes];    // of all classes but the last, whose right is 1 where that of all nodes is
  int32_t class_begin[classes + 1];   // into order
  int32_t neighbours_begin[classes];  // into neighbours
};

template <class A, class T, class I>
A scale_of(const Powers<T, I>& powers, int64_t degree) {
  if (powers.by_edge || powers.op == Operator::adj) return 1;
  if (degree == 0) return 0;
  return static_cast<A>(powers.op == Operator::rw ? 1.0 / degree : 1.0 / std::sqrt(static_cast<double>(degree)));
}

// Whether sources are scaled by right_u = left_u.
template <class T, class I>
bool scales_sources(const Powers<T, I>& powers) {
  return !powers.by_edge && powers.op == Operator::sym;
}

template <class A, class T, class I>
void set_scales(const Powers<T, I>& powers, GraphChunk<A>& chunk) {
  for (int c = 0; c < classes; ++c) {
    chunk.left[c] = scale_of<A>(powers, c);
    chunk.right[c] = scales_sources(powers) ? chunk.left[c] : 1;
  }
}

// Copies the neighbours of a short row in whole vectors, whatever they hold beyond the row.
template <class I>
inline void copy_short_row(const I* from, uint32_t degree, I base, int32_t stride, int32_t* to) {
  constexpr int step = vector_bytes / sizeof(int32_t), part = vector_bytes / sizeof(I);
  uint32_t e = 0;
  do {
    for (uint32_t j = e; j < e + step; j += part)  // products of what is not read may overflow
      store<part, uint32_t>(reinterpret_cast<uint32_t*>(to) + j,
                            convert<part, uint32_t>(load<part, I>(from + j) - base) * static_cast<uint32_t>(stride));
    e += step;
  } while (step < class_padding && e < degree);
}

// Copies n neighbours as places in y: they begin base lower there, and rows are `stride` long.
template <class I>
void copy_neighbours(const I* from, int64_t n, I base, int32_t stride, int32_t* to) {
  for (int64_t e = 0; e < n; ++e) to[e] = static_cast<int32_t>(from[e] - base) * stride;
}

// y_v = right_v x_v, where x and y are rows.
template <int L, class T, class A>
inline void scale_row(const T* x, A right, A* y, int64_t width) {
  const int64_t last = L * sizeof(A) < vector_bytes ? 0 : (width - 1) / L * L;  // a part of a register is a whole row
  for (int64_t j = 0; j < last; j += L) store<L, A>(y + j, right * load<L, A>(x + j));
  store<L, A>(y + last, right * load_first<L, A>(x + last, width - last));
}

// Sorts the nodes by degree, copies their neighbours in that order and scales their sources.
template <int L, class T, class I, class A>
void sort_by_degree(const Powers<T, I>& powers, const T* x, GraphChunk<A>& chunk) {
  const I *indptr = powers.hop.indptr + chunk.first, *indices = powers.hop.indices;
  const int32_t nodes = chunk.nodes, stride = chunk.stride;
  const int64_t width = powers.hop.width;
  const I base = static_cast<I>(chunk.first);
  uint32_t* const place = chunk.place;
  // Quarters of the nodes are counted side by side: consecutive nodes of one class would wait for each other's counter.
  struct Begin {
    uint32_t order, neighbours;
  } begin[4][classes] = {};
  const int32_t quarter = nodes / 4;
  const auto count = [&](int q, int32_t v) {
    const auto degree = static_cast<uint32_t>(indptr[v + 1] - indptr[v]);
    const uint32_t c = degree < long_class ? degree : long_class;
    place[v] = begin[q][c].order++ << 5 | c;
  };
  for (int32_t i = 0; i < quarter; ++i)
    for (int q = 0; q < 4; ++q) count(q, q * quarter + i);
  for (int32_t v = 4 * quarter; v < nodes; ++v) count(3, v);
  uint32_t node = 0, neighbour = 0;
  for (int c = 0; c < classes; ++c) {
    chunk.class_begin[c] = static_cast<int32_t>(node);
    chunk.neighbours_begin[c] = static_cast<int32_t>(neighbour);
    for (int q = 0; q < 4; ++q) {
      const uint32_t members = begin[q][c].order;
      begin[q][c] = {node, neighbour};
      node += members;
      neighbour += static_cast<uint32_t>(c) * members;
    }
    neighbour += class_padding;
  }
  chunk.class_begin[classes] = nodes;

  // Neighbours in whole vectors, without a branch: of long rows these are a beginning that is written again below; rows
  // too near the end of `indices` are left for later.
  int32_t vectors_end = nodes;
  while (vectors_end > 0 && indptr[vectors_end - 1] > powers.hop.edges - class_padding) --vectors_end;
  int32_t *const order = chunk.order, *const neighbours = chunk.neighbours;
  for (int q = 0; q < 4; ++q) {
    const Begin* const of_class = begin[q];
    const int32_t end = q < 3 ? (q + 1) * quarter : nodes;
    int32_t v = q * quarter;
    for (; v < end && v < vectors_end; ++v) {
      const uint32_t c = place[v] & 31, rank = place[v] >> 5;
      order[of_class[c].order + rank] = v;
      copy_short_row(indices + indptr[v], c, base, stride, neighbours + (of_class[c].neighbours + rank * c));
    }
    for (; v < end; ++v) {
      const uint32_t c = place[v] & 31, rank = place[v] >> 5;
      order[of_class[c].order + rank] = v;
      copy_neighbours(indices + indptr[v], c, base, stride, neighbours + (of_class[c].neighbours + rank * c));
    }
  }
  A* const y = chunk.y;
  for (int32_t v = 0; v < nodes; ++v)
    scale_row<L>(x + v * width, chunk.right[place[v] & 31], y + static_cast<int64_t>(v) * stride, width);
  int32_t* to = chunk.neighbours + chunk.neighbours_begin[long_class];
  for (int32_t i = chunk.class_begin[long_class]; i < nodes; ++i) {
    const int32_t v = chunk.order[i], at = i - chunk.class_begin[long_class];
    const auto degree = static_cast<int32_t>(indptr[v + 1] - indptr[v]);
    const A scale = scale_of<A>(powers, degree);
    chunk.long_degrees[at] = degree;
    chunk.long_scales[at] = scale;
    copy_neighbours(indices + indptr[v], degree, base, stride, to);
    to += degree;
    if (scales_sources(powers)) scale_row<L>(x + v * width, scale, y + static_cast<int64_t>(v) * stride, width);
  }
}

// The factors of all edges, in the order of the neighbours.
template <class T, class I, class A>
void copy_factors(const Powers<T, I>& powers, const GraphChunk<A>& chunk) {
  for (int c = 0; c < classes; ++c) {
    A* to = chunk.factors + chunk.neighbours_begin[c];
    for (int32_t i = chunk.class_begin[c]; i < chunk.class_begin[c + 1]; ++i) {
      const int64_t v = chunk.first + chunk.order[i];
      for (int64_t e = powers.hop.indptr[v]; e < powers.hop.indptr[v + 1]; ++e)
        *to++ = static_cast<A>(factor_of(powers.hop, v, e));
    }
  }
}

// Some vectors of all rows: what one round of a hop reads and writes.
template <class T, class A>
struct HopVectors {
  const A* y;
  A* next;  // null in the last hop
  T* out;
  int64_t width;    // of a row of out
  int64_t columns;  // of these vectors
};

// sum += y of one neighbour.
template <int L, int K, bool Factors, class A>
inline void add_row(Lanes<L, A>* sum, const A* row, const A* factors, int64_t e) {
  for (int k = 0; k < K; ++k) {
    const Lanes<L, A> y = load<L, A>(row + k * L);
    if constexpr (Factors)
      sum[k] += factors[e] * y;
    else
      sum[k] += y;
  }
}

// p_v = left sum, to out; right p_v, to the sources of the next hop.
template <int L, int K, class T, class A>
inline void write_row(const HopVectors<T, A>& of, int64_t stride, int64_t v, const Lanes<L, A>* sum, A left, A right) {
  T* out = of.out + v * of.width;
  for (int k = 0; k < K; ++k) {
    const Lanes<L, A> p = left * sum[k];
    if (k < K - 1)
      store<L, A>(out + k * L, p);
    else
      store_first<L, A>(out + k * L, p, of.columns - k * L);
    if (of.next) store<L, A>(of.next + v * stride + k * L, right * p);
  }
}

// K vectors of the rows [begin, end) of the chunk's order, all of `degree` neighbours; D is that degree where the
// compiler is to know it, else -1.
template <int L, int K, int D, bool Factors, class T, class A>
void class_rows(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int32_t begin, int32_t end, int32_t degree,
                const int32_t* neighbours, A left, A right) {
  const int32_t* order = chunk.order;
  const A *y = of.y, *factors = Factors ? chunk.factors + (neighbours - chunk.neighbours) : nullptr;
  const HopVectors<T, A> local = of;
  const int64_t stride = chunk.stride;
  if (D >= 0) degree = D;
  for (int32_t i = begin; i < end; ++i) {
    Lanes<L, A> sum[K] = {};
    for (int32_t e = 0; e < degree; ++e) add_row<L, K, Factors>(sum, y + neighbours[e], factors, e);
    neighbours += degree;
    if (Factors) factors += degree;
    write_row<L, K>(local, stride, order[i], sum, left, right);
  }
}

// Short degrees of narrow rows are known to the compiler: else the loop would cost as much as the additions.
template <int L, int K, bool Factors, int D = 4, class T, class A>
void hop_class(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int32_t begin, int32_t end, int32_t degree,
               const int32_t* neighbours, A left, A right) {
  if constexpr (K == 1 && D > 0) {
    if (degree == D)
      class_rows<L, K, D, Factors>(chunk, of, begin, end, degree, neighbours, left, right);
    else
      hop_class<L, K, Factors, D - 1>(chunk, of, begin, end, degree, neighbours, left, right);
  } else {
    class_rows<L, K, -1, Factors>(chunk, of, begin, end, degree, neighbours, left, right);
  }
}

template <int L, class A>
inline void add_wide(double* sum, Lanes<L, A> values) {
  if constexpr (L > lanes<double>) {
    add_wide<L / 2, A>(sum, part<L / 2, A, 0>(values));
    add_wide<L / 2, A>(sum + L / 2, part<L / 2, A, L / 2>(values));
  } else {
    store<L, double>(sum, load<L, double>(sum) + convert<L, double>(values));
  }
}

// One row of many neighbours: sums side by side, and those of pieces in double, so that the error does not grow with
// the degree.
template <int L, int K, bool Factors, class T, class A>
void hop_long_row(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int64_t v, int32_t degree,
                  const int32_t* neighbours, A left, A right) {
  constexpr int chains = K <= 2 ? 4 : 1;
  constexpr int32_t piece = 64;
  const A* factors = Factors ? chunk.factors + (neighbours - chunk.neighbours) : nullptr;
  double wide[K * L] = {};
  for (int32_t begin = 0; begin < degree; begin += piece) {
    const int32_t end = degree - begin < piece ? degree : begin + piece;
    Lanes<L, A> sum[chains][K] = {};
    int32_t e = begin;
    for (; e + chains <= end; e += chains)
      for (int c = 0; c < chains; ++c) add_row<L, K, Factors>(sum[c], of.y + neighbours[e + c], factors, e + c);
    for (; e < end; ++e) add_row<L, K, Factors>(sum[0], of.y + neighbours[e], factors, e);
    for (int k = 0; k < K; ++k) {
      for (int c = 1; c < chains; ++c) sum[0][k] += sum[c][k];
      add_wide<L, A>(wide + k * L, sum[0][k]);
    }
  }
  A narrow[K * L];
  for (int j = 0; j < K * L; ++j) narrow[j] = static_cast<A>(wide[j]);
  Lanes<L, A> sum[K];
  for (int k = 0; k < K; ++k) sum[k] = load<L, A>(narrow + k * L);
  write_row<L, K>(of, chunk.stride, v, sum, left, right);
}

template <int L, int K, bool Factors, class T, class A>
void hop_vectors(const GraphChunk<A>& chunk, const HopVectors<T, A>& of) {
  for (int c = 0; c < long_class; ++c) {
    const int32_t begin = chunk.class_begin[c], end = chunk.class_begin[c + 1];
    if (begin < end)
      hop_class<L, K, Factors>(chunk, of, begin, end, c, chunk.neighbours + chunk.neighbours_begin[c], chunk.left[c],
                               chunk.right[c]);
  }
  const int32_t* neighbours = chunk.neighbours + chunk.neighbours_begin[long_class];
  const int32_t* order = chunk.order + chunk.class_begin[long_class];
  const int32_t long_rows = chunk.nodes - chunk.class_begin[long_class];
  for (int32_t i = 0; i < long_rows; ++i) {
    const A scale = chunk.long_scales[i];
    hop_long_row<L, K, Factors>(chunk, of, order[i], chunk.long_degrees[i], neighbours, scale,
                                chunk.right[long_class] == 1 ? 1 : scale);
    neighbours += chunk.long_degrees[i];
  }
}

// k vectors of all rows, at most K.
template <int L, int K, class T, class A>
void hop_vectors(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int64_t k) {
  if constexpr (K > 1)
    if (k < K) return hop_vectors<L, K - 1>(chunk, of, k);
  if (chunk.factors)
    hop_vectors<L, K, true>(chunk, of);
  else
    hop_vectors<L, K, false>(chunk, of);
}

// Rows of L lanes or less; L is less than a register only where d is.
template <int L, class T, class A>
void hop_chunk(const GraphChunk<A>& chunk, int64_t width, bool is_last, T* out) {
  constexpr int most = L * sizeof(A) < vector_bytes ? 1 : 8;  // vectors of one round, as registers allow
  int64_t vectors = chunk.stride / L, rounds = (vectors + most - 1) / most, column = 0;
  for (; rounds > 0; --rounds) {
    const int64_t k = (vectors + rounds - 1) / rounds, rest = width - column;
    const HopVectors<T, A> of = {chunk.y + column, is_last ? nullptr : chunk.next + column, out + column, width,
                                 rest < k * L ? rest : k * L};
    hop_vectors<L, most>(chunk, of, k);
    column += k * L;
    vectors -= k;
  }
}

// A hop is written where it stays, or, on its way around the caches or to half precision, to the scratch memory first.
template <int L, class T, class I, class A>
void powers_of_chunk(const Powers<T, I>& powers, int64_t first, int64_t last, char* scratch, GraphChunk<A>& chunk) {
  using C = Compute<T>;
  const int64_t width = powers.hop.width, nodes = last - first, offset = first * width, size = nodes * width;
  const int64_t edges = powers.hop.indptr[last] - powers.hop.indptr[first] + classes * class_padding;
  const bool staged = powers.stream || is_half<T>;
  chunk.first = first;
  chunk.nodes = static_cast<int32_t>(nodes);
  chunk.stride = static_cast<int32_t>((width + L - 1) / L * L);
  chunk.y = reinterpret_cast<A*>(scratch);
  chunk.next = chunk.y + nodes * chunk.stride;
  chunk.long_scales = chunk.next + nodes * chunk.stride;
  A* end = chunk.long_scales + nodes;
  chunk.factors = powers.by_edge ? end : nullptr;
  if (chunk.factors) end += edges;
  C* const staging = reinterpret_cast<C*>(end);
  chunk.order = reinterpret_cast<int32_t*>(staging + (staged ? (size + 1) / 2 * 2 : 0));
  chunk.long_degrees = chunk.order + nodes;
  chunk.place = reinterpret_cast<uint32_t*>(chunk.long_degrees + nodes);
  chunk.neighbours = chunk.long_degrees + 2 * nodes;
  const auto copy = [&](const T* from, T* to) {
    if (powers.stream)
      stream_copy(from, to, size);
    else
      __builtin_memcpy(to, from, size * sizeof(T));
  };
  copy(powers.x + offset, powers.out + offset);
  sort_by_degree<L>(powers, powers.x + offset, chunk);
  if (chunk.factors) copy_factors(powers, chunk);
  for (int64_t r = 1; r <= powers.hops; ++r) {
    T* const out = powers.out + r * powers.nodes * width + offset;
    hop_chunk<L>(chunk, width, r == powers.hops, staged ? staging : reinterpret_cast<C*>(out));
    if (is_half<T>) convert_rows(staging, reinterpret_cast<T*>(staging), size);  // from its start on: may overlap
    if (staged) copy(reinterpret_cast<const T*>(staging), out);
    A* const next = chunk.y;
    chunk.y = chunk.next;
    chunk.next = next;
  }
}

#include "power_dense.inl"

// Whether n indices are in [low, high); a sign bit tells which is not, as in check.h, whose loop is not of this level.
template <class I>
bool are_within(const I* indices, int64_t n, int64_t low, int64_t high) {
  using U = std::make_unsigned_t<I>;
  constexpr int L = lanes<U>;
  constexpr int64_t most = std::numeric_limits<I>::max();
  if (n == 0 || low > most) return n == 0;
  const auto first = static_cast<U>(low), last = static_cast<U>(high > most ? most : high - 1);
  const auto outside = [&](auto index) { return (index - first) | (last - index); };
  const auto some = [&](int64_t e) { return outside(load<L, U>(reinterpret_cast<const U*>(indices) + e)); };
  Vector<U> signs = {};
  for (int64_t e = 0; e + L <= n; e += L) signs |= some(e);
  if (n >= L)
    signs |= some(n - L);
  else
    for (int64_t e = 0; e < n; ++e) signs |= outside(Vector<U>{} + static_cast<U>(indices[e]));
  return sum_of<U>(signs >> (8 * sizeof(U) - 1)) == 0;
}

// Chunk by chunk: as many graphs as fit, at least one. Indices are checked when their chunk brings them into the cache.
template <int L, class T, class I, class A>
bool powers_by_chunks(const Powers<T, I>& powers, const int64_t* ptr, int64_t graphs, char* scratch) {
  const int64_t stride = (powers.hop.width + L - 1) / L * L;
  const int64_t most_nodes = power_chunk_bytes / (2 * stride * static_cast<int64_t>(sizeof(A)));
  const I* indptr = powers.hop.indptr;
  GraphChunk<A> chunk;
  set_scales(powers, chunk);
  const auto stays_inside = [&](int64_t g) {
    const int64_t from = indptr[ptr[g]], to = indptr[ptr[g + 1]];
    return are_within(powers.hop.indices + from, to - from, ptr[g], ptr[g + 1]);
  };
  bool inside = true;
  for (int64_t g = 0, begin = 0; g <= graphs && inside; ++g) {
    const bool dense = g < graphs && is_dense(powers, ptr[g + 1] - ptr[g], indptr[ptr[g + 1]] - indptr[ptr[g]]);
    const bool full = g == graphs || (g > begin && (ptr[g + 1] - ptr[begin] > most_nodes ||
                                                    indptr[ptr[g + 1]] - indptr[ptr[begin]] > power_chunk_edges));
    inside = g == graphs || !powers.check || stays_inside(g);
    if ((full || dense) && ptr[g] > ptr[begin]) powers_of_chunk<L>(powers, ptr[begin], ptr[g], scratch, chunk);
    if (full || dense) begin = g;
    if (dense && inside && dense_powers<T, I, A>(powers, ptr[g], ptr[g + 1] - ptr[g], scratch)) begin = g + 1;
  }
  if (powers.stream) settle();
  return inside;
}

// Vectors of L lanes, or of fewer where these hold a row.
template <class T, class I, class A, int L = lanes<A>>
bool powers_of_graphs(const Powers<T, I>& powers, const int64_t* ptr, int64_t graphs, char* scratch) {
  if constexpr (L > 1)
    if (powers.hop.width <= L / 2) return powers_of_graphs<T, I, A, L / 2>(powers, ptr, graphs, scratch);
  return powers_by_chunks<L, T, I, A>(powers, ptr, graphs, scratch);
}

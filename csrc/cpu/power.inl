// All powers of a graph operator, a few graphs at a time in cache.
//
// Layout: x row-major [N, d], out row-major [R + 1, N, d]. Parallel axis: graphs; each is one thread's, so results do
// not depend on the number of threads. Accumulator: A, in the order in which a row stores its neighbours. With A =
// double, rounded once for the output, nodes with equal neighbourhoods get equal bits in almost every order of their
// neighbours: what deduplication compares.
//
// A block is one graph, or several small ones. Its nodes are taken in the order of their degrees: loops over neighbours
// then have the same length again and again, which branch prediction rewards, and a normalisation by degrees is a
// constant. Sources are kept scaled (y_u = right_u p_u) and padded to whole vectors, so that a hop is one addition per
// neighbour and vector:
//   p_v = left_v sum_u y_u.
// Edge weights, and sums of operators, need a factor per arc instead (then left = right = 1).

constexpr int classes = 17;       // degrees 0 .. 15, and all above in one
constexpr int class_padding = 8;  // between the neighbours of two classes: they are copied in chunks

template <class A>
struct Block {
  int64_t first;  // node
  int32_t nodes;
  int32_t* order;       // [n] nodes by class of degree, counted from the first
  int32_t* neighbours;  // [arcs + padding] where the rows of the neighbours begin in y, in that order
  A* factors;           // beside `neighbours`, or null for ones
  A *y, *next;          // [n, stride] sources of this hop and the next
  int32_t stride;
  int32_t class_begin[classes + 1];   // into order
  int32_t neighbours_begin[classes];  // into neighbours
};

inline int class_of(int64_t degree) { return degree < classes - 1 ? static_cast<int>(degree) : classes - 1; }

template <class T, class I, class A>
int32_t degree_of(const Powers<T, I>& powers, const Block<A>& block, int32_t i) {
  const I* row = powers.hop.indptr + block.first + block.order[i];
  return static_cast<int32_t>(row[1] - row[0]);
}

// left and right of a node, where degrees alone give them.
template <class A, class T, class I>
A left_of(const Powers<T, I>& powers, int32_t degree) {
  if (powers.scaling == Scaling::none || powers.scaling == Scaling::factors) return 1;
  if (degree == 0) return 0;
  return static_cast<A>(powers.scaling == Scaling::row ? 1.0 / degree : 1.0 / std::sqrt(static_cast<double>(degree)));
}

template <class A, class T, class I>
A right_of(const Powers<T, I>& powers, int32_t degree) {
  return powers.scaling == Scaling::symmetric ? left_of<A>(powers, degree) : 1;
}

// Sorts the nodes by degree and copies their neighbours in that order.
template <class T, class I, class A>
void sort_by_degree(const Powers<T, I>& powers, Block<A>& block) {
  constexpr int chunk = vector_bytes / sizeof(I) < class_padding ? vector_bytes / sizeof(I) : class_padding;
  const I *indptr = powers.hop.indptr + block.first, *indices = powers.hop.indices;
  const int32_t nodes = block.nodes;
  const auto stride = static_cast<uint32_t>(block.stride);  // products of what is not read may overflow
  int32_t count[4][classes] = {};  // in turn: consecutive nodes of one class would wait for each other's counter
  int32_t v = 0;
  for (; v + 4 <= nodes; v += 4)
    for (int i = 0; i < 4; ++i) ++count[i][class_of(indptr[v + i + 1] - indptr[v + i])];
  for (; v < nodes; ++v) ++count[0][class_of(indptr[v + 1] - indptr[v])];
  struct {
    int32_t *order, *neighbours;
  } next[classes];
  int32_t node = 0, neighbour = 0;
  for (int c = 0; c < classes; ++c) {
    block.class_begin[c] = node;
    block.neighbours_begin[c] = neighbour;
    next[c] = {block.order + node, block.neighbours + neighbour};
    const int32_t members = count[0][c] + count[1][c] + count[2][c] + count[3][c];
    node += members;
    neighbour += c * members + class_padding;
  }
  block.class_begin[classes] = nodes;
  const I base = static_cast<I>(block.first);
  const int64_t chunks_end = powers.hop.arcs - class_padding;
  for (v = 0; v < nodes; ++v) {
    const int64_t begin = indptr[v], degree = indptr[v + 1] - begin;
    auto& place = next[class_of(degree)];
    *place.order++ = v;
    int32_t* to = place.neighbours;
    place.neighbours += degree;
    const I* from = indices + begin;
    int64_t e = 0;
    if (begin + degree <= chunks_end)
      for (; e < degree; e += class_padding)
        for (int j = 0; j < class_padding; j += chunk)
          store<chunk, uint32_t>(reinterpret_cast<uint32_t*>(to) + e + j,
                                 convert<chunk, uint32_t>(load<chunk, I>(from + e + j) - base) * stride);
    for (; e < degree; ++e) to[e] = static_cast<int32_t>(from[e] - base) * block.stride;
    if (block.factors) {
      A* factors = block.factors + (to - block.neighbours);
      for (e = 0; e < degree; ++e) factors[e] = static_cast<A>(factor_of(powers.hop, block.first + v, begin + e));
    }
  }
}

// y_v = right_v x_v.
template <int L, class T, class I, class A>
void scale_rows(const Powers<T, I>& powers, const Block<A>& block) {
  const int64_t width = powers.hop.width, last = (width - 1) / L * L;
  const T* x = powers.x + block.first * width;
  for (int c = 0; c < classes; ++c) {
    A right = right_of<A>(powers, c);
    for (int32_t i = block.class_begin[c]; i < block.class_begin[c + 1]; ++i) {
      if (c == classes - 1) right = right_of<A>(powers, degree_of(powers, block, i));
      const T* from = x + block.order[i] * width;
      A* to = block.y + static_cast<int64_t>(block.order[i]) * block.stride;
      for (int64_t j = 0; j < last; j += L) store<L, A>(to + j, right * load<L, A>(from + j));
      store<L, A>(to + last, right * load_first<L, A>(from + last, width - last));
    }
  }
}

// Where a pass of a hop reads and writes: some vectors of all rows.
template <class T, class A>
struct Pass {
  const A* y;
  A* next;  // null in the last hop
  T* out;
  int64_t width;    // of a row of out
  int64_t columns;  // of this pass
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
inline void write_row(const Pass<T, A>& pass, int64_t stride, int64_t v, const Lanes<L, A>* sum, A left, A right) {
  T* out = pass.out + v * pass.width;
  for (int k = 0; k < K; ++k) {
    const Lanes<L, A> p = left * sum[k];
    if (k < K - 1)
      store<L, A>(out + k * L, p);
    else
      store_first<L, A>(out + k * L, p, pass.columns - k * L);
    if (pass.next) store<L, A>(pass.next + v * stride + k * L, right * p);
  }
}

// K vectors of the rows [begin, end) of the block's order, all of `degree` neighbours; D is that degree where the
// compiler is to know it, else -1.
template <int L, int K, int D, bool Factors, class T, class A>
void hop_rows(const Block<A>& block, const Pass<T, A>& pass, int32_t begin, int32_t end, int32_t degree,
              const int32_t* neighbours, A left, A right) {
  const int32_t* order = block.order;
  const A *y = pass.y, *factors = Factors ? block.factors + (neighbours - block.neighbours) : nullptr;
  const Pass<T, A> local = pass;
  const int64_t stride = block.stride;
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
void hop_class(const Block<A>& block, const Pass<T, A>& pass, int32_t begin, int32_t end, int32_t degree,
               const int32_t* neighbours, A left, A right) {
  if constexpr (K == 1 && D > 0) {
    if (degree == D)
      hop_rows<L, K, D, Factors>(block, pass, begin, end, degree, neighbours, left, right);
    else
      hop_class<L, K, Factors, D - 1>(block, pass, begin, end, degree, neighbours, left, right);
  } else {
    hop_rows<L, K, -1, Factors>(block, pass, begin, end, degree, neighbours, left, right);
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

// One row of many neighbours: sums side by side, and chunks of them in double, so that the error does not grow with the
// degree.
template <int L, int K, bool Factors, class T, class A>
void hop_long_row(const Block<A>& block, const Pass<T, A>& pass, int64_t v, int32_t degree, const int32_t* neighbours,
                  A left, A right) {
  constexpr int chains = K <= 2 ? 4 : 1;
  constexpr int32_t chunk = 64;
  const A* factors = Factors ? block.factors + (neighbours - block.neighbours) : nullptr;
  double wide[K * L] = {};
  for (int32_t begin = 0; begin < degree; begin += chunk) {
    const int32_t end = degree - begin < chunk ? degree : begin + chunk;
    Lanes<L, A> sum[chains][K] = {};
    int32_t e = begin;
    for (; e + chains <= end; e += chains)
      for (int c = 0; c < chains; ++c) add_row<L, K, Factors>(sum[c], pass.y + neighbours[e + c], factors, e + c);
    for (; e < end; ++e) add_row<L, K, Factors>(sum[0], pass.y + neighbours[e], factors, e);
    for (int k = 0; k < K; ++k) {
      for (int c = 1; c < chains; ++c) sum[0][k] += sum[c][k];
      add_wide<L, A>(wide + k * L, sum[0][k]);
    }
  }
  A narrow[K * L];
  for (int j = 0; j < K * L; ++j) narrow[j] = static_cast<A>(wide[j]);
  Lanes<L, A> sum[K];
  for (int k = 0; k < K; ++k) sum[k] = load<L, A>(narrow + k * L);
  write_row<L, K>(pass, block.stride, v, sum, left, right);
}

template <int L, int K, bool Factors, class T, class I, class A>
void hop_pass(const Powers<T, I>& powers, const Block<A>& block, const Pass<T, A>& pass) {
  for (int c = 0; c < classes - 1; ++c) {
    const int32_t begin = block.class_begin[c], end = block.class_begin[c + 1];
    if (begin < end)
      hop_class<L, K, Factors>(block, pass, begin, end, c, block.neighbours + block.neighbours_begin[c],
                               left_of<A>(powers, c), right_of<A>(powers, c));
  }
  const int32_t* neighbours = block.neighbours + block.neighbours_begin[classes - 1];
  for (int32_t i = block.class_begin[classes - 1]; i < block.nodes; ++i) {
    const int32_t degree = degree_of(powers, block, i);
    hop_long_row<L, K, Factors>(block, pass, block.order[i], degree, neighbours, left_of<A>(powers, degree),
                                right_of<A>(powers, degree));
    neighbours += degree;
  }
}

template <int L, int K, class T, class I, class A>
void hop_pass(const Powers<T, I>& powers, const Block<A>& block, const Pass<T, A>& pass) {
  if (block.factors)
    hop_pass<L, K, true>(powers, block, pass);
  else
    hop_pass<L, K, false>(powers, block, pass);
}

// Rows of L lanes or less; L is less than a register only where d is.
template <int L, class T, class I, class A>
void hop_block(const Powers<T, I>& powers, const Block<A>& block, bool is_last, T* out) {
  constexpr int most = L * sizeof(A) < vector_bytes ? 1 : 8;  // vectors of one pass, as registers allow
  const int64_t width = powers.hop.width;
  int64_t vectors = block.stride / L, passes = (vectors + most - 1) / most, column = 0;
  for (; passes > 0; --passes) {
    const int64_t k = (vectors + passes - 1) / passes, rest = width - column;
    const Pass<T, A> pass = {block.y + column, is_last ? nullptr : block.next + column, out + column, width,
                             rest < k * L ? rest : k * L};
    if constexpr (most == 1) {
      hop_pass<L, 1>(powers, block, pass);
    } else {
      switch (k) {
        case 1:
          hop_pass<L, 1>(powers, block, pass);
          break;
        case 2:
          hop_pass<L, 2>(powers, block, pass);
          break;
        case 3:
          hop_pass<L, 3>(powers, block, pass);
          break;
        case 4:
          hop_pass<L, 4>(powers, block, pass);
          break;
        case 5:
          hop_pass<L, 5>(powers, block, pass);
          break;
        case 6:
          hop_pass<L, 6>(powers, block, pass);
          break;
        case 7:
          hop_pass<L, 7>(powers, block, pass);
          break;
        default:
          hop_pass<L, 8>(powers, block, pass);
      }
    }
    column += k * L;
    vectors -= k;
  }
}

template <int L, class T, class I, class A>
void powers_of_block(const Powers<T, I>& powers, int64_t first, int64_t last, char* scratch) {
  const int64_t width = powers.hop.width, nodes = last - first, offset = first * width, size = nodes * width;
  const int64_t arcs = powers.hop.indptr[last] - powers.hop.indptr[first] + (classes + 1) * class_padding;
  Block<A> block;
  block.first = first;
  block.nodes = static_cast<int32_t>(nodes);
  block.stride = static_cast<int32_t>((width + L - 1) / L * L);
  block.y = reinterpret_cast<A*>(scratch);
  block.next = block.y + nodes * block.stride;
  A* end = block.next + nodes * block.stride;
  block.factors = powers.scaling == Scaling::factors ? end : nullptr;
  if (block.factors) end += arcs;
  T* const staging = reinterpret_cast<T*>(end);
  block.order = reinterpret_cast<int32_t*>(staging + (powers.stream ? (size + 1) / 2 * 2 : 0));
  block.neighbours = block.order + nodes;
  if (powers.stream)
    stream_copy(powers.x + offset, powers.out + offset, size);
  else
    __builtin_memcpy(powers.out + offset, powers.x + offset, size * sizeof(T));
  sort_by_degree(powers, block);
  scale_rows<L>(powers, block);
  for (int64_t r = 1; r <= powers.hops; ++r) {
    T* out = powers.out + r * powers.nodes * width + offset;
    hop_block<L>(powers, block, r == powers.hops, powers.stream ? staging : out);
    if (powers.stream) stream_copy(staging, out, size);
    A* const next = block.y;
    block.y = block.next;
    block.next = next;
  }
}

#include "power_dense.inl"

// As many graphs as the block may hold, at least one.
template <int L, class T, class I, class A>
void powers_in_blocks(const Powers<T, I>& powers, const int64_t* ptr, int64_t graphs, char* scratch) {
  const int64_t stride = (powers.hop.width + L - 1) / L * L;
  const int64_t most_nodes = block_bytes / (2 * stride * static_cast<int64_t>(sizeof(A)));
  const I* indptr = powers.hop.indptr;
  int64_t begin = 0;
  for (int64_t g = 0; g <= graphs; ++g) {
    const bool dense = g < graphs && is_dense(powers, ptr[g + 1] - ptr[g], indptr[ptr[g + 1]] - indptr[ptr[g]]);
    const bool full =
        g == graphs ||
        (g > begin && (ptr[g + 1] - ptr[begin] > most_nodes || indptr[ptr[g + 1]] - indptr[ptr[begin]] > block_arcs));
    if ((full || dense) && ptr[g] > ptr[begin]) powers_of_block<L, T, I, A>(powers, ptr[begin], ptr[g], scratch);
    if (full || dense) begin = g;
    if (dense && dense_powers<T, I, A>(powers, ptr[g], ptr[g + 1] - ptr[g], scratch)) begin = g + 1;
  }
  if (powers.stream) settle();
}

template <class T, class I, class A>
void powers_of_graphs(const Powers<T, I>& powers, const int64_t* ptr, int64_t graphs, char* scratch) {
  constexpr int most = vector_bytes / sizeof(A);
  const int64_t width = powers.hop.width;
  if (width > most / 2) return powers_in_blocks<most, T, I, A>(powers, ptr, graphs, scratch);
  if constexpr (most > 8)
    if (width > 4) return powers_in_blocks<8, T, I, A>(powers, ptr, graphs, scratch);
  if constexpr (most > 4)
    if (width > 2) return powers_in_blocks<4, T, I, A>(powers, ptr, graphs, scratch);
  if constexpr (most > 2)
    if (width > 1) return powers_in_blocks<2, T, I, A>(powers, ptr, graphs, scratch);
  return powers_in_blocks<1, T, I, A>(powers, ptr, graphs, scratch);
}

// All powers of a graph operator, a few graphs at a time in cache.
//
// Layout: x row-major [N, d], out row-major [R + 1, N, d]. Parallel axis: graphs; each is one thread's, so results do
// not depend on the number of threads. Accumulator: A, in the order in which a row stores its neighbours. With A =
// double, rounded once for the output, nodes with equal neighbourhoods get equal bits in almost every order of their
// neighbours: what deduplication compares.
//
// A chunk is one graph, or several small ones. Where few nodes have more than four neighbours, each row has as many
// places for them, and sums up a row of zeros where one is missing: all have the same length. Rows of one value are
// taken a vector at a time then. The other rows, or all, are taken in the order of their degrees: their loops have the
// same length again and again, which branch prediction rewards, and a normalisation by degrees is a constant. Sources
// are kept scaled (y_u = right_u p_u) and padded to whole vectors, so that a hop is one addition per neighbour and
// vector:
//   p_v = left_v sum_u y_u.
// Edge weights, and sums of operators, need a factor per edge instead (then left = right = 1).

constexpr int long_class = 16;  // degrees 0 .. 15 are a class each, all above are one: of long rows
constexpr int classes = long_class + 1;
constexpr Lanes<most_places, int32_t> place_numbers = {0, 1, 2, 3};
constexpr int class_padding = 16;  // between the neighbours of two classes: they are copied in whole vectors

template <class A>
struct GraphChunk {
  int64_t first;  // node
  int32_t nodes;
  int32_t stride;         // of a row of sources
  A *y, *next;            // [1 + n, stride] a row of zeros, then the sources of this hop and the next
  A* left;                // [n]
  bool scaled;            // whether right = left, else 1
  bool wide;              // rows of more than two vectors, of which these may be some columns
  int32_t places;         // of a row; 0 where all rows are sorted
  int32_t* neighbours;    // [n, places], of rows of one value [places, n]: where the rows of neighbours begin in y;
                          // then those of the sorted rows in order
  A* factors;             // beside `neighbours`, or null for ones
  int32_t sorted;         // rows of more neighbours than places
  uint32_t* found;        // [sorted] which these are, times 32, plus their class
  uint32_t* rank;         // [sorted] of each in its quarter and class
  int32_t* order;         // [sorted] the same rows by class
  int32_t* long_degrees;  // of the rows of the long class
  int32_t class_begin[classes + 1];   // into order
  int32_t neighbours_begin[classes];  // into neighbours
  A scale[classes];                   // of all classes but the last: the left of their rows
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
  chunk.scaled = scales_sources(powers);
  chunk.wide = powers.full_width > 2 * lanes<A>;
  for (int c = 0; c < classes; ++c) chunk.scale[c] = scale_of<A>(powers, c);
}

// As many places as all but one in five of the nodes [first, last) need, by a sample of them; none where these are too
// many, or more than 1.6 times as many as neighbours.
template <class T, class I>
int32_t choose_places(const Powers<T, I>& powers, int64_t first, int64_t last) {
  const int64_t step = (last - first) / 256 + 1;
  int64_t number[most_places + 1] = {}, more = 0, neighbours = 0;
  for (int64_t v = first; v < last; v += step, ++more) {
    const int64_t degree = powers.hop.indptr[v + 1] - powers.hop.indptr[v];
    if (degree <= most_places) ++number[degree];
    neighbours += degree;
  }
  const int64_t sampled = more;
  for (int32_t places = 0; places <= most_places; ++places) {
    more -= number[places];
    if (5 * more <= sampled) return 5 * places * sampled <= 8 * neighbours ? places : 0;
  }
  return 0;
}

// Calls f(v, degree, neighbours) for n nodes, v from 0, with their first neighbours counted from `base`; lanes beyond
// the degree hold anything.
template <class T, class I, class F>
inline void for_first_neighbours(const Hop<T, I>& hop, int64_t first, int64_t n, int64_t base, F f) {
  const I *indptr = hop.indptr + first, *indices = hop.indices;
  const auto zero = static_cast<I>(base);
  int64_t vectors_end = n, v = 0;  // beyond it `indices` end in a vector
  while (vectors_end > 0 && indptr[vectors_end - 1] > hop.edges - most_places) --vectors_end;
  const auto node = [&](auto load_some) {
    f(v, static_cast<int32_t>(indptr[v + 1] - indptr[v]), load_some(static_cast<int64_t>(indptr[v])));
  };
  for (; v < vectors_end; ++v)
    node([&](int64_t e) { return convert<most_places, int32_t>(load<most_places, I>(indices + e) - zero); });
  for (; v < n; ++v)
    node([&](int64_t e) {
      Lanes<most_places, int32_t> some = {};
      for (int64_t k = 0; k < most_places && e + k < hop.edges; ++k)
        some[k] = static_cast<int32_t>(indices[e + k] - zero);
      return some;
    });
}

// Where the rows of the neighbours that have a place begin in y: 0, the row of zeros, where there are fewer.
template <int L, class T, class I, class A>
void place_neighbours(const Hop<T, I>& hop, const GraphChunk<A>& chunk) {
  const int64_t places = chunk.places, nodes = chunk.nodes;
  const auto stride = static_cast<uint32_t>(chunk.stride);
  int32_t* const to = chunk.neighbours;
  for_first_neighbours(hop, chunk.first, nodes, chunk.first - 1, [&](int64_t v, int32_t degree, auto neighbours) {
    const auto begin = (Lanes<most_places, uint32_t>)neighbours * stride;  // products of what is not read may overflow
    const auto placed = (Lanes<most_places, int32_t>)begin & (place_numbers < degree);
    if constexpr (L > 1)
      store<most_places, int32_t>(to + v * places, placed);
    else
      for (int e = 0; e < most_places; ++e)
        if (e < places) to[e * nodes + v] = placed[e];
  });
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

// Whether a row is one vector, which is then a part of a register.
template <int L, class A>
constexpr bool is_one_vector = L * sizeof(A) < vector_bytes;

// y_v = right_v x_v, where x and y are rows.
template <int L, class T, class A>
inline void scale_row(const T* x, A right, A* y, int64_t width) {
  const int64_t last = is_one_vector<L, A> ? 0 : (width - 1) / L * L;
  for (int64_t j = 0; j < last; j += L) store<L, A>(y + j, right * load<L, A>(x + j));
  store<L, A>(y + last, right * load_first<L, A>(x + last, width - last));
}

#if defined(SPIN_FAST_AVX512)
// The scales of a vector of rows by their classes; of long rows any.
inline void store_scales(const float* scale, Vector<int32_t> of_class, float* to) {
  _mm512_storeu_ps(to, _mm512_permutexvar_ps((__m512i)of_class, _mm512_loadu_ps(scale)));
}
inline void store_scales(const double* scale, Vector<int32_t> of_class, double* to) {
  const __m512d low = _mm512_loadu_pd(scale), high = _mm512_loadu_pd(scale + 8);
  for (int k = 0; k < 16; k += 8, of_class = swapped<8, int32_t>(of_class)) {
    const __m512i some = _mm512_cvtepi32_epi64(_mm512_castsi512_si256((__m512i)of_class));
    _mm512_storeu_pd(to + k, _mm512_permutex2var_pd(low, some, high));
  }
}
#endif

// The scales of all rows but long ones, and which rows have more neighbours than places, or all where there are none.
template <class T, class I, class A>
void find_rows(const Powers<T, I>& powers, GraphChunk<A>& chunk) {
  const I* indptr = powers.hop.indptr + chunk.first;
  const int32_t nodes = chunk.nodes;
  uint32_t* const found = chunk.found;
  int32_t begin = 0;
  int64_t sorted = 0;
#if defined(SPIN_FAST_AVX512)
  constexpr int L = lanes<int32_t>;
  const Vector<int32_t> most = long_class - Vector<int32_t>{};
  const Vector<int32_t> place = counting<int32_t>(std::make_integer_sequence<int, L>{});
  const __m512i placed = _mm512_set1_epi32(chunk.places ? chunk.places : -1);  // no row in none
  for (; begin + L <= nodes; begin += L) {
    const auto degree = convert<L, int32_t>(load<L, I>(indptr + begin + 1) - load<L, I>(indptr + begin));
    const Vector<int32_t> of_class = degree < most ? degree : most, row = (place + begin) << 5 | of_class;
    store_scales(chunk.scale, of_class, chunk.left + begin);
    const __mmask16 some = _mm512_cmpgt_epi32_mask((__m512i)of_class, placed);
    _mm512_storeu_si512(found + sorted, _mm512_maskz_compress_epi32(some, (__m512i)row));
    sorted += __builtin_popcount(some);
  }
#endif
  for (int32_t v = begin; v < nodes; ++v) {
    const I degree = indptr[v + 1] - indptr[v];
    found[v] = static_cast<uint32_t>(v) << 5 | static_cast<uint32_t>(degree < long_class ? degree : long_class);
  }
  for (int32_t v = begin; v < nodes; ++v) chunk.left[v] = chunk.scale[found[v] & 31];
  chunk.sorted = nodes;
  if (chunk.places == 0) return;
  const auto places = static_cast<uint32_t>(chunk.places);
  for (int32_t v = begin; v < nodes; ++v) {
    const uint32_t row = found[v];
    found[sorted] = row;
    sorted += (row & 31) > places;
  }
  chunk.sorted = static_cast<int32_t>(sorted);
}

// The sources of all rows. The padding of all but the last takes what follows a row of x.
template <int L, class T, class A>
void scale_rows(const T* x, int64_t row_width, const GraphChunk<A>& chunk) {
  const int64_t width = L > 1 ? row_width : 1, stride = L > 1 ? chunk.stride : 1;
  const int64_t whole = is_one_vector<L, A> ? L : stride, last = chunk.nodes - 1;
  for (int64_t j = 0; j < stride; ++j) chunk.y[j] = chunk.next[j] = 0;
  const A* const left = chunk.left;
  A* const y = chunk.y + stride;
  if (chunk.scaled)
    for (int64_t v = 0; v < last; ++v) scale_row<L>(x + v * width, left[v], y + v * stride, whole);
  else
    for (int64_t v = 0; v < last; ++v) scale_row<L, T, A>(x + v * width, 1, y + v * stride, whole);
  scale_row<L>(x + last * width, chunk.scaled ? left[last] : 1, y + last * stride, width);
}

// Sorts the rows that were found by degree and copies their neighbours in that order; scales what is a long row.
template <int L, class T, class I, class A>
void sort_by_degree(const Powers<T, I>& powers, const T* x, GraphChunk<A>& chunk) {
  const I *indptr = powers.hop.indptr + chunk.first, *indices = powers.hop.indices;
  const int32_t rows = chunk.sorted, stride = chunk.stride;
  const I before = static_cast<I>(chunk.first - 1);
  const uint32_t* const found = chunk.found;
  uint32_t* const rank = chunk.rank;
  // Quarters of the rows are counted side by side: consecutive rows of one class would wait for each other's counter.
  struct Begin {
    uint32_t order, neighbours;
  } begin[4][classes] = {};
  const int32_t quarter = rows / 4;
  const auto count = [&](int q, int32_t i) { rank[i] = begin[q][found[i] & 31].order++; };
  for (int32_t i = 0; i < quarter; ++i)
    for (int q = 0; q < 4; ++q) count(q, q * quarter + i);
  for (int32_t i = 4 * quarter; i < rows; ++i) count(3, i);
  uint32_t row = 0, neighbour = static_cast<uint32_t>(chunk.nodes * chunk.places);
  for (int c = 0; c < classes; ++c) {
    chunk.class_begin[c] = static_cast<int32_t>(row);
    chunk.neighbours_begin[c] = static_cast<int32_t>(neighbour);
    for (int q = 0; q < 4; ++q) {
      const uint32_t members = begin[q][c].order;
      begin[q][c] = {row, neighbour};
      row += members;
      neighbour += static_cast<uint32_t>(c) * members;
    }
    neighbour += class_padding;
  }
  chunk.class_begin[classes] = rows;

  // Neighbours in whole vectors, without a branch: of long rows these are a beginning that is written again below; rows
  // too near the end of `indices` are left for later.
  int32_t vectors_end = rows;
  while (vectors_end > 0 && indptr[found[vectors_end - 1] >> 5] > powers.hop.edges - class_padding) --vectors_end;
  int32_t *const order = chunk.order, *const neighbours = chunk.neighbours;
  for (int q = 0; q < 4; ++q) {
    const Begin* const of_class = begin[q];
    const int32_t end = q < 3 ? (q + 1) * quarter : rows;
    int32_t i = q * quarter;
    const auto place = [&](auto copy) {
      const uint32_t v = found[i] >> 5, c = found[i] & 31;
      order[of_class[c].order + rank[i]] = static_cast<int32_t>(v);
      copy(indices + indptr[v], c, before, stride, neighbours + (of_class[c].neighbours + rank[i] * c));
    };
    for (const int32_t some = end < vectors_end ? end : vectors_end; i < some; ++i) place(copy_short_row<I>);
    for (; i < end; ++i) place(copy_neighbours<I>);
  }
  int32_t* to = neighbours + chunk.neighbours_begin[long_class];
  for (int32_t i = chunk.class_begin[long_class]; i < rows; ++i) {
    const int32_t v = order[i];
    const auto degree = static_cast<int32_t>(indptr[v + 1] - indptr[v]);
    chunk.long_degrees[i - chunk.class_begin[long_class]] = degree;
    chunk.left[v] = scale_of<A>(powers, degree);
    copy_neighbours(indices + indptr[v], degree, before, stride, to);
    to += degree;
    const int64_t width = powers.hop.width;
    if (chunk.scaled) scale_row<L>(x + v * width, chunk.left[v], chunk.y + (v + int64_t{1}) * stride, width);
  }
}

// The factors of all edges, beside the neighbours.
template <int L, class T, class I, class A>
void copy_factors(const Powers<T, I>& powers, const GraphChunk<A>& chunk) {
  const I* indptr = powers.hop.indptr + chunk.first;
  const auto copy = [&](int32_t v, int64_t number, A* to, int64_t step) {
    for (int64_t e = indptr[v]; e < indptr[v] + number; ++e, to += step)
      *to = e < indptr[v + 1] ? static_cast<A>(factor_of(powers.hop, chunk.first + v, e)) : 0;
    return to;
  };
  const int64_t row = L > 1 ? chunk.places : 1, step = L > 1 ? 1 : chunk.nodes;
  for (int32_t v = 0; v < chunk.nodes; ++v) copy(v, chunk.places, chunk.factors + v * row, step);
  for (int c = 0; c < classes; ++c) {
    A* to = chunk.factors + chunk.neighbours_begin[c];
    for (int32_t i = chunk.class_begin[c]; i < chunk.class_begin[c + 1]; ++i)
      to = copy(chunk.order[i], indptr[chunk.order[i] + 1] - indptr[chunk.order[i]], to, 1);
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

// p_v = left sum, to out, the first `columns` of them; right p_v, to the sources of the next hop.
template <int L, int K, class T, class A>
inline void write_row(const HopVectors<T, A>& of, int64_t stride, int64_t v, const Lanes<L, A>* sum, Lanes<L, A> left,
                      Lanes<L, A> right, int64_t columns) {
  T* out = of.out + v * of.width;
  Lanes<L, A> p[K];
  for (int k = 0; k < K; ++k) p[k] = left * sum[k];
  for (int k = 0; k < K - 1; ++k) store<L, A>(out + k * L, p[k]);
  store_first<L, A>(out + (K - 1) * L, p[K - 1], columns - (K - 1) * L);
  if (!of.next) return;
  for (int k = 0; k < K; ++k) store<L, A>(of.next + v * stride + k * L, right * p[k]);
}

// K vectors of all rows, of the neighbours that have a place. The last vector of a row is written whole where the next
// row, which is written later, begins behind it.
template <int L, int K, int P, bool Factors, class T, class A>
void placed_rows(const GraphChunk<A>& chunk, const HopVectors<T, A>& of) {
  const int32_t* neighbours = chunk.neighbours;
  const A *y = of.y, *factors = chunk.factors, *left = chunk.left;
  const HopVectors<T, A> local = of;
  const int64_t stride = chunk.stride, last = chunk.nodes - 1;
  const Lanes<L, A> by = static_cast<A>(chunk.scaled) - Lanes<L, A>{}, constant = 1 - by;
  const auto row = [&](int64_t v, auto whole) {
    Lanes<L, A> sum[K] = {};
    for (int e = 0; e < P; ++e) add_row<L, K, Factors>(sum, y + neighbours[e], factors, e);
    neighbours += P;
    if (Factors) factors += P;
    const Lanes<L, A> of_row = left[v] - Lanes<L, A>{};
    write_row<L, K>(local, stride, v, sum, of_row, of_row * by + constant, whole ? K * L : local.columns);
  };
  int64_t v = 0;
  if (of.columns == of.width)
    for (; v < last; ++v) row(v, std::true_type());
  for (; v <= last; ++v) row(v, std::false_type());
}

// The same of rows of one value: lanes are rows.
template <int P, bool Factors, class T, class A>
void placed_values(const GraphChunk<A>& chunk, const HopVectors<T, A>& of) {
  constexpr int most = 32 / sizeof(A);
  const int32_t* const neighbours = chunk.neighbours;
  const A *y = of.y, *factors = chunk.factors, *left = chunk.left;
  const HopVectors<T, A> local = of;
  const int64_t nodes = chunk.nodes;
  const A by = chunk.scaled, constant = 1 - by;
  const auto rows = [&]<int L>(int64_t v) {
    Lanes<L, A> sum = {};
    for (int e = 0; e < P; ++e) {
      const Lanes<L, A> row = gather<L>(y, neighbours + e * nodes + v);
      if constexpr (Factors)
        sum += load<L, A>(factors + e * nodes + v) * row;
      else
        sum += row;
    }
    const Lanes<L, A> scale = load<L, A>(left + v), p = scale * sum;
    store<L, A>(local.out + v, p);
    if (local.next) store<L, A>(local.next + v, (scale * by + constant) * p);
  };
  int64_t v = 0;
  for (; v + most <= nodes; v += most) rows.template operator()<most>(v);
  for (; v < nodes; ++v) rows.template operator()<1>(v);
}

template <int L, int K, bool Factors, int P = most_places, class T, class A>
void hop_placed(const GraphChunk<A>& chunk, const HopVectors<T, A>& of) {
  if constexpr (P > 0) {
    if (chunk.places < P) return hop_placed<L, K, Factors, P - 1>(chunk, of);
    if constexpr (L > 1)
      placed_rows<L, K, P, Factors>(chunk, of);
    else
      placed_values<P, Factors>(chunk, of);
  }
}

// K vectors of the rows [begin, end) of the chunk's order, all of `degree` neighbours; D is that degree where the
// compiler is to know it, else -1.
template <int L, int K, int D, bool Factors, class T, class A>
void class_rows(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int32_t begin, int32_t end, int32_t degree,
                const int32_t* neighbours, A scale) {
  const int32_t* order = chunk.order;
  const A *y = of.y, *factors = Factors ? chunk.factors + (neighbours - chunk.neighbours) : nullptr;
  const HopVectors<T, A> local = of;
  const int64_t stride = chunk.stride;
  const Lanes<L, A> left = scale - Lanes<L, A>{}, right = (chunk.scaled ? scale : 1) - Lanes<L, A>{};
  if (D >= 0) degree = D;
  for (int32_t i = begin; i < end; ++i) {
    Lanes<L, A> sum[K] = {};
    for (int32_t e = 0; e < degree; ++e) add_row<L, K, Factors>(sum, y + neighbours[e], factors, e);
    neighbours += degree;
    if (Factors) factors += degree;
    write_row<L, K>(local, stride, order[i], sum, left, right, local.columns);
  }
}

// Short degrees of narrow rows are known to the compiler, too.
template <int L, int K, bool Factors, int D = 4, class T, class A>
void hop_class(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int32_t begin, int32_t end, int32_t degree,
               const int32_t* neighbours, A scale) {
  if constexpr (K == 1 && D > 0) {
    if (degree == D)
      class_rows<L, K, D, Factors>(chunk, of, begin, end, degree, neighbours, scale);
    else
      hop_class<L, K, Factors, D - 1>(chunk, of, begin, end, degree, neighbours, scale);
  } else {
    class_rows<L, K, -1, Factors>(chunk, of, begin, end, degree, neighbours, scale);
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

// One row of many neighbours: sums side by side, in `chains`, and those of pieces in double, so that the error does not
// grow with the degree.
template <int L, int K, int chains, bool Factors, class T, class A>
void hop_long_row(const GraphChunk<A>& chunk, const HopVectors<T, A>& of, int64_t v, int32_t degree,
                  const int32_t* neighbours) {
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
  const Lanes<L, A> left = chunk.left[v] - Lanes<L, A>{}, one = 1 - Lanes<L, A>{};
  write_row<L, K>(of, chunk.stride, v, sum, left, chunk.scaled ? left : one, of.columns);
}

template <int L, int K, bool Factors, class T, class A>
void hop_vectors(const GraphChunk<A>& chunk, const HopVectors<T, A>& of) {
  hop_placed<L, K, Factors>(chunk, of);
  for (int c = 0; c < long_class; ++c) {
    const int32_t begin = chunk.class_begin[c], end = chunk.class_begin[c + 1];
    if (begin < end)
      hop_class<L, K, Factors>(chunk, of, begin, end, c, chunk.neighbours + chunk.neighbours_begin[c], chunk.scale[c]);
  }
  const int32_t* neighbours = chunk.neighbours + chunk.neighbours_begin[long_class];
  const int32_t long_begin = chunk.class_begin[long_class];
  for (int32_t i = long_begin; i < chunk.sorted; ++i) {
    const int32_t degree = chunk.long_degrees[i - long_begin];
    if (K > 2 || chunk.wide)
      hop_long_row<L, K, 1, Factors>(chunk, of, chunk.order[i], degree, neighbours);
    else if constexpr (K <= 2)
      hop_long_row<L, K, 4, Factors>(chunk, of, chunk.order[i], degree, neighbours);
    neighbours += degree;
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
  constexpr int most = is_one_vector<L, A> ? 1 : 8;  // vectors of one round, as registers allow
  int64_t vectors = chunk.stride / L, rounds = (vectors + most - 1) / most, column = 0;
  for (; rounds > 0; --rounds) {
    const int64_t k = (vectors + rounds - 1) / rounds, rest = width - column;
    const HopVectors<T, A> of = {chunk.y + column, is_last ? nullptr : chunk.next + chunk.stride + column, out + column,
                                 width, rest < k * L ? rest : k * L};
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
  const int64_t neighbours =
      nodes * chunk.places + powers.hop.indptr[last] - powers.hop.indptr[first] + classes * class_padding;
  const bool staged = powers.stream || is_half<T>;
  chunk.first = first;
  chunk.nodes = static_cast<int32_t>(nodes);
  chunk.stride = static_cast<int32_t>(padded_to(L, width));
  chunk.y = reinterpret_cast<A*>(scratch);
  chunk.next = chunk.y + (nodes + 1) * chunk.stride;
  chunk.left = chunk.next + (nodes + 1) * chunk.stride;
  A* end = chunk.left + nodes;
  chunk.factors = powers.by_edge ? end : nullptr;
  if (chunk.factors) end += neighbours;
  C* const staging = reinterpret_cast<C*>(end);
  chunk.order = reinterpret_cast<int32_t*>(staging + (staged ? (size + 1) / 2 * 2 : 0));
  chunk.long_degrees = chunk.order + nodes;
  chunk.rank = reinterpret_cast<uint32_t*>(chunk.long_degrees + nodes);
  chunk.found = chunk.rank + nodes;
  chunk.neighbours = reinterpret_cast<int32_t*>(chunk.found + nodes);
  const auto copy = [&](const T* from, T* to) {
    if (powers.stream)
      stream_copy(from, to, size);
    else
      __builtin_memcpy(to, from, size * sizeof(T));
  };
  if (powers.with_x) copy(powers.x + offset, powers.out + offset);
  find_rows(powers, chunk);
  if (chunk.places > 0) place_neighbours<L>(powers.hop, chunk);
  scale_rows<L>(powers.x + offset, width, chunk);
  sort_by_degree<L>(powers, powers.x + offset, chunk);
  if (chunk.factors) copy_factors<L>(powers, chunk);
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
  const int64_t stride = padded_to(L, powers.hop.width);
  constexpr int64_t place_bytes = L == 1 ? 24 : 0;  // of a node: more than its sources, where these are one value
  const int64_t most_nodes = power_chunk_bytes / (2 * stride * static_cast<int64_t>(sizeof(A)) + place_bytes);
  const I* indptr = powers.hop.indptr;
  GraphChunk<A> chunk;
  set_scales(powers, chunk);
  chunk.places = choose_places(powers, ptr[0], ptr[graphs]);
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

// All powers of a small or near-dense graph with one feature: a bit for every pair of nodes.
//
// Layout: bits[v] are the neighbours of v, in whole words. A hop adds y_u where bit u of row v is set, instead of
// gathering neighbours one by one: of large graphs, a vector of sources at a time; of small ones, one source for a
// vector of rows at a time. Accumulator: A, one sum per lane. Where an edge is repeated the graph is taken as a sparse
// one.

constexpr int64_t marked_rows = 8;
constexpr int64_t small_nodes = 32;

// Sparse work is some time per node and edge, dense work a fraction of it per pair of nodes: the less the more lanes,
// but a small graph does not fill those of AVX-512.
template <class T, class I>
bool is_dense(const Powers<T, I>& powers, int64_t nodes, int64_t edges) {
  if (powers.hop.width != 1 || powers.by_edge || nodes > dense_nodes) return false;
  constexpr int64_t pairs = vector_bytes / 6, small_pairs = pairs < 5 ? pairs : 5;
  return nodes * nodes < (nodes > small_nodes ? pairs * edges : small_pairs * (edges + nodes));
}

// left and right of n nodes, whole vectors of them, from the degrees in left.
template <class A>
void scales_of_degrees(Operator op, int64_t n, A* left, A* right) {
  constexpr int step = lanes<A>;
  for (int64_t v = 0; v < n; v += step) {
    const Vector<A> degree = load(left + v), one = Vector<A>{} + 1;
    Vector<A> scale = degree;
    if (op == Operator::sym)
      for (int k = 0; k < step; ++k) scale[k] = std::sqrt(scale[k]);
    scale = op == Operator::adj ? one : degree > 0 ? one / scale : Vector<A>{};
    store(left + v, scale);
    store(right + v, op == Operator::sym ? scale : one);
  }
}

// ---- Small graphs: a word for each row, a lane for each word

// The word of one row. Where a neighbour is repeated it has less bits than there are: the sum of two equal ones is one.
template <class I>
uint32_t word_of_row(const I* row, int64_t degree, I first, int64_t nodes, bool readable) {
  using U = std::make_unsigned_t<I>;
  U word = 0;
  if (!readable) {
    for (int64_t e = 0; e < degree; ++e) word += U{1} << (row[e] - first);
    return static_cast<uint32_t>(word);
  }
  Vector<U> bits = {};
  for (int64_t e = 0; e < nodes; e += lanes<U>) {  // as often for all rows: a degree would be mispredicted
    const Vector<U> u = load<lanes<U>, U>(reinterpret_cast<const U*>(row) + e) - static_cast<U>(first);
    bits += first_lanes<U>((Vector<U>{} + 1) << (u & 31), degree - e);
  }
  return static_cast<uint32_t>(sum_of<U>(bits));
}

// False, and nothing done, where an edge is repeated.
template <class T, class I, class A>
bool small_powers(const Powers<T, I>& powers, int64_t first, int64_t nodes) {
  using Words = Vector<Bits<A> >;
  constexpr int64_t step = lanes<A>, chains = 4;
  const I* indptr = powers.hop.indptr + first;
  alignas(64) Bits<A> words[small_nodes] = {};
  alignas(64) A left[small_nodes] = {}, right[small_nodes], y[small_nodes] = {};
  for (int64_t v = 0; v < nodes; ++v) {
    const int64_t begin = indptr[v], degree = indptr[v + 1] - begin;
    const bool readable = begin + small_nodes <= powers.hop.edges;
    const uint32_t word = word_of_row(powers.hop.indices + begin, degree, static_cast<I>(first), nodes, readable);
    if (__builtin_popcount(word) != degree) return false;
    words[v] = static_cast<Bits<A> >(word);
    left[v] = static_cast<A>(degree);
  }
  const T* x = powers.x + first;
  T* out = powers.out + first;
  scales_of_degrees(powers.op, nodes, left, right);
  for (int64_t v = 0; v < nodes; v += step) store(y + v, load(right + v) * load_first<step, A>(x + v, nodes - v));
  __builtin_memcpy(out, x, nodes * sizeof(T));
  for (int64_t r = 1; r <= powers.hops; ++r) {
    out += powers.nodes;
    Vector<A> sums[small_nodes / step];
    for (int64_t v = 0, i = 0; v < nodes; v += step, ++i) {
      Words rows = load<step, Bits<A> >(words + v);
      Vector<A> sum[chains] = {};
      for (int64_t u = 0; u < nodes; u += chains, rows >>= chains)
        for (int k = 0; k < chains; ++k) {
          const Vector<A> source = Vector<A>{} + y[u + k];
          sum[k] += (rows & (1 << k)) != 0 ? source : Vector<A>{};
        }
      sums[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    for (int64_t v = 0, i = 0; v < nodes; v += step, ++i) {
      const Vector<A> p = load(left + v) * sums[i];
      store_first<step, A>(out + v, p, nodes - v);
      store(y + v, load(right + v) * p);
    }
  }
  return true;
}

// ---- Larger ones: a bit of a row for each lane

// Sets the bits of the rows [begin, end) by way of a byte each; false where an edge is repeated. Several rows at a
// time, so that the bytes of one have arrived in the cache when they are read in vectors.
template <class T, class I>
bool set_bits(const Powers<T, I>& powers, int64_t first, int64_t begin, int64_t end, int64_t words, char* marks,
              uint64_t* bits) {
  const I *indptr = powers.hop.indptr + first, *indices = powers.hop.indices;
  __builtin_memset(marks, 0, (end - begin) * words * 64);
  for (int64_t v = begin; v < end; ++v) {
    char* mark = marks + (v - begin) * words * 64 - first;
    const I *u = indices + indptr[v], *last = indices + indptr[v + 1];
    const auto mark_some = [&](const I* some) {
      for (int k = 0; k < 8; ++k) mark[some[k]] = 1;
    };
    if (last - u < 8) {
      for (; u < last; ++u) mark[*u] = 1;
    } else {
      for (; u + 8 < last; u += 8) mark_some(u);
      mark_some(last - 8);  // again, perhaps: cheaper than a loop whose end is mispredicted
    }
  }
  int64_t set = 0;
  for (int64_t w = 0; w < (end - begin) * words; ++w) {
    uint64_t word = 0;
#if defined(SPIN_FAST_AVX512)
    const __m512i marked = _mm512_load_si512(marks + 64 * w);
    word = _mm512_test_epi8_mask(marked, marked);
#elif defined(SPIN_FAST_AVX2)
    for (int half = 0; half < 2; ++half) {
      const __m256i marked = _mm256_load_si256(reinterpret_cast<const __m256i*>(marks + 64 * w + 32 * half));
      const __m256i is_set = _mm256_cmpgt_epi8(marked, _mm256_setzero_si256());
      word |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(is_set))) << 32 * half;
    }
#else
    for (int k = 0; k < 8; ++k) {  // the product gathers the lowest bits of eight bytes in its highest byte
      uint64_t eight;
      __builtin_memcpy(&eight, marks + 64 * w + 8 * k, 8);
      word |= (eight * 0x0102040810204080) >> 56 << 8 * k;
    }
#endif
    bits[begin * words + w] = word;
    set += __builtin_popcountll(word);
  }
  return set == indptr[end] - indptr[begin];
}

// The sums of four rows, whose bits lie `words` apart.
#if defined(SPIN_FAST_AVX512)
inline void masked_sums(const uint64_t* bits, int64_t words, const double* y, int64_t columns, double* sums) {
  __m512d sum[4] = {};
  for (int64_t u = 0; u < columns; u += 8)
    for (int i = 0; i < 4; ++i) {
      const auto mask = static_cast<__mmask8>(bits[i * words + u / 64] >> u % 64);
      sum[i] = _mm512_mask_add_pd(sum[i], mask, sum[i], _mm512_load_pd(y + u));
    }
  for (int i = 0; i < 4; ++i) sums[i] = _mm512_reduce_add_pd(sum[i]);
}

inline void masked_sums(const uint64_t* bits, int64_t words, const float* y, int64_t columns, float* sums) {
  __m512 sum[4] = {};
  for (int64_t u = 0; u < columns; u += 16)
    for (int i = 0; i < 4; ++i) {
      uint16_t mask;
      __builtin_memcpy(&mask, reinterpret_cast<const char*>(bits + i * words) + u / 8, sizeof(mask));
      sum[i] = _mm512_mask_add_ps(sum[i], mask, sum[i], _mm512_load_ps(y + u));
    }
  __m256 half[4];
  for (int i = 0; i < 4; ++i) half[i] = _mm512_castps512_ps256(sum[i]) + _mm512_extractf32x8_ps(sum[i], 1);
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(sums, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
}
#else
template <class A>
void masked_sums(const uint64_t* bits, int64_t words, const A* y, int64_t columns, A* sums) {
  using Words = Vector<Bits<A> >;
  const Words lane = (Words{} + 1) << counting<A>(std::make_integer_sequence<int, lanes<A> >{});
  Vector<A> sum[4] = {};
  for (int64_t u = 0; u < columns; u += lanes<A>) {
    const auto some = __builtin_bit_cast(Words, load(y + u));
    for (int i = 0; i < 4; ++i) {
      const Words is_set = (lane & static_cast<Bits<A> >(bits[i * words + u / 64] >> u % 64)) != 0;
      sum[i] += __builtin_bit_cast(Vector<A>, is_set & some);
    }
  }
  for (int i = 0; i < 4; ++i) sums[i] = sum_of<A>(sum[i]);
}
#endif

// False, and nothing done, where an edge is repeated.
template <class T, class I, class A>
bool dense_powers(const Powers<T, I>& powers, int64_t first, int64_t nodes, char* scratch) {
  const int64_t columns = (nodes + 15) / 16 * 16, words = (nodes + 63) / 64;
  if (nodes <= small_nodes) return small_powers<T, I, A>(powers, first, nodes);
  auto* y = reinterpret_cast<A*>(scratch);
  A *left = y + columns, *right = left + columns, *sum = right + columns;
  auto* bits = reinterpret_cast<uint64_t*>(sum + columns);
  alignas(64) char marks[marked_rows * dense_nodes];
  for (int64_t v = 0; v < nodes; v += marked_rows)
    if (!set_bits(powers, first, v, v + marked_rows < nodes ? v + marked_rows : nodes, words, marks, bits))
      return false;
  for (int64_t w = nodes * words; w < (nodes + 3) / 4 * 4 * words; ++w) bits[w] = 0;
  const I* indptr = powers.hop.indptr + first;
  for (int64_t v = 0; v < columns; ++v) left[v] = v < nodes ? static_cast<A>(indptr[v + 1] - indptr[v]) : 0;
  scales_of_degrees(powers.op, nodes, left, right);
  T* out = powers.out + first;
  const T* x = powers.x + first;
  __builtin_memcpy(out, x, nodes * sizeof(T));
  for (int64_t v = 0; v < nodes; ++v) y[v] = right[v] * load<1, A>(x + v);
  for (int64_t v = nodes; v < columns; ++v) y[v] = 0;
  for (int64_t r = 1; r <= powers.hops; ++r) {
    out += powers.nodes;
    for (int64_t v = 0; v < nodes; v += 4) masked_sums(bits + v * words, words, y, columns, sum + v);
    for (int64_t v = 0; v < nodes; ++v) {
      const A p = left[v] * sum[v];
      store<1, A>(out + v, p);
      y[v] = right[v] * p;
    }
  }
  return true;
}

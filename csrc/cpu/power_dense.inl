// All powers of a small or near-dense graph with one feature: a bit for every pair of nodes.
//
// Layout: bits[v] are the neighbours of v, in whole words. A hop adds y_u where bit u of row v is set, instead of
// gathering neighbours one by one: of large graphs, a vector of sources at a time; of small ones, one source for a
// vector of rows at a time; with AVX2, of both, three sources for a vector of rows, looked up in a table. Accumulator:
// A, one sum per lane. Where an edge is repeated the graph is taken as a sparse one.

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

#if defined(SPIN_FAST_AVX2)

// ---- Tables of the sums of three sources, which a permutation looks up for eight rows at a time

using Table = Vector<float>;  // lane k has the sum of those of its sources whose bits are set in k
constexpr int64_t table_sources = 3;

constexpr int64_t tables_of(int64_t nodes) { return (nodes + table_sources - 1) / table_sources; }

inline void make_tables(const float* y, int64_t nodes, Table* tables) {
  using Words = Vector<int32_t>;
  constexpr Words bits[table_sources] = {
      {0, ~0, 0, ~0, 0, ~0, 0, ~0}, {0, 0, ~0, ~0, 0, 0, ~0, ~0}, {0, 0, 0, 0, ~0, ~0, ~0, ~0}};
  for (int64_t t = 0; t < tables_of(nodes); ++t) {
    Table part[table_sources];
    for (int k = 0; k < table_sources; ++k)
      part[k] = __builtin_bit_cast(Table, bits[k] & __builtin_bit_cast(Words, broadcast(y[t * table_sources + k])));
    tables[t] = (part[0] + part[1]) + part[2];
  }
}

// The sums of `vectors` vectors of rows, V at most. Words of rows lie side by side, those for the next `each` tables
// `stride` behind.
template <int V>
inline void table_sums(int64_t vectors, const int32_t* words, int64_t stride, const Table* tables, int64_t number,
                       int64_t each, float* sums) {
  if constexpr (V > 1)
    if (vectors < V) return table_sums<V - 1>(vectors, words, stride, tables, number, each, sums);
  constexpr int step = lanes<float>;
  Table all[V] = {};
  for (; number > 0; number -= each, words += stride) {
    Lanes<step, uint32_t> rows[V];
    Table sum[V] = {};
    for (int i = 0; i < V; ++i) rows[i] = load<step, uint32_t>(reinterpret_cast<const uint32_t*>(words) + i * step);
    for (const Table* const end = tables + (number < each ? number : each); tables < end; ++tables)
      for (int i = 0; i < V; ++i) {
        sum[i] += (Table)_mm256_permutevar8x32_ps((__m256)*tables, (__m256i)rows[i]);  // by the lowest three bits
        rows[i] >>= table_sources;
      }
    for (int i = 0; i < V; ++i) all[i] += sum[i];
  }
  for (int i = 0; i < V; ++i) store(sums + i * step, all[i]);
}
#endif

// ---- Small graphs: a word for each row, a lane for each word

// running[e] is the sum of the bits u - first of all neighbours u before e: the word of a row is a difference of two.
// Where a neighbour is repeated it has fewer bits than neighbours, since the sum of two equal ones is one.
template <class I, class U>
void running_bits(const I* indices, int64_t n, I first, bool readable, U* running) {
  constexpr int step = lanes<U>;
  const int64_t last = readable ? n : n / step * step;
  Vector<U> before = {};
  running[0] = 0;
  for (int64_t e = 0; e < last; e += step) {
    const Vector<U> u = load<step, U>(reinterpret_cast<const U*>(indices) + e) - static_cast<U>(first);
    const Vector<U> sums = running_sums<U>((Vector<U>{} + 1) << (u & 31));
    store<step, U>(running + e + 1, before + sums);
    before += shuffled<step>(sums, sums, [](int) { return step - 1; });  // the last lane in all
  }
  for (int64_t e = last; e < n; ++e) running[e + 1] = running[e] + (U{1} << (indices[e] - first));
}

// sums[v] = sum_u y_u where bit u of word v is set.
template <class A>
void word_sums(const Bits<A>* words, const A* y, int64_t nodes, A* sums) {
  constexpr int64_t step = lanes<A>, chains = 4;
  for (int64_t v = 0; v < nodes; v += step) {
    Vector<Bits<A> > rows = load<step, Bits<A> >(words + v);
    Vector<A> sum[chains] = {};
    for (int64_t u = 0; u < nodes; u += chains, rows >>= chains)
      for (int k = 0; k < chains; ++k) sum[k] += (rows & (1 << k)) != 0 ? broadcast(y[u + k]) : Vector<A>{};
    store(sums + v, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

#if defined(SPIN_FAST_AVX2)
inline void word_sums(const int32_t* words, const float* y, int64_t nodes, float* sums) {
  constexpr int step = lanes<float>, most = small_nodes / step;
  Table tables[tables_of(small_nodes)];
  make_tables(y, nodes, tables);
  table_sums<most>((nodes + step - 1) / step, words, 0, tables, tables_of(nodes), tables_of(small_nodes), sums);
}
#endif

// n values in whole vectors, the last two of which may overlap: cheaper than branches on what is left.
template <class S>
inline void copy_some(const S* from, int64_t n, S* to) {
  constexpr int step = lanes<S>;
  if (n < step) {
    __builtin_memcpy(to, from, n * sizeof(S));
    return;
  }
  for (int64_t i = 0; i < n - step; i += step) __builtin_memcpy(to + i, from + i, vector_bytes);
  __builtin_memcpy(to + n - step, from + n - step, vector_bytes);
}

// False, and nothing done, where an edge is repeated.
template <class T, class I, class A>
bool small_powers(const Powers<T, I>& powers, int64_t first, int64_t nodes) {
  using U = std::make_unsigned_t<I>;
  constexpr int64_t step = lanes<A>, most_edges = small_nodes * small_nodes;
  const I* indptr = powers.hop.indptr + first;
  const int64_t begin = indptr[0], edges = indptr[nodes] - begin, last = (nodes - 1) / step * step;
  if (edges > most_edges) return false;
  U running[most_edges + lanes<U> + 1];
  alignas(64) Bits<A> words[small_nodes];
  alignas(64) A left[small_nodes], right[small_nodes], y[small_nodes + step], sums[small_nodes];
  alignas(64) T row[small_nodes + lanes<T>];
  running_bits(powers.hop.indices + begin, edges, static_cast<I>(first), begin + edges + lanes<U> <= powers.hop.edges,
               running);
  store<step, Bits<A> >(words + last, Vector<Bits<A> >{});
  store<step, A>(left + last, Vector<A>{});
  for (int64_t v = 0; v < nodes; ++v) {
    const int64_t from = indptr[v] - begin, to = indptr[v + 1] - begin;
    const auto word = static_cast<uint32_t>(running[to] - running[from]);
    if (__builtin_popcount(word) != to - from) return false;
    words[v] = static_cast<Bits<A> >(word);
    left[v] = static_cast<A>(to - from);
  }
  const T* x = powers.x + first;
  T* out = powers.out + first;
  scales_of_degrees(powers.op, nodes, left, right);
  store<step, A>(row + last, Vector<A>{});
  copy_some(x, nodes, row);
  if (powers.with_x) copy_some(x, nodes, out);
  for (int64_t v = 0; v < nodes; v += step) store(y + v, load(right + v) * load<step, A>(row + v));
  store(y + last + step, Vector<A>{});
  for (int64_t r = 1; r <= powers.hops; ++r) {
    out += powers.nodes;
    word_sums(words, y, nodes, sums);
    for (int64_t v = 0; v < nodes; v += step) {
      const Vector<A> p = load(left + v) * load(sums + v);
      store<step, A>(row + v, p);
      store(y + v, load(right + v) * p);
    }
    copy_some(row, nodes, out);
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

// The rows of a graph, of `words` words each; the last argument is scratch memory for other forms of them.
template <class A>
struct BitRows {
  const uint64_t* bits;
  int64_t words, nodes;

  BitRows(uint64_t* rows, int64_t words_of_row, int64_t number, void*)
      : bits(rows), words(words_of_row), nodes(number) {
    for (int64_t w = nodes * words; w < (nodes + 3) / 4 * 4 * words; ++w) rows[w] = 0;
  }
  // sums[v] = sum_u y_u where bit u of row v is set; y has 0 in `columns` beyond the nodes.
  void sums(const A* y, int64_t columns, A* sums) const {
    for (int64_t v = 0; v < nodes; v += 4) masked_sums(bits + v * words, words, y, columns, sums + v);
  }
};

#if defined(SPIN_FAST_AVX2)
// Rows taken apart into words of whole tables, each beside those of the other rows. What a table, or a vector of rows,
// has beyond the nodes is a source of 0, or a sum that no one reads.
template <>
struct BitRows<float> {
  static constexpr int64_t each = 10, piece = each * table_sources, block = 4 * lanes<float>;
  int32_t* pieces;
  Table* tables;
  int64_t nodes, stride;

  BitRows(const uint64_t* rows, int64_t words, int64_t number, void* scratch)
      : tables(static_cast<Table*>(scratch)), nodes(number), stride((number + block - 1) / block * block) {
    pieces = reinterpret_cast<int32_t*>(tables + tables_of(nodes));
    for (int64_t v = 0; v < nodes; ++v)
      for (int64_t bit = 0, i = v; bit < nodes; bit += piece, i += stride) {
        uint64_t from_byte;  // of the row, or of what is behind it
        __builtin_memcpy(&from_byte, reinterpret_cast<const char*>(rows + v * words) + bit / 8, sizeof(from_byte));
        pieces[i] = static_cast<int32_t>(from_byte >> bit % 8);
      }
  }
  void sums(const float* y, int64_t, float* sums) const {
    constexpr int step = lanes<float>;
    make_tables(y, nodes, tables);
    for (int64_t v = 0; v < nodes; v += block)
      table_sums<4>((nodes - v + step - 1) / step, pieces + v, stride, tables, tables_of(nodes), each, sums + v);
  }
};
#endif

// False, and nothing done, where an edge is repeated.
template <class T, class I, class A>
bool dense_powers(const Powers<T, I>& powers, int64_t first, int64_t nodes, char* scratch) {
  if (nodes <= small_nodes) return small_powers<T, I, A>(powers, first, nodes);
  const int64_t columns = (nodes + 2 + 15) / 16 * 16, words = (nodes + 63) / 64;  // the last table may have two more
  auto* y = reinterpret_cast<A*>(scratch);
  A *left = y + columns, *right = left + columns, *sum = right + columns;
  auto* bits = reinterpret_cast<uint64_t*>(sum + columns);
  alignas(64) char marks[marked_rows * dense_nodes];
  for (int64_t v = 0; v < nodes; v += marked_rows)
    if (!set_bits(powers, first, v, v + marked_rows < nodes ? v + marked_rows : nodes, words, marks, bits))
      return false;
  const BitRows<A> rows(bits, words, nodes, bits + ((nodes + 4) * words + 7) / 8 * 8);
  const I* indptr = powers.hop.indptr + first;
  for (int64_t v = 0; v < columns; ++v) left[v] = v < nodes ? static_cast<A>(indptr[v + 1] - indptr[v]) : 0;
  scales_of_degrees(powers.op, nodes, left, right);
  T* out = powers.out + first;
  const T* x = powers.x + first;
  if (powers.with_x) __builtin_memcpy(out, x, nodes * sizeof(T));
  for (int64_t v = 0; v < nodes; ++v) y[v] = right[v] * load<1, A>(x + v);
  for (int64_t v = nodes; v < columns; ++v) y[v] = 0;
  for (int64_t r = 1; r <= powers.hops; ++r) {
    out += powers.nodes;
    rows.sums(y, columns, sum);
    for (int64_t v = 0; v < nodes; ++v) {
      const A p = left[v] * sum[v];
      store<1, A>(out + v, p);
      y[v] = right[v] * p;
    }
  }
  return true;
}

// Patterns: which nodes have the same row in a hop because all that it is made of is the same, and the rows of those
// that are new.
//
// Layout: rows row-major [patterns, d], sources [patterns, stride] as in power.inl; keys [nodes, pattern_degree], whole
// vectors. Parallel axis: new patterns, by the caller. Accumulator: as in power.inl, whose functions sum up, so that a
// pattern's row has the bits that its nodes' rows have.

// Calls f with as many lanes as the sources of a row of `width` values fill.
template <class A, int L = lanes<A>, class F>
inline void with_source_lanes(int64_t width, F f) {
  if constexpr (L > 1)
    if (width <= L / 2) return with_source_lanes<A, L / 2>(width, f);
  f(std::integral_constant<int, L>{});
}

template <class T, class I, class A>
void pattern_sources(const Powers<T, I>& powers, const PatternRows<A>& of, T* out) {
  const int64_t width = powers.hop.width;
  with_source_lanes<A>(width, [&]<int L>(std::integral_constant<int, L>) {
    const int64_t stride = padded_to(L, width);
    for (int64_t i = 0; i < of.size; ++i) {
      const int64_t v = of.first_node + of.node[i];
      const T* row = powers.x + v * width;
      __builtin_memcpy(out + i * width, row, width * sizeof(T));
      const int64_t degree = powers.hop.indptr[v + 1] - powers.hop.indptr[v];
      const A right = scales_sources(powers) ? scale_of<A>(powers, degree) : 1;
      if (of.next) scale_row<L>(row, right, of.next + (of.first_new + i) * stride, width);
    }
  });
}

// Patterns instead of nodes are the chunk: sorted by degree, their neighbours are places in the sources of the hop
// before.
template <class T, class I, class A>
void pattern_rows(const Powers<T, I>& powers, const PatternRows<A>& of, T* out, char* scratch) {
  const I *indptr = powers.hop.indptr + of.first_node, *indices = powers.hop.indices;
  const int64_t width = powers.hop.width;
  const auto degree_of = [&](int64_t i) { return indptr[of.node[i] + 1] - indptr[of.node[i]]; };
  GraphChunk<A> chunk;
  chunk.first = of.first_node;
  chunk.nodes = static_cast<int32_t>(of.size);
  chunk.places = 0;
  chunk.sorted = chunk.nodes;
  set_scales(powers, chunk);
  int32_t members[classes] = {}, neighbours[classes] = {};
  for (int64_t i = 0; i < of.size; ++i) {
    const int64_t degree = degree_of(i), c = degree < long_class ? degree : long_class;
    ++members[c];
    neighbours[c] += static_cast<int32_t>(degree);
  }
  int32_t places = 0;
  chunk.class_begin[0] = 0;
  for (int c = 0; c < classes; ++c) {
    chunk.class_begin[c + 1] = chunk.class_begin[c] + members[c];
    chunk.neighbours_begin[c] = places;
    places += neighbours[c];
    members[c] = chunk.class_begin[c], neighbours[c] = chunk.neighbours_begin[c];
  }
  chunk.left = reinterpret_cast<A*>(scratch);
  chunk.factors = powers.by_edge ? chunk.left + of.size : nullptr;
  chunk.order = reinterpret_cast<int32_t*>(chunk.left + of.size + (powers.by_edge ? places : 0));
  chunk.long_degrees = chunk.order + of.size;
  chunk.neighbours = chunk.long_degrees + of.size;
  with_source_lanes<A>(width, [&]<int L>(std::integral_constant<int, L>) {
    chunk.stride = static_cast<int32_t>(padded_to(L, width));
    for (int64_t i = 0; i < of.size; ++i) {
      const auto degree = static_cast<int32_t>(degree_of(i));
      const int c = degree < long_class ? degree : long_class;
      if (c == long_class) {
        chunk.long_degrees[members[c] - chunk.class_begin[c]] = degree;
        chunk.left[i] = scale_of<A>(powers, degree);
      }
      chunk.order[members[c]++] = static_cast<int32_t>(i);
      const I first = indptr[of.node[i]];
      for (I e = first; e < first + degree; ++e) {
        if (chunk.factors)
          chunk.factors[neighbours[c]] = static_cast<A>(factor_of(powers.hop, of.first_node + of.node[i], e));
        chunk.neighbours[neighbours[c]++] = of.pattern[indices[e] - of.first_node] * chunk.stride;
      }
    }
    chunk.y = const_cast<A*>(of.y);  // only read
    // A hop writes behind a row of zeros, which no pattern needs.
    chunk.next = of.next ? of.next + (of.first_new - 1) * chunk.stride : nullptr;
    hop_chunk<L>(chunk, width, !of.next, out);
  });
}

template <class A, class I>
void near_nodes(const Hop<A, I>& hop, int64_t first, int64_t n, int32_t* near) {
  constexpr int L = pattern_degree;
  const Lanes<L, int32_t> none = Lanes<L, int32_t>{} + static_cast<int32_t>(n);
  for_first_neighbours(hop, first, n, first, [&](int64_t v, int32_t degree, auto neighbours) {
    Lanes<L, int32_t> of = place_numbers < degree ? neighbours : none;
    if (degree > L) of[0] = -1;
    store<L, int32_t>(near + v * L, of);
  });
}

inline void pattern_keys(const int32_t* near, int64_t n, const int32_t* pattern, int64_t unique, uint32_t* key) {
  constexpr uint32_t apart = 0xfffffffe;  // begins no other key
  for (int64_t v = 0; v < n; ++v, near += pattern_degree, key += pattern_degree) {
    if (near[0] < 0) {
      key[0] = apart, key[1] = (unique + v) & INT32_MAX, key[2] = static_cast<uint32_t>((unique + v) >> 31), key[3] = 0;
      continue;
    }
    for (int k = 0; k < pattern_degree; ++k) key[k] = static_cast<uint32_t>(pattern[near[k]]);
  }
}

inline uint64_t hash_of_key(const uint32_t* key) {
  uint64_t low, high;
  __builtin_memcpy(&low, key, 8);
  __builtin_memcpy(&high, key + 2, 8);
  uint64_t hash = (low * 0x9e3779b97f4a7c15) ^ ((high ^ high >> 29) * 0xbf58476d1ce4e5b9);
  hash = (hash ^ hash >> 32) * 0xff51afd7ed558ccd;
  return hash ^ hash >> 32;
}

// The place of a key in a bucket, or one beyond its last. All are compared: which it is would be mispredicted.
inline int place_in(const PatternBucket& bucket, const uint32_t* key) {
#if defined(SPIN_FAST_AVX512)
  const __m512i keys = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(key)));
  unsigned equal = _mm512_cmpeq_epi32_mask(_mm512_load_si512(&bucket), keys);  // a bit per word, four to a key
  equal &= equal >> 1;
  return __builtin_ctz((equal & equal >> 2 & 0x111) | 0x1000) / 4;
#else
  constexpr int L = pattern_degree;
  const Lanes<L, uint32_t> wanted = load<L, uint32_t>(key);
  int place = PatternBucket::size;
  for (int k = 0; k < PatternBucket::size; ++k)
    place = any<L, uint32_t>(load<L, uint32_t>(bucket.key[k]) ^ wanted) ? place : k;
  return place;
#endif
}

inline int64_t number_patterns(const KnownPatterns& known, const uint32_t* key, int64_t n, int32_t* number,
                               int64_t* fresh) {
  constexpr int64_t at_once = 64;  // whose buckets are on their way together
  int64_t size = known.size;
  for (int64_t begin = 0; begin < n; begin += at_once) {
    const int64_t here = n - begin < at_once ? n - begin : at_once;
    uint64_t place[at_once];
    for (int64_t i = 0; i < here; ++i) {
      place[i] = hash_of_key(key + (begin + i) * pattern_degree) & known.bucket_mask;
      __builtin_prefetch(known.buckets + place[i]);
    }
    for (int64_t i = begin; i < begin + here; ++i) {
      const uint32_t* const of = key + i * pattern_degree;
      for (uint64_t at = place[i - begin];; at = (at + 1) & known.bucket_mask) {
        PatternBucket& bucket = known.buckets[at];
        int place = place_in(bucket, of);
        if (place == PatternBucket::size) {
          if (bucket.used == PatternBucket::size) continue;
          place = bucket.used++;
          __builtin_memcpy(bucket.key[place], of, pattern_degree * sizeof(uint32_t));
          bucket.number[place] = static_cast<int32_t>(size);
          fresh[size++ - known.size] = i;
        }
        number[i] = bucket.number[place];
        break;
      }
    }
  }
  return size - known.size;
}

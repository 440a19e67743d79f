// distinct_rows: the number of each node's row among those that are known.
//
// Layout: rows row-major [N, d], as bits. Parallel axis: branches, by the caller; lanes are features. Rows are equal if
// their bits are, -0 read as +0. A hash only proposes, but for rows of one word.

// L words, those of -0 made those of +0.
template <int L, class W>
inline Lanes<L, W> positive_zeros(const W* from) {
  const Lanes<L, W> bits = *reinterpret_cast<const typename LanesOf<L, W>::Unaligned*>(from);
  return bits == W(W{1} << (8 * sizeof(W) - 1)) ? Lanes<L, W>{} : bits;
}

// Calls f with where each vector of L words begins, of which a row has at least L; the last two may share some.
template <int L, class F>
inline void for_each_vector(int64_t width, F f) {
  for (int64_t j = 0; j < width - L; j += L) f(j);
  f(width - L);
}

template <int L, class W>
inline bool any(Lanes<L, W> bits) {
  const auto pairs = (Lanes<L * sizeof(W) / 8, uint64_t>)bits;
#if defined(SPIN_FAST_AVX512)
  if constexpr (sizeof(bits) == 64) return _mm512_test_epi64_mask((__m512i)bits, (__m512i)bits) != 0;
#endif
#if defined(SPIN_FAST_AVX512) || defined(SPIN_FAST_AVX2)
  if constexpr (sizeof(bits) == 32) return !_mm256_testz_si256((__m256i)bits, (__m256i)bits);
#endif
  uint64_t either = 0;
  for (size_t k = 0; k < sizeof(bits) / 8; ++k) either |= pairs[k];
  return either != 0;
}

// Rows of few bytes are taken one word after the other.
template <int L, class W>
constexpr bool by_vectors = L * sizeof(W) >= 16;

// Whether f, which gives a vector of a row that is to be compared, gives the same of a and b.
template <int L, class W, class Width, class F>
inline bool equal_vectors(const W* a, const W* b, Width width, F f) {
  if constexpr (by_vectors<L, W>) {
    Lanes<L, W> differ{};
    for_each_vector<L>(width,
                       [&](int64_t j) { differ |= f.template operator()<L>(a + j) ^ f.template operator()<L>(b + j); });
    return !any<L, W>(differ);
  } else {
    W differ = 0;
    for (int64_t j = 0; j < width; ++j) differ |= f.template operator()<1>(a + j) ^ f.template operator()<1>(b + j);
    return differ == 0;
  }
}

// Rows that are compared are almost always equal as they are.
template <int L, class W, class Width>
inline bool equal_rows(const W* a, const W* b, Width width) {
  return equal_vectors<L>(a, b, width, []<int K>(const W* from) { return load<K, W>(from); }) ||
         equal_vectors<L>(a, b, width, []<int K>(const W* from) { return positive_zeros<K>(from); });
}

#if defined(SPIN_FAST_AVX512) || defined(SPIN_FAST_AVX2)
// A round of AES for every 16 bytes: of the state that is beside them, of which they are the key.
template <int H>
inline void mix(Lanes<2 * H, uint64_t> bits, __m128i* state) {
  if constexpr (H == 1) {
    *state = _mm_aesenc_si128(*state, (__m128i)bits);
  } else {
    mix<H / 2>(part<H, uint64_t, 0>(bits), state);
    mix<H / 2>(part<H, uint64_t, H>(bits), state + H / 2);
  }
}
#endif

// The hash of each of n rows, by rounds of AES where there are such, else the mixed sum of the products of all 32 bits
// with keys of their own.
template <int L, class W, class Width>
void hash_rows(const W* rows, int64_t n, Width width, const uint32_t* keys, uint64_t mask, uint64_t* hash) {
  for (int64_t v = 0; v < n; ++v) {
    const W* row = rows + v * width;
#if defined(SPIN_FAST_AVX512) || defined(SPIN_FAST_AVX2)
    if constexpr (by_vectors<L, W>) {
      constexpr int H = L * sizeof(W) / 16;
      __m128i state[H] = {};
      for_each_vector<L>(width, [&](int64_t j) { mix<H>((Lanes<2 * H, uint64_t>)positive_zeros<L>(row + j), state); });
      for (int k = 1; k < H; ++k) state[0] = _mm_aesenc_si128(state[0], state[k]);
      const __m128i none = {}, last = _mm_aesenc_si128(_mm_aesenc_si128(state[0], none), none);
      hash[v] = static_cast<uint64_t>(_mm_cvtsi128_si64(last)) & mask;
      continue;
    }
#endif
    uint64_t sum = 0;
    for (int64_t j = 0; j < width; ++j) {
      const W bits = positive_zeros<1>(row + j);
      if constexpr (sizeof(W) == 8)
        sum += (bits & 0xffffffff) * keys[2 * j] + (bits >> 32) * keys[2 * j + 1];
      else
        sum += uint64_t{bits} * keys[j];
    }
    sum = (sum ^ (sum >> 32)) * 0xff51afd7ed558ccd;
    hash[v] = (sum ^ (sum >> 32)) & mask;
  }
}

template <class W>
int64_t nonzeros(const W* row, int64_t width) {
  uint32_t sum = 0;
  for (int64_t j = 0; j < width; ++j) sum += static_cast<W>(row[j] << 1) != 0;
  return sum;
}

// Writes the values of a row that are neither 0 nor -0, and their columns; returns how many.
template <class W>
int64_t pack_row(const W* row, int64_t width, W* value, int32_t* column) {
  constexpr int L = 64 / sizeof(W);
  int64_t size = 0;
  for (int64_t j = 0; j < width; j += L) {
    const int64_t end = width - j < L ? width - j : L;
#if defined(SPIN_FAST_AVX512)
    if constexpr (sizeof(W) == 4) {
      const auto first = [](int64_t n) { return static_cast<__mmask16>((1u << n) - 1); };
      const __m512i bits = _mm512_maskz_loadu_epi32(first(end), row + j);
      const __m512i columns =
          (__m512i)(counting<int32_t>(std::make_integer_sequence<int, L>{}) + static_cast<int32_t>(j));
      const __mmask16 used = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(INT32_MAX));
      const __mmask16 target = first(__builtin_popcount(used));
      _mm512_mask_storeu_epi32(value + size, target, _mm512_maskz_compress_epi32(used, bits));
      _mm512_mask_storeu_epi32(column + size, target, _mm512_maskz_compress_epi32(used, columns));
      size += __builtin_popcount(used);
      continue;
    }
#endif
    uint32_t mask = 0;
    for (int64_t k = 0; k < end; ++k) mask |= uint32_t{static_cast<W>(row[j + k] << 1) != 0} << k;
    for (; mask; mask &= mask - 1, ++size) {
      const int64_t at = j + __builtin_ctz(mask);
      value[size] = row[at], column[size] = static_cast<int32_t>(at);
    }
  }
  return size;
}

// Whether the sparse row u is `row`.
template <class W>
bool is_sparse_row(const KnownRows<W>& known, int64_t u, const W* row) {
  W differ = 0;
  for (int64_t e = known.row_begin[u]; e < known.row_begin[u + 1]; ++e)
    differ |= known.rows[e] ^ row[known.column_of[e]];
  return differ == 0 && nonzeros(row, known.width) == known.row_begin[u + 1] - known.row_begin[u];
}

// The column of the only 1 in a row of fewer than one_hot_columns, the others 0; or -1.
template <class W>
inline int64_t one_hot_column(const W* row, int64_t width) {
  constexpr W one = sizeof(W) == 4 ? 0x3f800000 : 0x3ff0000000000000;
  constexpr W of_one = 1 << 20, of_other = 2 << 20;  // more than a column; sums of all do not overflow
  W sum = 0;
  for (int64_t j = 0; j < width; ++j)  // without conditional jumps, which would be mispredicted
    sum += (-W{row[j] != 0} & of_other) + (-W{row[j] == one} & (of_one - of_other + static_cast<W>(j)));
  return sum >> 20 == 1 ? static_cast<int64_t>(sum & (of_one - 1)) : -1;
}

// Keeps a row as the one numbered u. Not inlined, since the loop over rows, of which few are new, needs the registers.
template <class W, class Width>
__attribute__((noinline)) void keep_row(const KnownRows<W>& known, int64_t u, Width width, const W* row,
                                        uint32_t hash) {
  if (known.hashes) known.hashes[u] = hash;
  if (known.row_begin) {
    const int64_t begin = known.row_begin[u];
    known.row_begin[u + 1] = begin + pack_row<W>(row, width, known.rows + begin, known.column_of + begin);
  } else {
    for (int64_t j = 0; j < width; ++j) known.rows[u * width + j] = positive_zeros<1>(row + j);
  }
}

// Lane k compared with lane k ^ Distance: the smaller value is where bit `Bit` is 0.
template <int Distance, int Bit, class I>
inline Vector<I> in_order(Vector<I> v) {
  const Vector<I> other = swapped<Distance, I>(v), low = v < other ? v : other, high = v < other ? other : v;
  return shuffled<lanes<I>>(low, high, [](int k) { return k & Bit ? lanes<I> + k : k; });
}

// Sorts bitonic runs of 2 * Distance lanes, which may be lanes of several registers, all at once.
template <int R, int Distance, class I>
inline void merge_halves(Vector<I>* v) {
  constexpr int L = lanes<I>;
  if constexpr (Distance >= L) {
    constexpr int apart = Distance / L;
    for (int r = 0; r < R; ++r) {
      if (r & apart) continue;
      const Vector<I> low = v[r], high = v[r + apart];
      v[r] = low < high ? low : high;
      v[r + apart] = low < high ? high : low;
    }
  } else {
    for (int r = 0; r < R; ++r) v[r] = in_order<Distance, Distance, I>(v[r]);
  }
  if constexpr (Distance > 1) merge_halves<R, Distance / 2, I>(v);
}

// Sorts each run of so many lanes in R registers by a bitonic network: sorted halves are compared with one of them
// turned around, which leaves the smaller values in the first half, and both bitonic.
template <int R, int Run, class I>
inline void sort_registers(Vector<I>* v) {
  constexpr int L = lanes<I>;
  if constexpr (Run > 2) sort_registers<R, Run / 2, I>(v);
  if constexpr (Run <= L) {
    for (int r = 0; r < R; ++r) v[r] = in_order<Run - 1, Run / 2, I>(v[r]);
  } else {  // what is left in the second half stays turned around
    constexpr int run = Run / L;
    for (int first = 0; first < R; first += run) {
      Vector<I> high[run / 2];
      for (int r = 0; r < run / 2; ++r) {
        const Vector<I> low = v[first + r], other = swapped<L - 1, I>(v[first + run - 1 - r]);
        v[first + r] = low < other ? low : other;
        high[r] = low < other ? other : low;
      }
      for (int r = 0; r < run / 2; ++r) v[first + run / 2 + r] = high[r];
    }
  }
  if constexpr (Run > 2) merge_halves<R, Run / 4, I>(v);
}

// Writes the rows of n nodes, at most short_list, in ascending order, each once, and how often; returns how many. There
// may be anything in the short_list places after those of the nodes.
template <class I, int R = 1>
int64_t list_rows(const I* of_node, int64_t n, I* row, int32_t* count) {
  constexpr int64_t L = lanes<I>, room = R * L;
  if constexpr (room < short_list)
    if (n > room) return list_rows<I, 2 * R>(of_node, n, row, count);
  constexpr I none = std::numeric_limits<I>::max();  // no row: after all of them
  const Vector<I> place = counting<I>(std::make_integer_sequence<int, L>{});
  Vector<I> v[R];
  for (int r = 0; r < R; ++r)
    v[r] = place < static_cast<I>(n - r * L) ? load<L, I>(of_node + r * L) : Vector<I>{} + none;
  sort_registers<R, R * L, I>(v);
  I sorted[room + 1];
  for (int r = 0; r < R; ++r) store<L, I>(sorted + r * L, v[r]);
  sorted[room] = none;
  int32_t end[room];
  int64_t size = 0;
  for (int32_t i = 0; i < n; ++i) {
    row[size] = sorted[i], end[size] = i + 1;
    size += sorted[i] != sorted[i + 1];
  }
  for (int64_t i = 0; i < size; ++i) count[i] = end[i] - (i ? end[i - 1] : 0);
  return size;
}

// A hash that no two words share: each step can be undone.
inline uint32_t mixed(uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352d;
  bits = (bits ^ (bits >> 15)) * 0x846ca68b;
  return bits ^ (bits >> 16);
}

// Gives the first of n rows their numbers, up to one that is not known by its column; returns how many they are, and
// the column of the only 1 in that one, or -1. Not inlined, since the loop over other rows needs the registers.
template <class W, class I, class Width>
__attribute__((noinline)) int64_t one_hot_rows(const KnownRows<W>& known, Width width, const W* rows, int64_t n,
                                               I* number, int64_t& column) {
  for (int64_t i = 0; i < n; ++i) {
    column = one_hot_column(rows + i * width, width);
    if (column < 0 || known.row_of_column[column] < 0) return i;
    number[i] = known.row_of_column[column];
  }
  return n;
}

// Gives each of n rows its number among those that are known, which the new ones join. Rows of one word are told apart
// by their hashes alone.
template <int L, bool Words, class W, class I, class Width>
int64_t number_rows(const KnownRows<W>& known, Width width, const W* rows, int64_t n, I* number, int64_t* fresh) {
  constexpr int64_t at_once = 64;  // whose slots are on their way together
  const uint64_t mask = known.slot_mask;
  uint64_t* const slots = known.slots;
  const W* const known_rows = known.rows;
  const bool sparse = known.row_begin != nullptr;
  constexpr bool may_be_one_hot = !Words && sizeof(W) >= 4;
  int64_t column = may_be_one_hot && known.row_of_column ? 0 : -1;  // -1: rows are not one-hot
  int64_t size = known.size;
  for (int64_t begin = 0; begin < n;) {
    if constexpr (may_be_one_hot)
      if (column >= 0) begin += one_hot_rows(known, width, rows + begin * width, n - begin, number + begin, column);
    const int64_t here = n - begin < at_once ? n - begin : at_once;
    uint64_t hash[at_once];
    if constexpr (Words)
      for (int64_t i = 0; i < here; ++i) hash[i] = mixed(positive_zeros<1>(rows + begin + i));
    else
      hash_rows<L>(rows + begin * width, here, width, known.keys, known.hash_mask, hash);
    for (int64_t i = 0; i < here; ++i) __builtin_prefetch(slots + (static_cast<uint32_t>(hash[i]) & mask));
    for (int64_t i = 0; i < here; ++i) {
      const W* row = rows + (begin + i) * width;
      const auto h = static_cast<uint32_t>(hash[i]);
      const uint64_t tag = slot_tag(h);
      const auto same = [&](uint64_t slot) {
        if ((slot ^ tag) >> slot_number_bits != 0) return false;
        if constexpr (Words) return true;
        const auto u = static_cast<int64_t>(slot_number(slot));
        return sparse ? is_sparse_row(known, u, row) : equal_rows<L>(known_rows + u * width, row, width);
      };
      uint64_t at = h & mask, slot = slots[at];
      for (; slot && !same(slot); slot = slots[at]) at = (at + 1) & mask;
      if (!slot) {
        keep_row(known, size, width, row, h);
        if (fresh) fresh[size - known.size] = begin + i;
        slots[at] = slot = tag | static_cast<uint64_t>(size++);
      }
      number[begin + i] = static_cast<I>(slot_number(slot));
    }
    if (column >= 0 && here > 0) known.row_of_column[column] = static_cast<int32_t>(number[begin]);
    begin += here;
  }
  return size - known.size;
}

// Calls f with the widest vector that a row fills, and its width, a constant where that is faster.
template <class W, int L = vector_bytes / sizeof(W), class F>
inline auto with_vectors(int64_t width, F f) {
  if constexpr (L == 1) {
    if (width == 2) return f(std::integral_constant<int, 1>{}, std::integral_constant<int64_t, 2>{});
    if (width == 3) return f(std::integral_constant<int, 1>{}, std::integral_constant<int64_t, 3>{});
    return f(std::integral_constant<int, 1>{}, width);
  } else {
    if (width >= L) return f(std::integral_constant<int, L>{}, width);
    return with_vectors<W, by_vectors<L / 2, W> ? L / 2 : 1>(width, f);
  }
}

template <class W, class I>
int64_t number_rows(const KnownRows<W>& known, const W* rows, int64_t n, I* number, int64_t* fresh) {
  if constexpr (sizeof(W) <= 4)
    if (known.width == 1 && ~known.hash_mask == 0 && !known.row_begin)
      return number_rows<1, true>(known, std::integral_constant<int64_t, 1>{}, rows, n, number, fresh);
  return with_vectors<W>(known.width, [&]<int L>(std::integral_constant<int, L>, auto width) {
    return number_rows<L, false>(known, width, rows, n, number, fresh);
  });
}

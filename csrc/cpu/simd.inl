// Vectors: what the kernels of every instruction set are written in. Plain GCC vector types, so that one source serves
// all; loads and stores need no alignment. Lanes<L, A> has L lanes, Vector<T> fills a register.

template <int L, class A>
struct LanesOf {
  typedef A Type __attribute__((vector_size(L * sizeof(A))));
  typedef Type Unaligned __attribute__((aligned(alignof(A)), may_alias));
};

template <class A>
struct LanesOf<1, A> {  // a scalar: compilers keep vectors of one lane in memory
  using Type = A;
  typedef A Unaligned __attribute__((may_alias));
};

template <int L, class A>
using Lanes = typename LanesOf<L, A>::Type;

template <class T>
constexpr int lanes = vector_bytes / sizeof(T);

template <class T>
using Vector = Lanes<lanes<T>, T>;

template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <int L, class To, class From>
inline Lanes<L, To> convert(From from) {
  if constexpr (L == 1) return static_cast<To>(from);
#if defined(SPIN_FAST_AVX512)  // GCC 12 takes these two apart
  else if constexpr (L == 8 && std::is_same_v<From, Lanes<8, float>> && std::is_same_v<To, double>)
    return (Lanes<8, double>)_mm512_cvtps_pd((__m256)from);
  else if constexpr (L == 8 && std::is_same_v<From, Lanes<8, double>> && std::is_same_v<To, float>)
    return (Lanes<8, float>)_mm512_cvtpd_ps((__m512d)from);
#endif
  else
    return __builtin_convertvector(from, Lanes<L, To>);
}

// ---- Half precision: to float exactly; back to the nearest, ties to even

template <int L>
inline Lanes<L, float> to_float(Lanes<L, uint32_t> half, BFloat16) {
  return __builtin_bit_cast(Lanes<L, float>, half << 16);
}

template <int L>
inline Lanes<L, float> to_float(Lanes<L, uint32_t> half, Half) {
  using Words = Lanes<L, uint32_t>;
  const Words bits = (half & 0x7fff) << 13, exponent = half & 0x7c00;
  // A subtraction shifts the bits of a denormal half to where they belong; no float here is denormal.
  const Words small = __builtin_bit_cast(Words, __builtin_bit_cast(Lanes<L, float>, bits + 0x38800000) - 0x1p-14f);
  const Words finite = exponent == 0 ? small : bits + 0x38000000;
  const Words magnitude = exponent == 0x7c00 ? bits | 0x7f800000 : finite;
  return __builtin_bit_cast(Lanes<L, float>, magnitude | (half & 0x8000) << 16);
}

template <int L>
inline Lanes<L, uint32_t> from_float(Lanes<L, float> value, BFloat16) {
  using Words = Lanes<L, uint32_t>;
  const Words bits = __builtin_bit_cast(Words, value);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded;
}

template <int L>
inline Lanes<L, uint32_t> from_float(Lanes<L, float> value, Half) {
  using Words = Lanes<L, uint32_t>;
  const Words bits = __builtin_bit_cast(Words, value), magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude + (0xc8000fff + (magnitude >> 13 & 1))) >> 13;
  // An addition shifts the bits of what is a denormal half to the end of the mantissa.
  const Words small = __builtin_bit_cast(Words, __builtin_bit_cast(Lanes<L, float>, magnitude) + 0.5f) - 0x3f000000;
  const Words large = magnitude > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
  const Words rounded = magnitude >= 0x47800000 ? large : magnitude < 0x38800000 ? small : normal;
  return rounded | (bits >> 16 & 0x8000);
}

// ---- From and to memory; S is what is stored there

template <class S>
constexpr bool is_half = std::is_same_v<S, Half> || std::is_same_v<S, BFloat16>;

template <int L, class A, class S>
inline Lanes<L, A> load(const S* from) {
  if constexpr (is_half<S>) {
    const Lanes<L, uint16_t> bits = *reinterpret_cast<const typename LanesOf<L, uint16_t>::Unaligned*>(from);
    return convert<L, A>(to_float<L>(convert<L, uint32_t>(bits), S{}));
  } else {
    const Lanes<L, S> values = *reinterpret_cast<const typename LanesOf<L, S>::Unaligned*>(from);
    return convert<L, A>(values);
  }
}

template <int L, class A, class S>
inline void store(S* to, Lanes<L, A> value) {
  if constexpr (is_half<S>)
    *reinterpret_cast<typename LanesOf<L, uint16_t>::Unaligned*>(to) =
        convert<L, uint16_t>(from_float<L>(convert<L, float>(value), S{}));
  else
    *reinterpret_cast<typename LanesOf<L, S>::Unaligned*>(to) = convert<L, S>(value);
}

#if defined(SPIN_FAST_AVX512)
// The lanes whose bits are set in a mask; 0 in the others.
#define SPIN_FAST_MASKED(L, T, Register, prefix, suffix)                      \
  inline Lanes<L, T> load_masked(unsigned mask, const T* from, Lanes<L, T>) { \
    return (Lanes<L, T>)prefix##_maskz_loadu_##suffix(mask, from);            \
  }                                                                           \
  inline void store_masked(unsigned mask, T* to, Lanes<L, T> row) {           \
    prefix##_mask_storeu_##suffix(to, mask, (Register)row);                   \
  }
SPIN_FAST_MASKED(4, float, __m128, _mm, ps)
SPIN_FAST_MASKED(8, float, __m256, _mm256, ps)
SPIN_FAST_MASKED(16, float, __m512, _mm512, ps)
SPIN_FAST_MASKED(4, double, __m256d, _mm256, pd)
SPIN_FAST_MASKED(8, double, __m512d, _mm512, pd)
#undef SPIN_FAST_MASKED
#endif

// 0, 1, 2, ...
template <class T, int... K>
inline Vector<Bits<T>> counting(std::integer_sequence<int, K...>) {
  return Vector<Bits<T>>{K...};
}

#if defined(SPIN_FAST_AVX2)
// The first n lanes; 0 in the others. There is no such store that is fast.
inline Vector<float> load_some(const float* from, int64_t n) {
  const Vector<int32_t> mask = counting<float>(std::make_integer_sequence<int, 8>{}) < static_cast<int32_t>(n);
  return (Vector<float>)_mm256_maskload_ps(from, (__m256i)mask);
}
inline Vector<double> load_some(const double* from, int64_t n) {
  const Vector<int64_t> mask = counting<double>(std::make_integer_sequence<int, 4>{}) < n;
  return (Vector<double>)_mm256_maskload_pd(from, (__m256i)mask);
}
#endif

// L lanes: lane k is lane of(k) of those of a and b, one after the other.
template <int L, class V, class Of>
inline auto shuffled(V a, V b, Of of) {
  return [&]<int... K>(std::integer_sequence<int, K...>) {
    return __builtin_shufflevector(a, b, of(K)...);
  }(std::make_integer_sequence<int, L>{});
}

// Lanes [From, From + L) of a vector.
template <int L, class A, int From, class V>
inline Lanes<L, A> part(V value) {
  if constexpr (L == 1)
    return value[From];
  else
    return shuffled<L>(value, value, [](int k) { return From + k; });
}

// The first n lanes, at most all; 0 in the others. Halves of halves, where there are no masks: n is the same for row
// after row, so branches are foreseen.
template <int L, class A, class S>
inline Lanes<L, A> load_first(const S* from, int64_t n) {
  if (n >= L) return load<L, A>(from);
#if defined(SPIN_FAST_AVX512)
  if constexpr (L >= 4 && std::is_floating_point_v<S> && L * sizeof(S) <= vector_bytes)
    return convert<L, A>(load_masked((1u << n) - 1, from, Lanes<L, S>{}));
#elif defined(SPIN_FAST_AVX2)
  if constexpr (std::is_floating_point_v<S> && L == lanes<S>) return convert<L, A>(load_some(from, n));
#endif
  if constexpr (L == 1) {
    return 0;
  } else {
    constexpr int H = L / 2;
    const Lanes<H, A> low = n >= H ? load<H, A>(from) : load_first<H, A>(from, n);
    const Lanes<H, A> high = n > H ? load_first<H, A>(from + H, n - H) : Lanes<H, A>{};
    if constexpr (H == 1)
      return Lanes<L, A>{low, high};
    else
      return shuffled<L>(low, high, [](int k) { return k; });
  }
}

template <int L, class A, class S>
inline void store_first(S* to, Lanes<L, A> value, int64_t n) {
  if (n >= L) return store<L, A>(to, value);
#if defined(SPIN_FAST_AVX512)
  if constexpr (L >= 4 && std::is_floating_point_v<S> && L * sizeof(S) <= vector_bytes)
    return store_masked((1u << n) - 1, to, convert<L, S>(value));
#endif
  if constexpr (L > 1) {
    constexpr int H = L / 2;
    store_first<H, A>(to, part<H, A, 0>(value), n);
    if (n > H) store_first<H, A>(to + H, part<H, A, H>(value), n - H);
  }
}

// The same of whole registers.
template <class S>
inline Vector<Compute<S>> load(const S* from) {
  return load<lanes<Compute<S>>, Compute<S>>(from);
}

template <class S>
inline void store(S* to, Vector<Compute<S>> value) {
  store<lanes<Compute<S>>, Compute<S>>(to, value);
}

template <class S>
inline Vector<Compute<S>> load_first(const S* from, int64_t n) {
  return load_first<lanes<Compute<S>>, Compute<S>>(from, n);
}

template <class S>
inline void store_first(S* to, Vector<Compute<S>> value, int64_t n) {
  store_first<lanes<Compute<S>>, Compute<S>>(to, value, n);
}

// Copies the values whose bits are set in the mask, close together; `number` of them, and reads no others.
template <class T>
inline void copy_masked(const T* from, unsigned mask, int64_t number, T* to) {
#if defined(SPIN_FAST_AVX512)
  const Vector<T> values = load_masked(mask, from, Vector<T>{});
  if constexpr (sizeof(T) == 4)
    store_first(to, (Vector<T>)_mm512_maskz_compress_ps(mask, (__m512)values), number);
  else
    store_first(to, (Vector<T>)_mm512_maskz_compress_pd(mask, (__m512d)values), number);
#else
  if (number == lanes<T>) return store(to, load(from));
  for (; mask; mask &= mask - 1) *to++ = from[__builtin_ctz(mask)];
#endif
}

// The values at L places. One by one: on Zen 4 faster than an instruction that gathers.
template <int L, class A>
inline Lanes<L, A> gather(const A* from, const int32_t* at) {
  if constexpr (L == 1)
    return from[at[0]];
  else
    return [&]<int... K>(std::integer_sequence<int, K...>) {
      return Lanes<L, A>{from[at[K]]...};
    }(std::make_integer_sequence<int, L>{});
}

// n values, from what is stored to what is computed in, or back.
template <class From, class To>
void convert_rows(const From* from, To* to, int64_t n) {
  using A = Compute<From>;
  int64_t i = 0;
  for (; i + lanes<A> <= n; i += lanes<A>) store<lanes<A>, A>(to + i, load<lanes<A>, A>(from + i));
  for (; i < n; ++i) store<1, A>(to + i, load<1, A>(from + i));
}

// A copy around the caches, done after `settle`.
template <class S>
void stream_copy(const S* from, S* to, int64_t n) {
  typedef typename LanesOf<vector_bytes, char>::Unaligned Bytes;
  constexpr int64_t step = vector_bytes / sizeof(S);
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % vector_bytes / sizeof(S));
  const int64_t before = misaligned ? step - misaligned : 0, head = before < n ? before : n;
  __builtin_memcpy(to, from, head * sizeof(S));
  int64_t i = head;
  for (; i + step <= n; i += step) {
    const Lanes<vector_bytes, char> bytes = *reinterpret_cast<const Bytes*>(from + i);
    bypass(to + i, &bytes);
  }
  __builtin_memcpy(to + i, from + i, (n - i) * sizeof(S));
}

// v in the first n lanes, 0 in the others.
template <class T>
inline Vector<T> first_lanes(Vector<T> v, int64_t n) {
  const Vector<Bits<T>> lane = counting<T>(std::make_integer_sequence<int, lanes<T>>{});
  return lane < static_cast<Bits<T>>(n) ? v : Vector<T>{};
}

// Where lane k of a merge comes from: from an even (odd) lane, of a for the first half of the result and of b for the
// second, by numbers inside each 16 bytes, or by whole 16 bytes, which are single instructions everywhere.
template <class T, bool Inside>
constexpr int source_of(int k, int odd) {
  constexpr int part = 16 / sizeof(T), parts = lanes<T> / part;
  const int at = Inside ? k % part : k / part, half = Inside ? part / 2 : parts / 2;
  const int from = at < half ? 2 * at + odd : 2 * (at - half) + odd;
  return (at < half ? 0 : lanes<T>)+(Inside ? k / part * part + from : from * part + k % part);
}

// Adds neighbours. With lanes<T> vectors as leaves, merged in pairs again and again, lane k of the last one is the sum
// of vector k. Rows: the number of leaves below the result.
template <class T, int Rows>
inline Vector<T> merge(Vector<T> a, Vector<T> b) {
  constexpr bool inside = Rows * sizeof(T) <= 16;
  return shuffled<lanes<T>>(a, b, [](int k) { return source_of<T, inside>(k, 0); }) +
         shuffled<lanes<T>>(a, b, [](int k) { return source_of<T, inside>(k, 1); });
}

template <int Distance, class T>
inline Vector<T> swapped(Vector<T> v) {
  return shuffled<lanes<T>>(v, v, [](int k) { return k ^ Distance; });
}

template <class T, int Distance = lanes<T> / 2>
inline T sum_of(Vector<T> v) {
  v += swapped<Distance, T>(v);
  if constexpr (Distance > 1)
    return sum_of<T, Distance / 2>(v);
  else
    return v[0];
}

// NaN counts as nothing where another lane is a number, and may be lost: whoever cares looks at the sums.
template <class T, int Distance = lanes<T> / 2>
inline T maximum_of(Vector<T> v) {
  const Vector<T> other = swapped<Distance, T>(v);
  v = other > v ? other : v;
  if constexpr (Distance > 1)
    return maximum_of<T, Distance / 2>(v);
  else
    return v[0];
}

// The same value in all lanes. A difference, since adding it to 0 would make 0 of -0 and so cost an instruction.
template <class A>
inline Vector<A> broadcast(A value) {
  return value - Vector<A>{};
}

// Lane k becomes the sum of lanes 0 to k.
template <class T, int Distance = 1>
inline Vector<T> running_sums(Vector<T> v) {
  v += shuffled<lanes<T>>(v, Vector<T>{}, [](int k) { return k < Distance ? lanes<T> + k : k - Distance; });
  if constexpr (2 * Distance < lanes<T>)
    return running_sums<T, 2 * Distance>(v);
  else
    return v;
}

// sum[0 .. lanes) = factor * sum + v, in float64.
template <class T>
inline void add_scaled(double* sum, double factor, Vector<T> v) {
  T values[lanes<T>];
  store(values, v);
  for (int k = 0; k < lanes<T>; k += lanes<double>)
    store(sum + k, factor * load(sum + k) + load<lanes<double>, double>(values + k));
}

template <class T>
struct Exponential;
template <>
struct Exponential<float> {
  static constexpr int degree = 7, bias = 127, mantissa = 23;
  static constexpr float lowest = -87, round = 12582912.0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
};
template <>
struct Exponential<double> {
  static constexpr int degree = 13, bias = 1023, mantissa = 52;
  static constexpr double lowest = -708, round = 6755399441055744.0, ln2_high = 0x1.62e42fefap-1,
                          ln2_low = 0x1.cf79abc9e3b39p-40;
};

// exp(x) for x up to 88, or in float64 709, to about one unit in the last place; 0 where it would be denormal; NaN
// stays.
template <class T>
inline Vector<T> exp_of(Vector<T> x) {
  using E = Exponential<T>;
  constexpr double inverse_factorial[] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
  // x = n ln2 + r: adding 1.5 * 2^mantissa rounds to the integer n and leaves it in the low bits.
  const Vector<T> clamped = x < E::lowest ? Vector<T>{} + E::lowest : x;
  const Vector<T> shifted = clamped * static_cast<T>(1.4426950408889634) + E::round;
  const Vector<T> n = shifted - E::round;
  const Vector<T> r = (clamped - n * E::ln2_high) - n * E::ln2_low;
  Vector<T> p = Vector<T>{} + static_cast<T>(inverse_factorial[E::degree]);
#pragma GCC unroll 16
  for (int k = E::degree - 1; k >= 0; --k) p = p * r + static_cast<T>(inverse_factorial[k]);
  const Vector<Bits<T>> power = (reinterpret_cast<Vector<Bits<T>>>(shifted) + E::bias) << E::mantissa;
  const Vector<T> result = p * reinterpret_cast<Vector<T>>(power);
  return x < E::lowest ? Vector<T>{} : result;
}

// A bit for each lane in which a comparison holds.
template <class T>
inline unsigned bits_of(Vector<Bits<T>> holds) {
#if defined(SPIN_FAST_AVX2)
  if constexpr (sizeof(T) == 4)
    return _mm256_movemask_ps((__m256)holds);
  else
    return _mm256_movemask_pd((__m256d)holds);
#else
  unsigned bits = 0;
  for (int i = 0; i < lanes<T>; ++i) bits |= static_cast<unsigned>(holds[i] & 1) << i;
  return bits;
#endif
}

// How many lanes are at most x.
template <class T>
inline int lanes_at_most(Vector<T> values, T x) {
#if defined(SPIN_FAST_AVX512)  // GCC 12 makes vectors of masks, and masks of these again
  if constexpr (sizeof(T) == 4)
    return __builtin_popcount(_mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(x), _CMP_LE_OQ));
  else
    return __builtin_popcount(_mm512_cmp_pd_mask((__m512d)values, _mm512_set1_pd(x), _CMP_LE_OQ));
#else
  return __builtin_popcount(bits_of<T>(values <= x));
#endif
}

// A bit for each lane that is not 0.
inline unsigned nonzero_lanes(Vector<double> values) {
#if defined(SPIN_FAST_AVX512)
  return _mm512_cmp_pd_mask((__m512d)values, _mm512_setzero_pd(), _CMP_NEQ_UQ);
#else
  return bits_of<double>(values != 0);
#endif
}

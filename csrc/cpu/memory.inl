// Vectors of L lanes, how they are read from and written to rows of any storage type, and copies past the caches.
//
// Kernels compute in A, float or double; T is what a tensor stores: float, double, Half or BFloat16.

template <int L, class A>
struct Vector {
  typedef A type __attribute__((vector_size(L * sizeof(A))));
  typedef type unaligned __attribute__((aligned(alignof(A)), may_alias));
};

template <class A>
struct Vector<1, A> {  // a scalar: compilers keep vectors of one lane in memory
  using type = A;
  typedef A unaligned __attribute__((may_alias));
};

template <int L, class A>
using Lanes = typename Vector<L, A>::type;

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

// ---- Storage types: to float exactly, from float to the nearest, ties to even ---------------------------------------

template <int L>
inline Lanes<L, float> to_float(Lanes<L, uint16_t> bits, BFloat16) {
  const auto wide = convert<L, uint32_t>(bits) << 16;
  return __builtin_bit_cast(Lanes<L, float>, wide);
}

template <int L>
inline Lanes<L, uint16_t> from_float(Lanes<L, float> value, BFloat16) {
  const auto bits = __builtin_bit_cast(Lanes<L, uint32_t>, value);
  const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return convert<L, uint16_t>(value != value ? (bits >> 16) | 0x40 : rounded);
}

template <int L>
inline Lanes<L, float> to_float(Lanes<L, uint16_t> bits, Half) {
#if defined(SPIN_FAST_F16C)
  if constexpr (L == 4)
    return (Lanes<4, float>)_mm_cvtph_ps((__m128i)(Lanes<8, uint16_t>){bits[0], bits[1], bits[2], bits[3]});
  if constexpr (L == 8) return (Lanes<8, float>)_mm256_cvtph_ps((__m128i)bits);
#endif
#if defined(SPIN_FAST_AVX512)
  if constexpr (L == 16) return (Lanes<16, float>)_mm512_cvtph_ps((__m256i)bits);
#endif
  return convert<L, float>(__builtin_bit_cast(Lanes<L, Half>, bits));
}

template <int L>
inline Lanes<L, uint16_t> from_float(Lanes<L, float> value, Half) {
#if defined(SPIN_FAST_F16C)
  if constexpr (L == 8) return (Lanes<8, uint16_t>)_mm256_cvtps_ph((__m256)value, 0);
#endif
#if defined(SPIN_FAST_AVX512)
  if constexpr (L == 16) return (Lanes<16, uint16_t>)_mm512_cvtps_ph((__m512)value, 0);
#endif
  return __builtin_bit_cast(Lanes<L, uint16_t>, convert<L, Half>(value));
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

template <class T>
constexpr bool is_half = sizeof(T) == 2;

template <int L, class A, class T>
inline Lanes<L, A> load(const T* from) {
  if constexpr (is_half<T>)
    return convert<L, A>(to_float<L>(*reinterpret_cast<const typename Vector<L, uint16_t>::unaligned*>(from), T{}));
  else
    return convert<L, A>(*reinterpret_cast<const typename Vector<L, T>::unaligned*>(from));
}

template <int L, class A, class T>
inline void store(T* to, Lanes<L, A> value) {
  if constexpr (is_half<T>)
    *reinterpret_cast<typename Vector<L, uint16_t>::unaligned*>(to) = from_float<L>(convert<L, float>(value), T{});
  else
    *reinterpret_cast<typename Vector<L, T>::unaligned*>(to) = convert<L, T>(value);
}

#if defined(SPIN_FAST_AVX512)
inline Lanes<4, float> load_masked(unsigned mask, const float* from, Lanes<4, float>) {
  return (Lanes<4, float>)_mm_maskz_loadu_ps(mask, from);
}
inline Lanes<8, float> load_masked(unsigned mask, const float* from, Lanes<8, float>) {
  return (Lanes<8, float>)_mm256_maskz_loadu_ps(mask, from);
}
inline Lanes<16, float> load_masked(unsigned mask, const float* from, Lanes<16, float>) {
  return (Lanes<16, float>)_mm512_maskz_loadu_ps(mask, from);
}
inline Lanes<4, double> load_masked(unsigned mask, const double* from, Lanes<4, double>) {
  return (Lanes<4, double>)_mm256_maskz_loadu_pd(mask, from);
}
inline Lanes<8, double> load_masked(unsigned mask, const double* from, Lanes<8, double>) {
  return (Lanes<8, double>)_mm512_maskz_loadu_pd(mask, from);
}
inline void store_masked(unsigned mask, float* to, Lanes<4, float> row) { _mm_mask_storeu_ps(to, mask, (__m128)row); }
inline void store_masked(unsigned mask, float* to, Lanes<8, float> row) {
  _mm256_mask_storeu_ps(to, mask, (__m256)row);
}
inline void store_masked(unsigned mask, float* to, Lanes<16, float> row) {
  _mm512_mask_storeu_ps(to, mask, (__m512)row);
}
inline void store_masked(unsigned mask, double* to, Lanes<4, double> row) {
  _mm256_mask_storeu_pd(to, mask, (__m256d)row);
}
inline void store_masked(unsigned mask, double* to, Lanes<8, double> row) {
  _mm512_mask_storeu_pd(to, mask, (__m512d)row);
}
constexpr bool has_masks = true;
#else
constexpr bool has_masks = false;
#endif

// The first n lanes of a row, zeros behind them.
template <int L, class A, class T>
inline Lanes<L, A> load_first(const T* from, int64_t n) {
  if constexpr (L == 1) {
    return load<1, A>(from);
  } else if constexpr (has_masks && L >= 4 && !is_half<T>) {
#if defined(SPIN_FAST_AVX512)
    return convert<L, A>(load_masked((1u << n) - 1, from, Lanes<L, T>{}));
#endif
  } else {
    T first[L] = {};
    for (int64_t j = 0; j < n; ++j) first[j] = from[j];
    return load<L, A>(first);
  }
}

template <int L, class A, class T>
inline void store_first(T* to, Lanes<L, A> value, int64_t n) {
  if constexpr (L == 1) {
    store<1, A>(to, value);
  } else if constexpr (has_masks && L >= 4 && !is_half<T>) {
#if defined(SPIN_FAST_AVX512)
    store_masked((1u << n) - 1, to, convert<L, T>(value));
#endif
  } else {
    T first[L];
    store<L, A>(first, value);
    for (int64_t j = 0; j < n; ++j) to[j] = first[j];
  }
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

// Past the caches, which saves reading the lines of `to` first; a fence must follow.
template <class T>
void stream_copy(const T* from, T* to, int64_t n) {
#if defined(__x86_64__)
  constexpr int64_t line = 64 / sizeof(T);
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 64 / sizeof(T));
  const int64_t before = misaligned ? line - misaligned : 0, head = before < n ? before : n;
  __builtin_memcpy(to, from, head * sizeof(T));
  int64_t i = head;
  for (; i + line <= n; i += line) {
#if defined(SPIN_FAST_AVX512)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#else
    for (int j = 0; j < 4; ++j)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i) + j,
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i) + j));
#endif
  }
  __builtin_memcpy(to + i, from + i, (n - i) * sizeof(T));
#else
  __builtin_memcpy(to, from, n * sizeof(T));
#endif
}

inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Vectors of one register: what the kernels of every instruction set are written in. Plain GCC vector types, so that
// one source serves all; loads and stores need no alignment.

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(vector_bytes)));
  typedef T Unaligned __attribute__((vector_size(vector_bytes), aligned(alignof(T)), may_alias));
};

template <class T>
using Vector = typename VectorOf<T>::Type;

template <class T>
constexpr int lanes = vector_bytes / sizeof(T);

template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class T>
  requires std::is_arithmetic_v<T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::Unaligned*>(from);
}

template <class T>
  requires std::is_arithmetic_v<T>
inline void store(T* to, Vector<T> v) {
  *reinterpret_cast<typename VectorOf<T>::Unaligned*>(to) = v;
}

using Words = Vector<uint32_t>;
typedef uint16_t Halves __attribute__((vector_size(vector_bytes / 2), aligned(2), may_alias));

inline Words words(const void* halves) {
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(halves), Words);
}

inline void store_words(void* to, Words v) { *reinterpret_cast<Halves*>(to) = __builtin_convertvector(v, Halves); }

inline Vector<float> load(const BFloat16* from) { return reinterpret_cast<Vector<float>>(words(from) << 16); }

inline Vector<float> load(const Half* from) {
  const Words half = words(from), bits = (half & 0x7fff) << 13;
  const Vector<float> scaled = reinterpret_cast<Vector<float>>(bits) * 0x1p112f;  // denormals come right
  const Words finite = reinterpret_cast<Words>(scaled);
  const Words magnitude = (half & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : finite;
  return reinterpret_cast<Vector<float>>(magnitude | (half & 0x8000) << 16);
}

// Stores round to the nearest, ties to even.
inline void store(BFloat16* to, Vector<float> v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_words(to, (bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded);
}

inline void store(Half* to, Vector<float> v) {
  const Words bits = reinterpret_cast<Words>(v), magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude + (0xc8000fff + (magnitude >> 13 & 1))) >> 13;
  // An addition shifts the bits of what is a denormal half to the end of the mantissa.
  const Words small = reinterpret_cast<Words>(reinterpret_cast<Vector<float>>(magnitude) + 0.5f) - 0x3f000000;
  const Words large = magnitude > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
  const Words rounded = magnitude >= 0x47800000 ? large : magnitude < 0x38800000 ? small : normal;
  store_words(to, rounded | (bits >> 16 & 0x8000));
}

// The first n values, at most a register of them; 0 in the other lanes.
template <class S>
inline Vector<Compute<S>> load_first(const S* from, int64_t n) {
  if (n >= lanes<Compute<S>>) return load(from);
  S values[lanes<Compute<S>>] = {};
  __builtin_memcpy(values, from, n * sizeof(S));
  return load(values);
}

template <class S>
inline void store_first(S* to, Vector<Compute<S>> v, int64_t n) {
  if (n >= lanes<Compute<S>>) return store(to, v);
  S values[lanes<Compute<S>>];
  store(values, v);
  __builtin_memcpy(to, values, n * sizeof(S));
}

// 0, 1, 2, ...
template <class T, int... K>
inline Vector<Bits<T>> counting(std::integer_sequence<int, K...>) {
  return Vector<Bits<T>>{K...};
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

template <class T, bool Inside, int... K>
inline Vector<T> merge(Vector<T> a, Vector<T> b, std::integer_sequence<int, K...>) {
  return __builtin_shufflevector(a, b, source_of<T, Inside>(K, 0)...) +
         __builtin_shufflevector(a, b, source_of<T, Inside>(K, 1)...);
}

// Adds neighbours. With lanes<T> vectors as leaves, merged in pairs again and again, lane k of the last one is the sum
// of vector k. Rows: the number of leaves below the result.
template <class T, int Rows>
inline Vector<T> merge(Vector<T> a, Vector<T> b) {
  return merge<T, Rows * sizeof(T) <= 16>(a, b, std::make_integer_sequence<int, lanes<T>>{});
}

template <int Distance, class T, int... K>
inline Vector<T> swapped(Vector<T> v, std::integer_sequence<int, K...>) {
  return __builtin_shufflevector(v, v, (K ^ Distance)...);
}

template <class T, int Distance = lanes<T> / 2>
inline T sum_of(Vector<T> v) {
  v += swapped<Distance, T>(v, std::make_integer_sequence<int, lanes<T>>{});
  if constexpr (Distance > 1)
    return sum_of<T, Distance / 2>(v);
  else
    return v[0];
}

// NaN counts as nothing where another lane is a number, and may be lost: whoever cares looks at the sums.
template <class T, int Distance = lanes<T> / 2>
inline T maximum_of(Vector<T> v) {
  const Vector<T> other = swapped<Distance, T>(v, std::make_integer_sequence<int, lanes<T>>{});
  v = other > v ? other : v;
  if constexpr (Distance > 1)
    return maximum_of<T, Distance / 2>(v);
  else
    return v[0];
}

// lanes<double> values as float64.
template <class T>
inline Vector<double> load_wide(const T* from) {
  typedef T Part __attribute__((vector_size(lanes<double> * sizeof(T)), aligned(alignof(T)), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Part*>(from), Vector<double>);
}

// sum[0 .. lanes) = factor * sum + v, in float64.
template <class T>
inline void add_scaled(double* sum, double factor, Vector<T> v) {
  T values[lanes<T>];
  store(values, v);
  for (int k = 0; k < lanes<T>; k += lanes<double>) store(sum + k, factor * load(sum + k) + load_wide(values + k));
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

// exp(x) for x <= 0 to about one unit in the last place; 0 where it would be denormal; NaN stays.
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

// Rows in packs of up to 16 bytes, spread over groups of lanes: loads, stores, sums of columns.
#pragma once

#include "entries.h"
#include "ops.h"

namespace spin_fast {

// The rows in z of the entries at, at + step, .., as far as these are among the next `left` entries. There is no branch
// between the loads of the index, so that all are in flight together.
template <class S, int U>
__device__ void find_rows(const Segments& seg, const S* z, int64_t at, int step, int left, const S* (&rows)[U]) {
  if (seg.narrow_index) {
#pragma unroll
    for (int u = 0; u < U; ++u) rows[u] = z + (u * step < left ? seg.narrow_index[at + u * step] : 0) * seg.width;
  } else if (seg.wide_index) {
#pragma unroll
    for (int u = 0; u < U; ++u) rows[u] = z + (u * step < left ? seg.wide_index[at + u * step] : 0) * seg.width;
  } else {
    rows[0] = z + at * seg.width;
#pragma unroll
    for (int u = 1; u < U; ++u) rows[u] = rows[u - 1] + step * seg.width;
  }
}

// Loads K packs of each of U rows, all in flight together; 0 where is_there(u) does not hold, and beyond `width`.
template <class T, int V, int U, int K, class IsThere, class Column>
__device__ void load_rows(const T* const (&rows)[U], const IsThere& is_there, const Column& column, int64_t width,
                          Pack<T, V> (&to)[U][K]) {
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int u = 0; u < U; ++u) {
      to[u][k] = {};
      if (is_there(u) && column(k) < width) to[u][k] = load<V>(rows[u] + column(k));
    }
}

// Rounds sums once, to the storage type.
template <class S, int V>
__device__ void store(S* to, const double (&values)[V]) {
  Pack<S, V> pack;
  for (int i = 0; i < V; ++i) pack.at[i] = narrowed<S>(static_cast<Compute<S>>(values[i]));
  store(to, pack);
}

template <int V>
__device__ void store(void* to, ScalarType type, int64_t at, const double (&values)[V]) {
  if (type == ScalarType::Float)
    store(static_cast<float*>(to) + at, values);
  else if (type == ScalarType::Double)
    store(static_cast<double*>(to) + at, values);
  else if (type == ScalarType::Half)
    store(static_cast<Half*>(to) + at, values);
  else
    store(static_cast<BFloat16*>(to) + at, values);
}

// A group of lanes holds a row, or a tile of its columns: each lane has K packs of V columns, a group apart. V is 16
// bytes of S if rows are aligned to that, else 1.
struct Tiling {
  bool packed;
  int per_lane;  // K
  int group;     // a power of two
  int64_t columns, tiles;
};

template <class S>
constexpr int values_per_pack = 16 / static_cast<int>(sizeof(S));

template <class S>
Tiling tiling_of(int64_t width, std::initializer_list<const void*> pointers) {
  bool packed = width % values_per_pack<S> == 0;
  for (const void* p : pointers) packed = packed && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  const int64_t values = packed ? values_per_pack<S> : 1, packs = (width + values - 1) / values;
  Tiling tiling{packed, packed && packs <= warp_size ? 1 : 4, 1, 0, 0};
  while (tiling.group < warp_size && tiling.group * tiling.per_lane < packs) tiling.group *= 2;
  tiling.columns = tiling.group * tiling.per_lane * values;
  tiling.tiles = std::max<int64_t>((width + tiling.columns - 1) / tiling.columns, 1);
  return tiling;
}

// Calls f(V, K).
template <class S, class F>
void dispatch_tiling(const Tiling& tiling, F f) {
  constexpr std::integral_constant<int, values_per_pack<S>> pack;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 4> four;
  if (!tiling.packed) return f(one, four);
  return tiling.per_lane == 1 ? f(pack, one) : f(pack, four);
}

// For each of 8 columns the sum of term(i) over [0, n), by a block of 256 threads: thread t is one of the 32 of column
// t % 8, and all of them get it. `shared` has 256 values.
constexpr int columns_of_block = 8, threads_of_columns = 256;

template <class F>
__device__ double sum_of_column(int64_t n, double* shared, F term) {
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x / columns_of_block; i < n; i += threads_of_columns / columns_of_block) sum += term(i);
  __syncthreads();
  shared[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = threadIdx.x % columns_of_block; i < threads_of_columns; i += columns_of_block) sum += shared[i];
  return sum;
}

}  // namespace spin_fast

// Where the entries of a segment stand, to which segment an entry belongs, and how rows are spread over lanes.
#pragma once

#include "../segments.h"
#include "device.h"
#include "ops.h"

namespace spin_fast {

// Entries [first, last) of a segment of a branch; of none where that is negative.
struct Stretch {
  int64_t segment, branch, first, last;
};

__host__ __device__ inline int64_t first_entry(const Segments& seg, int64_t branch, int64_t graph) {
  return seg.ptr[branch * seg.ptr_stride + graph] + branch * seg.entry_stride;
}

__host__ __device__ inline Stretch stretch_of(const Segments& seg, int64_t s) {
  const int64_t branch = s / seg.graphs, graph = s - branch * seg.graphs;
  return {s, branch, first_entry(seg, branch, graph), first_entry(seg, branch, graph + 1)};
}

// run_of an item that all lanes of a warp ask for: they look at 32 offsets at a time.
template <class Offset>
__device__ int64_t run_of_warp(const Offset* offsets, int64_t n, int64_t i) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t step = (high - low + warp_size - 1) / warp_size, at = low + step * (threadIdx.x % warp_size + 1);
    low += step * __popc(__ballot_sync(all_lanes, at < high && offsets[at] <= i));
    high = std::min(high, low + step);
  }
  return low;
}

// The segment of an entry; `of_warp`: all lanes of the warp ask for the same one.
template <bool of_warp = false>
__device__ int64_t segment_of(const Segments& seg, int64_t entry) {
  const bool dense = seg.entry_stride > 0;
  const int64_t branch = dense ? entry / seg.entry_stride : 0;
  const int64_t n = dense ? seg.graphs : seg.graphs * seg.branches, i = entry - branch * seg.entry_stride;
  return branch * seg.graphs + (of_warp ? run_of_warp(seg.ptr, n, i) : run_of(seg.ptr, n, i));
}

// run_of where run `low` is known to begin at or before item i; looks near it first.
template <class Offset>
__host__ __device__ int64_t run_from(const Offset* offsets, int64_t n, int64_t low, int64_t i) {
  int64_t step = 1;
  while (low + step < n && offsets[low + step] <= i) {
    low += step;
    step *= 2;
  }
  return low + run_of(offsets + low, std::min(step, n - low), i);
}

__host__ __device__ inline int64_t row_of(const Segments& seg, int64_t entry) {
  return seg.narrow_index ? seg.narrow_index[entry] : seg.wide_index ? seg.wide_index[entry] : entry;
}

template <class T>
__device__ T count_of(const Segments& seg, int64_t entry) {
  return seg.count ? static_cast<T>(seg.count[entry]) : T{1};
}

// Where the rows of the entries at, at + step, .. stand in z, as far as these are in the next `left` entries. There is
// no branch between the loads of the index, so that they are under way together.
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

// Where a segment's row stands in a readout seen as [G * (R + 1), h].
__host__ __device__ inline int64_t place_of(const Segments& seg, int64_t s, int64_t branch) {
  return (s - branch * seg.graphs) * seg.branches + branch;
}
__host__ __device__ inline int64_t place_of(const Segments& seg, int64_t s) { return place_of(seg, s, s / seg.graphs); }

// The axis of entries in chunks of the same size: a segment of more than two chunks is cut where they begin.
struct Chunks {
  int64_t size, number;
};

// None where no segment can be so long.
inline Chunks chunks_of(int64_t entries) {
  constexpr int64_t smallest = 512, most = 4096;
  const int64_t size = std::max(smallest, (entries + most - 1) / most);
  return {size, entries > 2 * size ? (entries + size - 1) / size : 0};
}

__host__ __device__ inline bool is_long(const Chunks& chunks, const Stretch& of) {
  return chunks.number > 0 && of.last - of.first > 2 * chunks.size;
}

// The part of a long segment in chunk k. There are two at most: slot 0 is that of the segment which has the chunk's
// first entry, slot 1 that of one which begins further on, and so goes on behind the chunk. By all lanes of a warp.
__device__ inline Stretch part_of(const Segments& seg, const Chunks& chunks, int64_t k, int slot) {
  const int64_t begin = k * chunks.size, end = std::min(begin + chunks.size, seg.entries);
  const Stretch of = stretch_of(seg, segment_of<true>(seg, slot == 0 ? begin : end - 1));
  if (!is_long(chunks, of) || (slot == 1 && of.first <= begin)) return {-1, 0, 0, 0};
  return {of.segment, of.branch, std::max(of.first, begin), std::min(of.last, end)};
}

// Share i of n of the entries of a branch.
__host__ __device__ inline Stretch share_of(const Segments& seg, int64_t branch, int64_t i, int64_t n) {
  const int64_t first = first_entry(seg, branch, 0), size = first_entry(seg, branch, seg.graphs) - first;
  return {-1, branch, first + size * i / n, first + size * (i + 1) / n};
}

// V values next to each other, loaded at once.
template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T of[V];
};

template <int V, class T>
__device__ Pack<T, V> load(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}

// Loads K packs of each of U rows, all on their way together; what is not there is 0.
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

template <class T, int V>
__device__ void store(T* to, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// Sums, rounded once to the type that is stored.
template <class S, int V>
__device__ void store(S* to, const double (&values)[V]) {
  Pack<S, V> pack;
  for (int i = 0; i < V; ++i) pack.of[i] = Narrowed<S>::of(static_cast<Compute<S>>(values[i]));
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

// A row, or a tile of its columns, is spread over a group of lanes: a lane has K packs of V columns, a group apart. V
// is 16 bytes of S if rows are aligned to that, else 1.
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

// The sum of of(i) over [0, n) for each of 8 columns, by a block of 256 threads: thread t is one of 32 of column t % 8,
// which all get it. `shared` has 256 values.
constexpr int columns_of_block = 8, threads_of_columns = 256;

template <class F>
__device__ double sum_of_column(int64_t n, double* shared, F of) {
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x / columns_of_block; i < n; i += threads_of_columns / columns_of_block) sum += of(i);
  __syncthreads();
  shared[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = threadIdx.x % columns_of_block; i < threads_of_columns; i += columns_of_block) sum += shared[i];
  return sum;
}

}  // namespace spin_fast

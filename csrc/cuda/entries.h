// The entries of segments: where they are, to which segment one belongs, and how they are divided among blocks.
#pragma once

#include "../segments.h"
#include "device.h"

namespace spin_fast {

// Entries [begin, end) of one segment of a branch, or, if `segment` is negative, of no particular one.
struct EntryRange {
  int64_t segment, branch, begin, end;
};

__host__ __device__ inline EntryRange entries_of(const Segments& seg, int64_t s) {
  const int64_t branch = s / seg.graphs, graph = s - branch * seg.graphs;
  return {s, branch, first_entry(seg, branch, graph), first_entry(seg, branch, graph + 1)};
}

// find_range for an i that all lanes of a warp share: they look at 32 offsets at a time.
template <class Offset>
__device__ int64_t find_range_by_warp(const Offset* offsets, int64_t n, int64_t i) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t step = (high - low + warp_size - 1) / warp_size, at = low + step * (threadIdx.x % warp_size + 1);
    low += step * __popc(__ballot_sync(all_lanes, at < high && offsets[at] <= i));
    high = std::min(high, low + step);
  }
  return low;
}

// find_range for an i at or behind the beginning of range `low`; looks near that first.
template <class Offset>
__host__ __device__ int64_t find_range_from(const Offset* offsets, int64_t n, int64_t low, int64_t i) {
  int64_t step = 1;
  while (low + step < n && offsets[low + step] <= i) {
    low += step;
    step *= 2;
  }
  return low + find_range(offsets + low, std::min(step, n - low), i);
}

// The segment of an entry; `by_warp`: all lanes of the warp ask for the same one.
template <bool by_warp = false>
__device__ int64_t find_segment(const Segments& seg, int64_t entry) {
  const bool dense = seg.entry_stride > 0;
  const int64_t branch = dense ? entry / seg.entry_stride : 0;
  const int64_t n = dense ? seg.graphs : seg.graphs * seg.branches, i = entry - branch * seg.entry_stride;
  return branch * seg.graphs + (by_warp ? find_range_by_warp(seg.ptr, n, i) : find_range(seg.ptr, n, i));
}

__host__ __device__ inline int64_t row_of(const Segments& seg, int64_t entry) {
  return seg.narrow_index ? seg.narrow_index[entry] : seg.wide_index ? seg.wide_index[entry] : entry;
}

template <class T>
__device__ T count_of(const Segments& seg, int64_t entry) {
  return seg.count ? static_cast<T>(seg.count[entry]) : T{1};
}

// The row of a segment in a readout seen as [G * (R + 1), h].
__host__ __device__ inline int64_t readout_row(const Segments& seg, int64_t s, int64_t branch) {
  return (s - branch * seg.graphs) * seg.branches + branch;
}
__host__ __device__ inline int64_t readout_row(const Segments& seg, int64_t s) {
  return readout_row(seg, s, s / seg.graphs);
}

// All entries in `number` ranges of equal size. A segment longer than two ranges is cut into pieces where they begin.
struct Ranges {
  int64_t size, number;
};

// No ranges if no segment can be that long.
inline Ranges ranges_of(int64_t entries) {
  constexpr int64_t smallest = 512, most = 4096;
  const int64_t size = std::max(smallest, (entries + most - 1) / most);
  return {size, entries > 2 * size ? (entries + size - 1) / size : 0};
}

__host__ __device__ inline bool is_long(const Ranges& ranges, const EntryRange& entries) {
  return ranges.number > 0 && entries.end - entries.begin > 2 * ranges.size;
}

// The piece of a long segment in range k. There are two at most: piece 0 of the segment that has the range's first
// entry, piece 1 of one that begins further on and continues behind the range. By all lanes of a warp.
__device__ inline EntryRange piece_of(const Segments& seg, const Ranges& ranges, int64_t k, int piece) {
  const int64_t begin = k * ranges.size, end = std::min(begin + ranges.size, seg.entries);
  const EntryRange entries = entries_of(seg, find_segment<true>(seg, piece == 0 ? begin : end - 1));
  if (!is_long(ranges, entries) || (piece == 1 && entries.begin <= begin)) return {-1, 0, 0, 0};
  return {entries.segment, entries.branch, std::max(entries.begin, begin), std::min(entries.end, end)};
}

// The i-th of n equal ranges of the entries of a branch.
__host__ __device__ inline EntryRange range_of_branch(const Segments& seg, int64_t branch, int64_t i, int64_t n) {
  const int64_t first = first_entry(seg, branch, 0), size = first_entry(seg, branch, seg.graphs) - first;
  return {-1, branch, first + size * i / n, first + size * (i + 1) / n};
}

}  // namespace spin_fast

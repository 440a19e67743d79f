// How to prefetch the entries of a segment.
#pragma once

#include "../segments.h"
#include "ops.h"

namespace spin_fast {

// Prefetches the entries of a segment, since graphs are chosen at random. Always inlined, because GCC drops calls of a
// function that has no other effect.
inline __attribute__((always_inline)) void prefetch_entries(const Segments& seg, int64_t branch, int64_t graph) {
  constexpr int64_t step = cache_line / sizeof(int32_t);
  const int64_t end = first_entry(seg, branch, graph + 1) + step;  // they need not begin with a cache line
  for (int64_t e = first_entry(seg, branch, graph); e < end; e += step) {
    if (seg.narrow_index) __builtin_prefetch(seg.narrow_index + e);
    if (seg.wide_index) __builtin_prefetch(seg.wide_index + e);
    if (seg.count) __builtin_prefetch(seg.count + e);
  }
}

}  // namespace spin_fast

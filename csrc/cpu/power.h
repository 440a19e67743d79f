// The powers of graphs for other kernels, which have no tensors.
#pragma once

#include <vector>

#include "ops.h"

namespace spin_fast {

// Consecutive graphs of a batch, whose contents are vouched for.
struct GraphRange {
  const void *indptr, *indices;  // int32, or int64 if `wide_index`
  bool wide_index;
  int64_t edges;       // of the batch
  const int64_t* ptr;  // [graphs + 1] nodes of the batch
  int64_t graphs;
  const void* x;  // [nodes of the batch, width]

  int64_t nodes() const { return ptr[graphs] - ptr[0]; }
};

// Writes the hops [R, N, width] of graphs without weights; of several operators they follow each other. `full_width`:
// these are so many columns but for some, and are to be rounded like them.
void write_hops(const GraphRange& graphs, const std::vector<Operator>& operators, int64_t hops, int64_t width,
                int64_t full_width, ScalarType value, void* out);

}  // namespace spin_fast

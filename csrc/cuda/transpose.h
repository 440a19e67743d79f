// Who refers to a row: the inverse of an index.
#pragma once

#include "ops.h"

namespace spin_fast {

// Entries entries[offsets[u]] up to entries[offsets[u + 1]], ascending, are those e with index[e] = u.
struct Transposed {
  Tensor offsets;  // [rows + 1] int64
  Tensor entries;  // [n] int64
};

// Of an index [n] in [0, rows), int32 or int64; it is sorted, stably, so the result is the same every time.
Transposed transposed(const Device& device, ScalarType type, const void* index, int64_t n, int64_t rows);

}  // namespace spin_fast

// The inverse of an index: the entries that refer to each row.
#pragma once

#include "ops.h"

namespace spin_fast {

inline Integers integers_of(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Int) return {t.const_data_ptr<int32_t>(), nullptr};
  return {nullptr, t.const_data_ptr<int64_t>()};
}

// The narrowest type of indices that holds numbers up to `most`.
inline ScalarType index_type_for(int64_t most) { return most <= INT32_MAX ? ScalarType::Int : ScalarType::Long; }

// Entries entries[offsets[u]] up to entries[offsets[u + 1]], ascending, are those e with index[e] = u.
struct Transposed {
  Tensor offsets;  // [rows + 1] int64
  Tensor entries;  // [n], int32 if that holds n and rows, else int64
};

// `index`: [n] in [0, rows), int32 or int64. The sort is stable, so the result is the same every time.
Transposed transposed(const Device& device, ScalarType type, const void* index, int64_t n, int64_t rows);

}  // namespace spin_fast

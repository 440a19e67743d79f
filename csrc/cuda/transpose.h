// Who refers to a row: the inverse of an index.
#pragma once

#include "ops.h"

namespace spin_fast {

// Integers of one of two types; the other pointer is null.
struct Integers {
  const int32_t* narrow;
  const int64_t* wide;

  __device__ int64_t operator[](int64_t i) const { return wide ? wide[i] : narrow[i]; }
};

inline Integers integers_of(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Int) return {t.const_data_ptr<int32_t>(), nullptr};
  return {nullptr, t.const_data_ptr<int64_t>()};
}

// The narrower type of indices that holds numbers up to `most`.
inline ScalarType index_type_for(int64_t most) { return most <= INT32_MAX ? ScalarType::Int : ScalarType::Long; }

// Entries entries[offsets[u]] up to entries[offsets[u + 1]], ascending, are those e with index[e] = u.
struct Transposed {
  Tensor offsets;  // [rows + 1] int64
  Tensor entries;  // [n], int32 if that holds n and rows, else int64
};

// Of an index [n] in [0, rows), int32 or int64; it is sorted, stably, so the result is the same every time.
Transposed transposed(const Device& device, ScalarType type, const void* index, int64_t n, int64_t rows);

}  // namespace spin_fast

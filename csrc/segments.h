// The segments of a readout: from tensors to the kernels' view of them, checked.
#pragma once

#include "tensors.h"

namespace spin_fast {

// Where the entries of a segment begin; constexpr, so that CUDA kernels may call it.
constexpr int64_t first_entry(const Segments& seg, int64_t branch, int64_t graph) {
  return seg.ptr[branch * seg.ptr_stride + graph] + branch * seg.entry_stride;
}

// The segments of a z of [rows, width], checked. `shared`: z is the dense form, every branch reads the same ptr.
inline Segments checked_segments(int64_t rows, int64_t width, const Tensor& ptr, const OptionalTensor& index,
                                 const OptionalTensor& count, int64_t branches, bool shared, bool check_invariants) {
  expect("ptr", ptr, {any}, {ScalarType::Long});
  require(ptr.numel() >= 1, "ptr must have at least one entry, got none");
  check_num_branches(branches);
  product_of("z", branches, width);  // of a readout
  if (index) expect("index", *index, {any}, index_types);
  const int64_t entries = index ? index->numel() : rows;
  if (count) expect("count", *count, {entries}, {ScalarType::Int});
  const int64_t segments = ptr.numel() - 1;
  require(!shared || (!index && !count), "index and count must be None where every branch has all rows");
  require(!shared || rows % branches == 0, "z must have as many rows in each of ", branches, " branches, got ", rows);
  require(shared || segments % branches == 0, "ptr must have a multiple of ", branches, " segments (branches), got ",
          segments);
  if (check_invariants) {
    const int64_t end = shared ? rows / branches : entries;
    dispatch_index(index ? index->scalar_type() : ScalarType::Long, [&]<class I>(Tag<I>) {
      const int64_t row_ptr[] = {0, index ? rows : end};
      refuse_if(check_segments(ptr.const_data_ptr<int64_t>(), segments, data<I>(index), data<int32_t>(count), end,
                               row_ptr, 1));
    });
  }
  const int64_t graphs = shared ? segments : segments / branches;
  const bool narrow = index && index->scalar_type() == ScalarType::Int;
  return {ptr.const_data_ptr<int64_t>(),
          narrow ? data<int32_t>(index) : nullptr,
          narrow ? nullptr : data<int64_t>(index),
          data<int32_t>(count),
          graphs,
          branches,
          shared ? 0 : graphs,
          shared ? rows / branches : 0,
          width,
          rows,
          entries};
}

// The number of rows of z, [rows, h] or [R + 1, N, h].
inline int64_t rows_of(const Tensor& z) {
  const bool branches = given("z", z).dim() == 3;
  if (branches)
    expect("z", z, {any, any, any}, stored_types);
  else
    expect("z", z, {any, any}, stored_types);
  return branches ? z.size(0) * z.size(1) : z.size(0);
}

// The number of branches of w, [h] or [R + 1, h].
inline int64_t branches_of(const Tensor& w, const Tensor& z) {
  const bool one = given("w", w).dim() == 1;
  if (one)
    expect("w", w, {z.size(-1)}, {z.scalar_type()});
  else
    expect("w", w, {any, z.size(-1)}, {z.scalar_type()});
  const int64_t branches = one ? 1 : w.size(0);
  require(z.dim() == 2 || z.size(0) == branches, "z must have ", branches, " branches, as w, got ", z.size(0));
  return branches;
}

}  // namespace spin_fast

// The segments of a readout: from tensors to the kernels' view of them, checked.
#pragma once

#include <string>

#include "../check.h"
#include "ops.h"

namespace spin_fast {

struct Form {
  int64_t rows, width, entries, branches, graphs;
};

// Checks ptr, index and count against a z of [rows, width]. `shared`: z is the dense form, every branch reads the same
// ptr.
inline Form form_of(int64_t rows, int64_t width, const Tensor& ptr, const OptionalTensor& index,
                    const OptionalTensor& count, int64_t branches, bool shared, bool checked) {
  expect("ptr", ptr, {-1}, ScalarType::Long);
  STD_TORCH_CHECK(ptr.numel() >= 1 && branches >= 1, "ptr must have at least one entry, and there must be a branch");
  if (index) expect("index", *index, {-1}, index->scalar_type());
  const int64_t entries = index ? index->numel() : rows;
  if (count) expect("count", *count, {entries}, ScalarType::Int);
  const int64_t runs = ptr.numel() - 1;
  STD_TORCH_CHECK(!shared || (!index && !count && rows % branches == 0),
                  "the dense form takes neither index nor count, and as many rows in each branch");
  STD_TORCH_CHECK(shared || runs % branches == 0, "ptr must have a multiple of the number of branches as segments");
  if (!checked) {
    const int64_t end = shared ? rows / branches : entries;
    dispatch_index(index ? index->scalar_type() : ScalarType::Long, [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const std::string problem =
          check_segments(ptr.const_data_ptr<int64_t>(), runs, data<I>(index), data<int32_t>(count), end, rows);
      STD_TORCH_CHECK(problem.empty(), problem);
    });
  }
  return {rows, width, entries, branches, shared ? runs : runs / branches};
}

inline Segments segments_of(const Form& form, const Tensor& ptr, const OptionalTensor& index,
                            const OptionalTensor& count, bool shared) {
  const bool narrow = index && index->scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK(!index || narrow || index->scalar_type() == ScalarType::Long, "index must be int32 or int64");
  return {ptr.const_data_ptr<int64_t>(),
          narrow ? data<int32_t>(index) : nullptr,
          narrow ? nullptr : data<int64_t>(index),
          data<int32_t>(count),
          form.graphs,
          form.branches,
          shared ? 0 : form.graphs,
          shared ? form.rows / form.branches : 0,
          form.width,
          form.rows,
          form.entries};
}

inline int64_t first_entry(const Segments& seg, int64_t branch, int64_t graph) {
  return seg.ptr[branch * seg.ptr_stride + graph] + branch * seg.entry_stride;
}

// Asks for the entries of a segment: graphs are chosen at random, and stand anywhere. Inlined at once, because GCC
// drops calls of a function that has no other effect.
inline __attribute__((always_inline)) void prefetch_entries(const Segments& seg, int64_t branch, int64_t graph) {
  constexpr int64_t line = 64 / sizeof(int32_t);
  const int64_t end = first_entry(seg, branch, graph + 1) + line;  // they need not begin with a line of the cache
  for (int64_t e = first_entry(seg, branch, graph); e < end; e += line) {
    if (seg.narrow_index) __builtin_prefetch(seg.narrow_index + e);
    if (seg.wide_index) __builtin_prefetch(seg.wide_index + e);
    if (seg.count) __builtin_prefetch(seg.count + e);
  }
}

}  // namespace spin_fast

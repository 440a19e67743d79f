// The model and the other arguments that the ops of the fused branch share.
#pragma once

#include <cmath>
#include <vector>

#include "segments.h"

namespace spin_fast {

// Calls f(Tag<T>) for the types that the MLPs compute in.
template <class F>
void dispatch_compute(ScalarType value, F f) {
  if (value == ScalarType::Float) return f(Tag<float>{});
  require(value == ScalarType::Double, "rows must be float32 or float64");
  f(Tag<double>{});
}

struct Model {
  int64_t features, branches;
  std::vector<int64_t> widths;
  bool attention;
  double slope;

  int64_t width() const { return widths.back(); }
  int64_t readout_width() const { return branches * width(); }
  int64_t below(size_t l) const { return l ? widths[l - 1] : features; }
  // The number of parameters of the branches, the first of the flat parameters: w, then weight and bias of each layer,
  // each of all branches.
  int64_t parameters() const {
    int64_t size = attention ? width() : 0;
    for (size_t l = 0; l < widths.size(); ++l)
      size = sum_of("widths", size, product_of("widths", sum_of("widths", below(l), 1), widths[l]));
    return product_of("widths", branches, size);
  }
};

inline void check_widths(const char* name, const std::vector<int64_t>& widths) {
  require(!widths.empty() && widths.size() <= most_layers, name, " must have 1 to ", most_layers, " layers, got ",
          widths.size());
  for (const int64_t width : widths) require(width >= 1, name, " must be at least 1, got ", width);
}

// The number of parameters of a classifier on the readouts of all branches, which follow those of the branches.
inline int64_t classifier_parameters(int64_t branches, const std::vector<int64_t>& widths,
                                     const std::vector<int64_t>& classifier_widths) {
  check_num_branches(branches);
  check_widths("widths", widths);
  check_widths("classifier_widths", classifier_widths);
  constexpr auto name = "classifier_widths";
  int64_t in = product_of("widths", branches, widths.back()), size = 0;
  for (const int64_t width : classifier_widths) {
    size = sum_of(name, size, product_of(name, sum_of(name, in, 1), width));
    in = width;
  }
  return size;
}

// The arguments that the ops of the fused branch share, checked but for the contents of ids.
struct Arguments {
  Model model;
  Segments seg;
  const int64_t* ids;
  int64_t graphs;
};

inline Arguments model_arguments(const Tensor& rows, const Tensor& parameters, const Tensor& ptr,
                                 const OptionalTensor& index, const OptionalTensor& count, const OptionalTensor& ids,
                                 int64_t num_branches, const std::vector<int64_t>& widths, bool attention, double slope,
                                 bool shared, bool check_invariants, int64_t more_parameters) {
  const ScalarType value = expect("rows", rows, {any, any}, computed_types);
  check_widths("widths", widths);
  check_num_branches(num_branches);
  require(slope >= 0, "negative_slope must be at least 0, got ", slope);
  require(std::isfinite(slope), "negative_slope must be finite, got ", slope);
  const Model model = {rows.size(1), num_branches, widths, attention, slope};
  const int64_t size = sum_of("classifier_widths", model.parameters(), more_parameters);
  const Segments seg =
      checked_segments(rows.size(0), widths.back(), ptr, index, count, num_branches, shared, check_invariants);
  Arguments of{model, seg, nullptr, seg.graphs};
  expect("parameters", parameters, {size}, {value});
  if (ids) {
    expect("ids", *ids, {any}, {ScalarType::Long});
    of.ids = ids->const_data_ptr<int64_t>();
    of.graphs = ids->numel();
  }
  return of;
}

}  // namespace spin_fast

// The model and the other arguments that the ops of the fused branch share.
#pragma once

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
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
  int64_t features, branches;  // what goes into the MLPs: d, or of joint rows parts * d
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

// The number of parameters of a classifier on so many columns of readouts.
inline int64_t classifier_parameters(int64_t in, const std::vector<int64_t>& classifier_widths) {
  check_widths("classifier_widths", classifier_widths);
  constexpr auto name = "classifier_widths";
  int64_t size = 0;
  for (const int64_t width : classifier_widths) {
    size = sum_of(name, size, product_of(name, sum_of(name, in, 1), width));
    in = width;
  }
  return size;
}

// Of each joint row the rows of x that it consists of, [J, number], in one of two types; not given where an entry
// refers to a row of x itself.
struct Parts {
  bool given;
  const int32_t* narrow;
  const int64_t* wide;
  int64_t number;
};

// The rows of x, [number, width]: dense, or in compressed sparse rows, whose columns ascend.
struct Rows {
  int64_t number, width;
  const int32_t* row_begin;  // [number + 1] values; null of dense rows
  const int32_t* column;     // of each value
};

// The arguments that the ops of the fused branch share, checked but for the contents of ids.
struct Arguments {
  Model model;
  Segments seg;
  Rows rows;
  Parts parts;
  const int64_t* ids;
  int64_t graphs;
};

inline Rows checked_rows(const Tensor& rows, const OptionalTensor& crow_indices, const OptionalTensor& col_indices,
                         int64_t num_features, bool check_invariants) {
  require(crow_indices.has_value() == col_indices.has_value(), "crow_indices must come with col_indices, and only so");
  require(num_features >= 0, "num_features must be at least 0, got ", num_features);
  if (!crow_indices) {
    expect("rows", rows, {any, num_features}, computed_types);
    return {rows.size(0), num_features, nullptr, nullptr};
  }
  expect("rows", rows, {any}, computed_types);
  expect("crow_indices", *crow_indices, {any}, {ScalarType::Int});
  expect("col_indices", *col_indices, {rows.numel()}, {ScalarType::Int});
  require(crow_indices->numel() >= 1, "crow_indices must have at least one entry, got none");
  const Rows of = {crow_indices->numel() - 1, num_features, data<int32_t>(crow_indices), data<int32_t>(col_indices)};
  if (check_invariants) refuse_if(check_sparse_rows(of.row_begin, of.number, of.column, rows.numel(), num_features));
  return of;
}

inline Parts checked_parts(const OptionalTensor& parts, int64_t rows, bool check_invariants) {
  if (!parts) return {false, nullptr, nullptr, 1};
  const bool narrow = expect("parts", *parts, {any, any}, index_types) == ScalarType::Int;
  require(parts->size(1) >= 1, "parts must have at least 1 column, got 0");
  const Parts of = {true, narrow ? data<int32_t>(parts) : nullptr, narrow ? nullptr : data<int64_t>(parts),
                    parts->size(1)};
  if (check_invariants)
    refuse_if(narrow ? check_range("parts", of.narrow, 0, parts->numel(), 0, rows)
                     : check_range("parts", of.wide, 0, parts->numel(), 0, rows));
  return of;
}

inline Arguments model_arguments(const Tensor& rows, const OptionalTensor& crow_indices,
                                 const OptionalTensor& col_indices, int64_t num_features, const OptionalTensor& parts,
                                 const Tensor& ptr, const OptionalTensor& index, const OptionalTensor& count,
                                 const OptionalTensor& ids, int64_t num_branches, const std::vector<int64_t>& widths,
                                 bool attention, double slope, bool shared, bool check_invariants) {
  const Rows x = checked_rows(rows, crow_indices, col_indices, num_features, check_invariants);
  check_widths("widths", widths);
  check_num_branches(num_branches);
  require(!parts || (num_branches == 1 && !shared), "num_branches must be 1 where there are parts, got ", num_branches);
  require(slope >= 0, "negative_slope must be at least 0, got ", slope);
  require(std::isfinite(slope), "negative_slope must be finite, got ", slope);
  const Parts joint = checked_parts(parts, x.number, check_invariants);
  const Model model = {product_of("parts", joint.number, x.width), num_branches, widths, attention, slope};
  model.parameters();  // refuses widths that are too large
  const Segments seg = checked_segments(parts ? parts->size(0) : x.number, widths.back(), ptr, index, count,
                                        num_branches, shared, check_invariants);
  Arguments of{model, seg, x, joint, nullptr, seg.graphs};
  if (ids) {
    expect("ids", *ids, {any}, {ScalarType::Long});
    of.ids = ids->const_data_ptr<int64_t>();
    of.graphs = ids->numel();
  }
  return of;
}

// The branches of a training step: one for each hop, one for the joint rows, or both. The flat parameters are those of
// the hops, of the joint branch, and of the classifier, which reads the readouts of both side by side.
struct StepArguments {
  std::optional<Arguments> hops, joint;

  const Arguments& any() const { return hops ? *hops : *joint; }
  int64_t readout_width() const {
    return (hops ? hops->model.readout_width() : 0) + (joint ? joint->model.readout_width() : 0);
  }
  // The number of parameters before those of the classifier.
  int64_t parameters() const {
    return sum_of("widths", hops ? hops->model.parameters() : 0, joint ? joint->model.parameters() : 0);
  }
};

inline StepArguments step_arguments(const Tensor& rows, const OptionalTensor& crow_indices,
                                    const OptionalTensor& col_indices, int64_t num_features, const Tensor& parameters,
                                    const OptionalTensor& ptr, const OptionalTensor& index, const OptionalTensor& count,
                                    const OptionalTensor& parts, const OptionalTensor& joint_ptr,
                                    const OptionalTensor& joint_index, const OptionalTensor& joint_count,
                                    const OptionalTensor& ids, int64_t num_branches, const std::vector<int64_t>& widths,
                                    const std::vector<int64_t>& classifier_widths, bool attention, double slope,
                                    bool check_invariants) {
  require(ptr || parts, "ptr or parts must be given");
  require(parts.has_value() == joint_ptr.has_value(), "parts must come with joint_ptr, and only with it");
  StepArguments step;
  if (ptr)
    step.hops = model_arguments(rows, crow_indices, col_indices, num_features, std::nullopt, *ptr, index, count, ids,
                                num_branches, widths, attention, slope, false, check_invariants);
  if (parts) {
    try {
      step.joint = model_arguments(rows, crow_indices, col_indices, num_features, parts, *joint_ptr, joint_index,
                                   joint_count, ids, 1, widths, attention, slope, false, check_invariants);
    } catch (const std::invalid_argument& error) {  // its message begins with the name of an argument
      const std::string message = error.what(), name = message.substr(0, message.find(' '));
      refuse(name == "ptr" || name == "index" || name == "count" ? "joint_" : "", message);
    }
  }
  require(!ptr || !parts || step.hops->seg.graphs == step.joint->seg.graphs,
          "joint_ptr must have as many graphs as ptr, ", step.any().seg.graphs);
  const int64_t classifier = classifier_parameters(step.readout_width(), classifier_widths);
  expect("parameters", parameters, {sum_of("classifier_widths", step.parameters(), classifier)}, {rows.scalar_type()});
  return step;
}

}  // namespace spin_fast

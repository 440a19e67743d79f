// branch_readout and its gradients: from tensors to a pass.

#include "branch.h"

#include <cstring>
#include <tuple>

namespace spin_fast {
namespace {

Tensor branch_readout(const Tensor& rows, OptionalTensor crow_indices, OptionalTensor col_indices, int64_t num_features,
                      const Tensor& parameters, OptionalTensor parts, const Tensor& ptr, OptionalTensor index,
                      OptionalTensor count, OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                      bool attention, double negative_slope, bool /*tf32*/, bool shared, bool check_invariants) {
  const Arguments of = model_arguments(rows, crow_indices, col_indices, num_features, parts, ptr, index, count, ids,
                                       num_branches, widths, attention, negative_slope, shared, check_invariants);
  expect("parameters", parameters, {of.model.parameters()}, {rows.scalar_type()});
  check_ids(of);
  Tensor readout = empty({of.graphs, of.model.readout_width()}, rows.scalar_type());
  dispatch_compute(rows.scalar_type(), [&]<class T>(Tag<T>) {
    T* out = readout.mutable_data_ptr<T>();
    with_pass(workspace(), of, rows.const_data_ptr<T>(), parameters.const_data_ptr<T>(), false, nullptr,
              [&](auto& pass) {
                while (pass.next())
                  pass.forward(out + pass.begin() * of.model.readout_width(), of.model.readout_width());
              });
  });
  return readout;
}

std::tuple<Tensor, Tensor> branch_readout_backward(const Tensor& grad, const Tensor& rows, OptionalTensor crow_indices,
                                                   OptionalTensor col_indices, int64_t num_features,
                                                   const Tensor& parameters, OptionalTensor parts, const Tensor& ptr,
                                                   OptionalTensor index, OptionalTensor count, OptionalTensor ids,
                                                   int64_t num_branches, std::vector<int64_t> widths, bool attention,
                                                   double negative_slope, bool /*tf32*/, bool shared,
                                                   bool check_invariants, bool with_rows) {
  const Arguments of = model_arguments(rows, crow_indices, col_indices, num_features, parts, ptr, index, count, ids,
                                       num_branches, widths, attention, negative_slope, shared, check_invariants);
  const ScalarType value = rows.scalar_type();
  expect("parameters", parameters, {of.model.parameters()}, {value});
  check_ids(of);
  expect("grad", grad, {of.graphs, of.model.readout_width()}, {value});
  Tensor gradient = empty({parameters.numel()}, value);
  require(!with_rows || !of.rows.row_begin, "rows must be dense to have a gradient");
  Tensor dx = empty({with_rows ? of.rows.number : 0, num_features}, value);
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    if (with_rows) std::memset(dx.mutable_data_ptr<T>(), 0, dx.numel() * sizeof(T));
    T* to_rows = with_rows ? dx.mutable_data_ptr<T>() : nullptr;
    with_pass(workspace(), of, rows.const_data_ptr<T>(), parameters.const_data_ptr<T>(), true, to_rows,
              [&](auto& pass) {
                std::vector<T> readout;
                while (pass.next()) {
                  readout.resize((pass.end() - pass.begin()) * of.model.readout_width());
                  pass.forward(readout.data(), of.model.readout_width());
                  pass.backward(grad.const_data_ptr<T>() + pass.begin() * of.model.readout_width());
                }
                pass.write_gradient(gradient.mutable_data_ptr<T>());
              });
  });
  return {gradient, dx};
}

}  // namespace
}  // namespace spin_fast

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) {
  m.impl("branch_readout", TORCH_BOX(&spin_fast::branch_readout));
  m.impl("branch_readout_backward", TORCH_BOX(&spin_fast::branch_readout_backward));
}

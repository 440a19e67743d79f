// What branch_readout and training_step share: their checked arguments, and the pass that serves these best.
#pragma once

#include "piecewise_linear_pass.h"

namespace spin_fast {

// As model_arguments, with the contents of ids checked.
inline Arguments checked_arguments(const Tensor& rows, const Tensor& parameters, const Tensor& ptr,
                                   const OptionalTensor& index, const OptionalTensor& count, const OptionalTensor& ids,
                                   int64_t num_branches, const std::vector<int64_t>& widths, bool attention,
                                   double slope, bool shared, bool check_invariants,
                                   int64_t classifier_parameters = 0) {
  Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention, slope,
                                 shared, check_invariants, classifier_parameters);
  if (ids) refuse_if(check_range("ids", of.ids, 0, of.graphs, 0, of.seg.graphs));
  return of;
}

// Calls f with the pass that serves the chosen graphs best.
template <class T, class F>
void with_pass(Workspace& memory, const Arguments& of, const T* x, const T* parameters, bool backward, T* dx, F f) {
  if (!dx && PiecewiseLinearPass<T>::pays(of)) {
    PiecewiseLinearPass<T> pass(memory, of, x, parameters, backward);
    if (pass.usable()) return f(pass);
  }
  BranchPass<T> pass(memory, of, x, parameters, backward, dx);
  f(pass);
}

}  // namespace spin_fast

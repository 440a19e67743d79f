// What branch_readout and training_step share: a check of ids, and the choice of the pass.
#pragma once

#include "piecewise_linear_pass.h"

namespace spin_fast {

inline void check_ids(const Arguments& of) {
  if (of.ids) refuse_if(check_range("ids", of.ids, 0, of.graphs, 0, of.seg.graphs));
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

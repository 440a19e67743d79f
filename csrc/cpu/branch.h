// What branch_readout and training_step share: a check of ids, and the choice of the pass.
#pragma once

#include "piecewise_linear_pass.h"

namespace spin_fast {

inline void check_ids(const Arguments& of) {
  if (of.ids) refuse_if(check_range("ids", of.ids, 0, of.graphs, 0, of.seg.graphs));
}

// Calls f with the pass that serves the chosen graphs best.
template <class T, class F>
void with_pass(Workspace& memory, const Arguments& of, const T* x, const T* parameters, bool backward,
               std::type_identity_t<T>* dx, F f) {
  if (!dx && PiecewiseLinearPass<T>::pays(of)) {
    PiecewiseLinearPass<T> pass(memory, of, x, parameters, backward);
    if (pass.usable()) return f(pass);
  }
  BranchPass<T> pass(memory, of, x, parameters, backward, dx);
  f(pass);
}

// Two passes side by side: of the hops, and of the joint rows. The latter choose the graphs of a chunk, since a chunk
// has as many of them as of the rows of any hop, or more.
template <class T, class Hops>
class BothPasses {
 public:
  BothPasses(Hops& hops, BranchPass<T>& joint, const Model& hops_model)
      : hops_(hops), joint_(joint), columns_(hops_model.readout_width()), parameters_(hops_model.parameters()) {}

  bool next() {
    if (!joint_.next()) return false;
    hops_.take_to(joint_.end());
    return true;
  }
  int64_t begin() const { return joint_.begin(); }
  int64_t end() const { return joint_.end(); }
  int64_t threads() const { return std::max(hops_.threads(), joint_.threads()); }
  void forward(T* readout, int64_t stride) {
    hops_.forward(readout, stride);
    joint_.forward(readout + columns_, stride);
  }
  void backward(const T* grad) {
    hops_.backward(grad);
    joint_.backward(grad + columns_);
  }
  void write_gradient(T* gradient) const {
    hops_.write_gradient(gradient);
    joint_.write_gradient(gradient + parameters_);
  }

 private:
  Hops& hops_;
  BranchPass<T>& joint_;
  const int64_t columns_, parameters_;
};

}  // namespace spin_fast

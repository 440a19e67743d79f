// The fused branches of a model on CUDA: readouts of the chosen graphs, and the gradients of the parameters.
#pragma once

#include "../model.h"
#include "mlp.h"

namespace spin_fast {

// What the kernels of one call share. Segment s = branch * graphs + position of the graph in `ids`.
template <class T>
struct BranchCall {
  MlpCall<T> mlp;
  Segments seg;
  const int64_t* ids;
  int64_t graphs;
  int64_t pieces;  // of a segment, at most
  const T* x;
  Integers parts;  // [J, num_parts], the rows of x that a joint row consists of
  int num_parts;   // 0 where entries refer to rows of x
  int part_width;  // d
  T* top;          // [S, pieces], the largest logit
  T* total;        // [S, pieces], the softmax denominator
  T* sum;          // [S, pieces, h]
  T* readout;      // [graphs, stride], already at the (R + 1) * h columns of these branches
  T* scale;        // [S]: alpha_e = count_e exp(beta_e - top[s, 0]) scale
  const T* grad;
  int64_t stride;  // of readout and grad
  T* dx;           // [entries, in] or null
};

// For float and double.
template <class T>
class FusedBranches {
 public:
  // The parameters of these branches begin at `first` in the flat vector.
  FusedBranches(const Device& device, const Arguments& arguments, const Tensor& rows, const Tensor& parameters,
                int64_t first, bool tf32);

  // Writes rows of `stride` values, of which the readouts are the first.
  void forward(T* readout, int64_t stride);

  // After forward, with the gradient of the readouts in rows of the same stride. Writes the gradients of the entries to
  // `dx` unless that is null. What the result points to is valid as long as this object.
  const MlpCall<T>& backward(const T* grad, T* dx);

 private:
  void prepare(bool with_gradient, bool with_input_gradient);
  template <class F>
  void launch(F kernel);

  const Device& device_;
  const Model model_;
  const T* parameters_;
  const int64_t first_;
  bool tf32_;
  BranchCall<T> call_ = {};
  std::optional<MlpLaunch<T>> mlp_;
  Buffer<T> top_, total_, sum_, scale_;
};

}  // namespace spin_fast

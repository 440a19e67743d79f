// Weighted sums of rows, segment by segment: the readouts, and those of their gradients that are such sums.
#pragma once

#include "packs.h"

namespace spin_fast {

// For each segment sum_e weight_e z[row of e], or, with `alpha`, the softmax-weighted sum with
//   weight_e = alpha_e = count_e exp(beta_e - top) / total,  beta_e = ReLU(<w of the branch, z[row of e]>).
template <class S, class T = Compute<S>>
struct ReadoutSum {
  Segments seg;
  const S* z;
  T* alpha = nullptr;         // [nnz], written
  const S* w = nullptr;       // [R + 1, h], with alpha
  const T* weight = nullptr;  // [nnz], without alpha; null for seg.count
  // A second sum to add, without alpha: also_e vectors[row of e modulo num_vectors].
  const T* also = nullptr;     // [nnz]
  const T* vectors = nullptr;  // [num_vectors, h]
  int64_t num_vectors = 0;
  void* out;  // [G, (R + 1) * h] of `type`
  ScalarType type;
};

// For the four storage types.
template <class S>
void readout_sum(const Device& device, const ReadoutSum<S>& of);

}  // namespace spin_fast

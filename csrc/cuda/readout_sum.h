// Weighted sums of rows, segment by segment: the readouts, and all their gradients that are such sums.
#pragma once

#include "entries.h"

namespace spin_fast {

// For each segment sum_e weight_e z[row of e], or, with `alpha`, the softmax-weighted sum with
//   weight_e = alpha_e = count_e exp(beta_e - top) / total,  beta_e = ReLU(<w of the branch, z[row of e]>).
template <class S, class T = Compute<S>>
struct SegmentSums {
  Segments seg;
  const S* z;
  T* alpha = nullptr;         // [nnz], written
  const S* w = nullptr;       // [R + 1, h], with alpha
  const T* weight = nullptr;  // [nnz], without; null for seg.count
  // More to add, without: also_e vectors[row of e modulo num_vectors].
  const T* also = nullptr;     // [nnz]
  const T* vectors = nullptr;  // [num_vectors, h]
  int64_t num_vectors = 0;
  void* out;  // [G, (R + 1) * h] of this type
  ScalarType type;
};

// For the four storage types.
template <class S>
void segment_sums(const Device& device, const SegmentSums<S>& of);

}  // namespace spin_fast

// What the bindings on every device share: types, dispatch over dtypes, checks of metadata.
//
// Arguments are validated in Python with better messages; what is checked here keeps a raw call of an op from reading
// or writing outside its tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "kernels.h"

namespace spin_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class T>
struct Tag {
  using type = T;
};

// Calls f(Tag<I>) for the type of indices.
template <class F>
void dispatch_index(ScalarType index, F f) {
  if (index == ScalarType::Int) return f(Tag<int32_t>{});
  STD_TORCH_CHECK(index == ScalarType::Long, "indices must be int32 or int64");
  f(Tag<int64_t>{});
}

// Calls f(Tag<S>) for the type of stored values.
template <class F>
void dispatch_storage(ScalarType value, F f) {
  if (value == ScalarType::Float) return f(Tag<float>{});
  if (value == ScalarType::Double) return f(Tag<double>{});
  if (value == ScalarType::BFloat16) return f(Tag<BFloat16>{});
  STD_TORCH_CHECK(value == ScalarType::Half, "values must be float32, float64, bfloat16 or float16");
  f(Tag<Half>{});
}

// Whether a tensor is where the kernels of this library run; each library has its own.
inline bool is_here(const Tensor& t);

inline void expect(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, ScalarType dtype) {
  STD_TORCH_CHECK(is_here(t) && t.is_contiguous() && t.scalar_type() == dtype, name,
                  " must be contiguous, on the device of the op and of the right dtype");
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(shape.size()), name, " has the wrong number of axes");
  int64_t axis = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(size < 0 || t.size(axis) == size, name, " has the wrong shape");
    ++axis;
  }
}

template <class T>
const T* data(const OptionalTensor& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

// What is computed in, for the type of stored values.
inline ScalarType compute_type(ScalarType storage) {
  return storage == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class S>
const S* stored(const Tensor& t) {
  return static_cast<const S*>(t.const_data_ptr());
}

}  // namespace spin_fast

// What the bindings on every device share: types, dispatch over dtypes, checks of metadata.
//
// Python checks types of arguments; the checks here keep a raw call of an op from reading or writing outside its
// tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "kernels.h"

namespace spin_fast {

using torch::headeronly::ScalarType;
using Shape = torch::headeronly::IntHeaderOnlyArrayRef;
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
  require(index == ScalarType::Long, "indices must be int32 or int64");
  f(Tag<int64_t>{});
}

// Calls f(Tag<S>) for the type of stored values.
template <class F>
void dispatch_storage(ScalarType value, F f) {
  if (value == ScalarType::Float) return f(Tag<float>{});
  if (value == ScalarType::Double) return f(Tag<double>{});
  if (value == ScalarType::BFloat16) return f(Tag<BFloat16>{});
  require(value == ScalarType::Half, "values must be float32, float64, bfloat16 or float16");
  f(Tag<Half>{});
}

using Types = std::initializer_list<ScalarType>;
inline constexpr Types stored_types = {ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half};
inline constexpr Types computed_types = {ScalarType::Float, ScalarType::Double};
inline constexpr Types index_types = {ScalarType::Int, ScalarType::Long};

inline std::string name_of(ScalarType type) {
  constexpr std::pair<ScalarType, const char*> names[] = {
      {ScalarType::Float, "float32"}, {ScalarType::Double, "float64"}, {ScalarType::BFloat16, "bfloat16"},
      {ScalarType::Half, "float16"},  {ScalarType::Int, "int32"},      {ScalarType::Long, "int64"},
      {ScalarType::Byte, "uint8"}};
  for (const auto& [known, name] : names)
    if (known == type) return name;
  return torch::headeronly::toString(type);
}

inline int64_t bytes_of(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Long ? 8
         : type == ScalarType::Float || type == ScalarType::Int ? 4
                                                                : 2;
}

// A size that an argument must have; nullopt accepts any. An optional instead of a sentinel, so no bad size can match.
using Size = std::optional<int64_t>;
inline constexpr std::nullopt_t any = std::nullopt;

template <class Sizes>
std::string listed(const Sizes& sizes) {
  std::string list;
  for (const Size size : sizes) list += (list.empty() ? "" : ", ") + (size ? std::to_string(*size) : "*");
  return "[" + list + "]";
}

// No model has so many branches; the limit keeps loops over empty ones short.
inline constexpr int64_t most_branches = 1 << 20;

inline void check_num_branches(int64_t num_branches) {
  require(num_branches >= 1, "num_branches must be at least 1, got ", num_branches);
  require(num_branches <= most_branches, "num_branches must be at most ", most_branches, ", got ", num_branches);
}

// Whether a tensor is where the kernels of this library run; each library has its own.
inline bool is_here(const Tensor& t);

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another";
}

// torch passes None as an undefined tensor.
inline const Tensor& given(const char* name, const Tensor& t) {
  require(t.defined(), name, " must be a torch.Tensor, got None");
  return t;
}

// Checks the metadata of an argument and returns its type.
inline ScalarType expect(const char* name, const Tensor& t, std::initializer_list<Size> shape, Types types) {
  if (!is_here(given(name, t))) refuse(name, " must be on the device of the op, got ", device_of(t));
  const ScalarType type = t.scalar_type();
  if (std::find(types.begin(), types.end(), type) == types.end()) {
    std::string names;
    for (const ScalarType of : types) names += (names.empty() ? "" : " or ") + name_of(of);
    refuse(name, " must be ", names, ", got ", name_of(type));
  }
  const Shape sizes = t.sizes();
  const auto fits = [](Size wanted, int64_t size) { return !wanted || *wanted == size; };
  if (!std::equal(shape.begin(), shape.end(), sizes.begin(), sizes.end(), fits))
    refuse(name, " must have shape ", listed(shape), ", got ", listed(sizes));
  require(t.is_contiguous(), name, " must be contiguous");
  return type;
}

// Checks that the powers `out` are aligned, and share no memory with what is read after they have begun to be written.
inline void expect_apart(const Tensor& out, const Tensor& x, const Tensor& indptr, const Tensor& indices,
                         const OptionalTensor& ptr, const OptionalTensor& edge_weight) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + t.numel() * bytes_of(t.scalar_type()); };
  const auto check = [&](const char* name, const Tensor& t) {
    require(begin(t) >= end(out) || begin(out) >= end(t), "out must not share memory with ", name);
  };
  require(begin(out) % bytes_of(out.scalar_type()) == 0, "out must begin at a multiple of the size of its values");
  check("x", x);
  check("indptr", indptr);
  check("indices", indices);
  if (ptr) check("ptr", *ptr);
  if (edge_weight) check("edge_weight", *edge_weight);
}

// Uninitialised memory, or nullopt if there is not enough. Faster than torch::stable::empty, which looks its op up by
// name.
inline std::optional<Tensor> allocated(Shape shape, ScalarType type, int32_t device_type, int32_t device) {
  for (const int64_t size : shape)
    if (size < 0) refuse("sizes must be at least 0, got ", listed(shape));
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;)
    if (__builtin_mul_overflow(strides[axis], std::max<int64_t>(shape[axis], 1), &strides[axis - 1]))
      return std::nullopt;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(),
                                                        static_cast<int32_t>(type), device_type, device, &handle);
  if (error != AOTI_TORCH_SUCCESS) return std::nullopt;
  return Tensor(handle);
}

// Fails with the message of torch's own allocator, which users search for.
inline Tensor allocated_on_cpu(Shape shape, ScalarType type) {
  const std::optional<Tensor> t = allocated(shape, type, aoti_torch_device_type_cpu(), 0);
  if (!t)
    throw std::runtime_error("DefaultCPUAllocator: can't allocate memory: you tried to allocate " + listed(shape) +
                             " values of " + name_of(type));
  return *t;
}

template <class T>
const T* data(const OptionalTensor& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

// The type that kernels compute in, for that of stored values.
inline ScalarType compute_type(ScalarType storage) {
  return storage == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class S>
const S* stored(const Tensor& t) {
  return static_cast<const S*>(t.const_data_ptr());
}

}  // namespace spin_fast

// What the bindings of the CUDA ops share: the device and stream of a call, memory, launches.
//
// No op waits for the device (except distinct_rows, which reads the sizes of its results) and none reads the contents
// of a tensor on the host, so calls can be captured in a CUDA graph. Work is divided by sizes alone and sums have a
// fixed order, without float atomics: on one kind of device results are the same bits every time.
//
// The kernels also compile as plain C++: the tests run them thread by thread on the CPU (tests/emulator). Therefore
// launches go through cudaLaunchKernelEx, and shared memory is always dynamic (device.h).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "../tensors.h"

// The dispatch key of the kernels; tests register them for another one.
#ifndef SPIN_FAST_DEVICE
#define SPIN_FAST_DEVICE CUDA
#define spin_fast_device_type aoti_torch_device_type_cuda
#endif

// From libtorch_cuda. torch's stable C interface declares these only if CUDA's headers are used throughout.
extern "C" {
int32_t aoti_torch_create_cuda_guard(int32_t device, void** guard);
int32_t aoti_torch_delete_cuda_guard(void* guard);
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
}

namespace spin_fast {

inline bool is_here(const Tensor& t) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type == spin_fast_device_type();
}

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error: a later call of CUB would report it as its own
  throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}

// An argument of a call; the tensor may be absent.
struct NamedTensor {
  const char* name;
  const Tensor* tensor;

  NamedTensor(const char* name, const Tensor& t) : name(name), tensor(&t) {}
  NamedTensor(const char* name, const OptionalTensor& t) : name(name), tensor(t ? &*t : nullptr) {}
};

// The device of a tensor, current during the lifetime of this object, with torch's current stream on it. The other
// arguments must be on the same device.
class Device {
 public:
  Device(const Tensor& t, std::initializer_list<NamedTensor> others) : index_(t.get_device_index()) {
    for (const auto& [name, other] : others) {
      const int32_t index = other ? other->get_device_index() : index_;
      require(index == index_, name, " must be on the device of the op, cuda:", index_, ", got cuda:", index);
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_guard(index_, &guard_));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { aoti_torch_delete_cuda_guard(guard_); }

  cudaStream_t stream() const { return stream_; }

  // Uninitialised memory from torch's allocator. A failure is reported in torch's words, by which callers recognise
  // that memory ran out, unless it is the error of an earlier kernel.
  Tensor empty(Shape shape, ScalarType dtype) const {
    const std::optional<Tensor> t = allocated(shape, dtype, spin_fast_device_type(), index_);
    if (t) return *t;
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total));  // asks the driver: this library has a runtime of its own
    throw std::runtime_error("CUDA out of memory. Tried to allocate " + listed(shape) + " values of " + name_of(dtype));
  }

  template <class T>
  void zero(T* values, int64_t n) const {
    check(cudaMemsetAsync(values, 0, n * sizeof(T), stream_));
  }

  int64_t multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  // Shared memory available to a block if `blocks` are resident on a multiprocessor; CUDA reserves 1 KB for each.
  int64_t most_shared_bytes(int64_t blocks = 1) const {
    return (attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) + 1024) / blocks - 1024;
  }

  // Whether the code selected for this device was compiled for tensor cores with TF32.
  template <class... Args>
  bool has_tf32(void (*kernel)(Args...)) const {
    cudaFuncAttributes attributes = {};
    check(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= 80;
  }

  // Launches `grid` blocks of `threads`; an empty grid launches nothing.
  template <class... Expected, class... Given>
  void launch(void (*kernel)(Expected...), dim3 grid, int64_t threads, int64_t shared_bytes, Given&&... given) const {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    allow(kernel, shared_bytes);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream_;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Expected>(std::forward<Given>(given))...));
  }

  // The number of blocks of a kernel that are resident on the device at once.
  template <class... Args>
  int64_t resident_blocks(void (*kernel)(Args...), int64_t threads, int64_t shared_bytes) const {
    allow(kernel, shared_bytes);
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads),
                                                        static_cast<size_t>(shared_bytes)));
    return std::max<int64_t>(blocks, 1) * multiprocessors();
  }

 private:
  // A kernel needs permission for more than 48 KB of shared memory. Always all that there is, since host threads may
  // launch the same kernel with different amounts at once.
  template <class... Args>
  void allow(void (*kernel)(Args...), int64_t shared_bytes) const {
    if (shared_bytes > (48 << 10))
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(most_shared_bytes())));
  }
  int64_t attribute(cudaDeviceAttr which) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index_ < 0 ? 0 : index_));
    return value;
  }

  int32_t index_;
  void* guard_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// Uninitialised temporary memory for n values; a null pointer if n is 0.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Device& device, int64_t n) {
    if (n > 0) memory_ = device.empty({n * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte);
  }
  operator T*() const { return memory_ ? static_cast<T*>(memory_->mutable_data_ptr()) : nullptr; }

 private:
  OptionalTensor memory_;
};

// Calls a primitive of CUB, which without memory returns the size that it needs.
template <class F>
void with_memory(const Device& device, F primitive) {
  size_t bytes = 0;
  check(primitive(nullptr, bytes));
  const Buffer<char> memory(device, std::max<int64_t>(static_cast<int64_t>(bytes), 1));
  check(primitive(static_cast<void*>(memory), bytes));
}

// A grid, refused by `name`, the argument that determines its size.
inline dim3 grid_of(const char* name, int64_t x, int64_t y = 1, int64_t z = 1) {
  require(x <= INT32_MAX && y <= UINT16_MAX && z <= UINT16_MAX, name, " must make at most ", INT32_MAX, " x ",
          UINT16_MAX, " x ", UINT16_MAX, " blocks of threads, got ", x, " x ", y, " x ", z);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

// One block for every `each` of n items.
inline dim3 blocks_for(const char* name, int64_t n, int64_t each) { return grid_of(name, (n + each - 1) / each); }

}  // namespace spin_fast

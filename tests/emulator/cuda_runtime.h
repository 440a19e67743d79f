// CUDA on one CPU thread, for tests: the part of the language and of the runtime that csrc/cuda uses.
//
// The host compiler reads the kernels as C++; this header replaces CUDA's own. A thread of a block is a fiber that runs
// until a barrier, a shuffle or its end. Blocks run one after the other. `emulator::order` changes the order of threads
// and blocks, so that results that depend on it show; shared memory is filled with NaN before each block. Errors are:
// writes behind shared memory, divergent barriers, shuffles from absent lanes, misaligned accesses, and launches that a
// GPU would refuse.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __shared__  // only as `extern __shared__`: the array is emulator.cpp's
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
  int x, y;
};

constexpr int warpSize = 32;

extern dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the running fiber

namespace emulator {

extern int order;  // 0: threads and blocks as numbered; 1: reversed; else: shuffled by this seed

void launch(dim3 grid, dim3 size, size_t shared_bytes, const std::function<void()>& kernel);
void wait_for_block();
// Whether `value` is true in any thread of the block.
bool any_in_block(bool value);
void wait_for_warp(unsigned mask);
// The `value` of lane `from`, which must be in the mask.
uint64_t exchange(unsigned mask, uint64_t value, int from);
// Bit i: the `value` of lane i, of those in the mask.
unsigned ballot(unsigned mask, bool value);
int lane();

// mma.m16n8k8 with TF32 factors, as PTX lays out its fragments, and the rounding of a factor (cvt.rna).
unsigned tf32(float value);
void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <class T>
T shuffle(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, from);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait_for_block(); }
inline int __syncthreads_or(int value) { return emulator::any_in_block(value != 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::wait_for_warp(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int lane = emulator::lane();
  return emulator::shuffle(mask, value, (lane & ~(width - 1)) + (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emulator::lane(), from = lane ^ bits;
  return emulator::shuffle(mask, value, from / width == lane / width ? from : lane);
}
inline unsigned __ballot_sync(unsigned mask, int value) { return emulator::ballot(mask, value != 0); }
inline int __any_sync(unsigned mask, int value) { return emulator::ballot(mask, value != 0) != 0; }

inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
using std::max;
using std::min;

// The addend may be of another integer type, as with CUDA's own overloads.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  const T before = *p;
  *p = before + value;
  return before;
}

// The runtime.

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument or configuration";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}
// A small GPU, so that kernels whose grid is limited by the size of the GPU loop in tests too.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : 227 << 10;
  return cudaSuccess;
}
template <class F>
cudaError_t cudaFuncSetAttribute(F*, cudaFuncAttribute, int bytes) {
  return bytes <= 227 << 10 ? cudaSuccess : cudaErrorInvalidValue;
}
struct cudaFuncAttributes {
  int ptxVersion;
};
template <class F>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, F*) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (bytes > 0) std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

struct cudaLaunchAttribute {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Expected, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), Given&&... given) {
  const dim3 grid = config->gridDim, size = config->blockDim;
  const uint64_t threads = uint64_t{size.x} * size.y * size.z;
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0;
  if (empty || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || threads > 1024 ||
      config->dynamicSmemBytes > 227 << 10)
    return cudaErrorInvalidConfiguration;
  emulator::launch(grid, size, config->dynamicSmemBytes, [&] { kernel(static_cast<Expected>(given)...); });
  return cudaSuccess;
}

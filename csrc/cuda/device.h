// What the CUDA kernels share: thread indices, shared memory, conversions of storage types, warp reductions, searches.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../kernels.h"

namespace spin_fast {

constexpr int warp_size = 32;
constexpr unsigned all_lanes = 0xffffffffu;

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// The dynamic shared memory of the block.
template <class T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return reinterpret_cast<T*>(dynamic_shared);
}

// V adjacent values: one load or store of up to 16 bytes.
template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T at[V];
};

template <int V, class T>
__device__ Pack<T, V> load(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}

template <class T, int V>
__device__ void store(T* to, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// Conversions from a storage type to the type of the arithmetic, and back (round to nearest even).
__device__ inline float widened(float value) { return value; }
__device__ inline double widened(double value) { return value; }
__device__ inline float widened(BFloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
__device__ inline float widened(Half value) { return __half2float(__ushort_as_half(value.bits)); }

template <class S>
__device__ S narrowed(Compute<S> value) {
  if constexpr (std::is_same_v<S, Half>) {
    return {__half_as_ushort(__float2half_rn(value))};
  } else if constexpr (std::is_same_v<S, BFloat16>) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    BFloat16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
#else
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // NaN stays NaN
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
  } else {
    return value;
  }
}

// The sum over each group of `width` lanes (a power of two), returned to all of them. The order is fixed.
template <class T>
__device__ T sum_over_lanes(T value, int width = warp_size) {
  for (int step = width / 2; step > 0; step /= 2) value += __shfl_xor_sync(all_lanes, value, step);
  return value;
}

template <class T>
__device__ T max_over_lanes(T value, int width = warp_size) {
  for (int step = width / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(all_lanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// Rounds to TF32 (8 bits of exponent, 10 of mantissa), the type of factors on tensor cores.
__device__ inline unsigned tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return __float_as_uint(value);  // not called: Device::has_tf32
#elif defined(__CUDACC__)
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
#else
  return emulator::tf32(value);
#endif
}

// d += a b for a [16, 8] and b [8, 8], by a whole warp (PTX: mma.m16n8k8). With group = lane / 4 and member = lane % 4,
// a lane holds a[group + {0, 8, 0, 8}, member + {0, 0, 4, 4}], b[member + {0, 4}, group] and
// d[group + {0, 0, 8, 8}, 2 member + {0, 1, 0, 1}].
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();
#elif defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulator::multiply_add(d, a, b);
#endif
}

// The logarithm of a power of two.
__device__ inline int log2_of(int power) { return __ffs(power) - 1; }

// Integers of one of two types; the pointer of the other type is null.
struct Integers {
  const int32_t* narrow;
  const int64_t* wide;

  __device__ int64_t operator[](int64_t i) const { return wide ? wide[i] : narrow[i]; }
};

// The position of the first of n ascending values that is at least `value`, or n.
template <class T, class Value>
__host__ __device__ int64_t lower_bound(const T* ascending, int64_t n, Value value) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (ascending[middle] < value)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The range k with offsets[k] <= i < offsets[k + 1], of n adjoining ranges. Needs offsets[0] <= i < offsets[n].
template <class Offset>
__host__ __device__ int64_t find_range(const Offset* offsets, int64_t n, int64_t i) {
  return lower_bound(offsets + 1, n - 1, i + 1);
}

}  // namespace spin_fast

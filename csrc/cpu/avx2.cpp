// The CPU kernels for AVX2 with FMA (x86-64-v3).
// The pragma stands after every include, so that no function of a header is compiled for this instruction set.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>

#include "../kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define SPIN_FAST_F16C

namespace spin_fast::avx2 {
constexpr int vector_bytes = 32;
#include "table.inl"
}  // namespace spin_fast::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif

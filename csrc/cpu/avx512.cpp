// The CPU kernels for AVX-512 F, BW, DQ, VL (x86-64-v4).
// The pragma stands after every include, so that no function of a header is compiled for this instruction set.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>

#include "../kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define SPIN_FAST_F16C
#define SPIN_FAST_AVX512

namespace spin_fast::avx512 {
constexpr int vector_bytes = 64;
#include "table.inl"
}  // namespace spin_fast::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif

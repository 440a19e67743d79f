// The CPU kernels for AVX2 with FMA (x86-64-v3) and AES.
#if defined(__x86_64__)

#include "headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,aes"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,aes")
#endif

#define SPIN_FAST_AVX2

namespace spin_fast::avx2 {
constexpr int vector_bytes = 32;
inline void bypass(void* to, const void* v) {
  _mm256_stream_si256(static_cast<__m256i*>(to), *static_cast<const __m256i*>(v));
}
inline void settle() { _mm_sfence(); }
#include "dispatch.inl"
}  // namespace spin_fast::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif

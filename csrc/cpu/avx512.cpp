// The CPU kernels for AVX-512 F, BW, DQ, VL (x86-64-v4) and AES.
#if defined(__x86_64__)

#include "headers.h"

// GCC 12 finds its own intrinsics to read what they leave undefined on purpose.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,aes,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,aes,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define SPIN_FAST_AVX512

namespace spin_fast::avx512 {
constexpr int vector_bytes = 64;
inline void bypass(void* to, const void* v) {
  _mm512_stream_si512(static_cast<__m512i*>(to), *static_cast<const __m512i*>(v));
}
inline void settle() { _mm_sfence(); }
#include "dispatch.inl"
}  // namespace spin_fast::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif

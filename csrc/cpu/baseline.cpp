// The CPU kernels for whatever the compiler targets by default: x86-64-v1, or NEON on 64-bit ARM.

#include "headers.h"

namespace spin_fast::baseline {
constexpr int vector_bytes = 16;
#if defined(__x86_64__)
inline void bypass(void* to, const void* v) {
  _mm_stream_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(v)));
}
inline void settle() { _mm_sfence(); }
#else
inline void bypass(void* to, const void* v) { __builtin_memcpy(to, v, vector_bytes); }
inline void settle() {}
#endif
#include "dispatch.inl"
}  // namespace spin_fast::baseline

// The CPU kernels for whatever the compiler targets by default (x86-64-v1 on x86).

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>

#include "../kernels.h"

namespace spin_fast::baseline {
constexpr int vector_bytes = 16;
#include "table.inl"
}  // namespace spin_fast::baseline

// The CPU kernels for whatever the compiler targets by default (x86-64-v1 on x86).

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"

namespace spin_fast::baseline {
constexpr int vector_bytes = 16;
inline void bypass(void* to, const void* v) { std::memcpy(to, v, vector_bytes); }
inline void settle() {}
#include "table.inl"
}  // namespace spin_fast::baseline

#pragma once

#include <bit>

struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return static_cast<float>(std::bit_cast<_Float16>(value.bits)); }
inline __half __float2half_rn(float value) { return {std::bit_cast<unsigned short>(static_cast<_Float16>(value))}; }

// The device-wide primitives of CUB that csrc/cuda uses, on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace cub {

// Every primitive is called twice: without memory it returns the size that it needs.
inline bool asks_for_size(void* memory, size_t& bytes) {
  if (memory == nullptr) bytes = 256;
  return memory == nullptr;
}

struct DeviceScan {
  template <class In, class Out, class N>
  static cudaError_t ExclusiveSum(void* memory, size_t& bytes, In in, Out out, N n, cudaStream_t = nullptr) {
    if (asks_for_size(memory, bytes)) return cudaSuccess;
    std::remove_reference_t<decltype(*out)> sum = 0;
    for (N i = 0; i < n; ++i) {
      const auto value = in[i];
      out[i] = sum;
      sum += value;
    }
    return cudaSuccess;
  }
};

struct DeviceRadixSort {
  template <class Key, class Value, class N>
  static cudaError_t SortPairs(void* memory, size_t& bytes, const Key* keys, Key* sorted_keys, const Value* values,
                               Value* sorted_values, N n, int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                               cudaStream_t = nullptr) {
    if (asks_for_size(memory, bytes)) return cudaSuccess;
    const std::vector<N> from = sorted_order(keys, n, begin_bit, end_bit);
    for (N i = 0; i < n; ++i) {
      sorted_keys[i] = keys[from[i]];
      sorted_values[i] = values[from[i]];
    }
    return cudaSuccess;
  }
  template <class Key, class N>
  static cudaError_t SortKeys(void* memory, size_t& bytes, const Key* keys, Key* sorted_keys, N n, int begin_bit = 0,
                              int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    if (asks_for_size(memory, bytes)) return cudaSuccess;
    const std::vector<N> from = sorted_order(keys, n, begin_bit, end_bit);
    for (N i = 0; i < n; ++i) sorted_keys[i] = keys[from[i]];
    return cudaSuccess;
  }

 private:
  // The position that each sorted key comes from.
  template <class Key, class N>
  static std::vector<N> sorted_order(const Key* keys, N n, int begin_bit, int end_bit) {
    using Bits = std::make_unsigned_t<Key>;
    const int width = end_bit - begin_bit;
    const Bits mask = width >= static_cast<int>(8 * sizeof(Key)) ? ~Bits{0} : static_cast<Bits>((Bits{1} << width) - 1);
    const Bits sign = std::is_signed_v<Key> ? Bits{1} << (8 * sizeof(Key) - 1) : 0;
    std::vector<N> from(n);
    std::iota(from.begin(), from.end(), N{0});
    const auto digits = [&](N i) { return static_cast<Bits>((static_cast<Bits>(keys[i]) ^ sign) >> begin_bit) & mask; };
    std::stable_sort(from.begin(), from.end(), [&](N a, N b) { return digits(a) < digits(b); });
    return from;
  }
};

}  // namespace cub

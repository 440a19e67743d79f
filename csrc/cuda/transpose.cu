// A stable radix sort of the index, and where each row begins in it. One thread per entry or row.

#include <cub/cub.cuh>

#include "device.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;

__global__ void number_kernel(int64_t* values, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) values[i] = i;
}

// offsets[u]: how many keys are smaller than u.
template <class I>
__global__ void offsets_kernel(const I* sorted, int64_t n, int64_t rows, int64_t* offsets) {
  const int64_t u = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (u <= rows) offsets[u] = first_not_below(sorted, n, u);
}

}  // namespace

Transposed transposed(const Device& device, ScalarType type, const void* index, int64_t n, int64_t rows) {
  Transposed result{device.empty({rows + 1}, ScalarType::Long), device.empty({n}, ScalarType::Long)};
  int bits = 1;
  while (bits < 63 && int64_t{1} << bits < rows) ++bits;
  dispatch_index(type, [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* keys = static_cast<const I*>(index);
    Tensor numbers = device.empty({n}, ScalarType::Long), sorted = device.bytes_for<I>(n);
    I* sorted_keys = static_cast<I*>(sorted.mutable_data_ptr());
    int64_t *values = numbers.mutable_data_ptr<int64_t>(), *entries = result.entries.mutable_data_ptr<int64_t>();
    device.launch(&number_kernel, blocks_for(n, threads), threads, 0, values, n);
    const int end_bit = std::min<int>(bits, 8 * sizeof(I) - 1);  // the sign is not needed
    if (n > 0) {
      size_t bytes = 0;
      check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, sorted_keys, values, entries, n, 0, end_bit,
                                            device.stream()));
      Tensor memory = device.bytes_for<char>(bytes);
      check(cub::DeviceRadixSort::SortPairs(memory.mutable_data_ptr(), bytes, keys, sorted_keys, values, entries, n, 0,
                                            end_bit, device.stream()));
    }
    device.launch(&offsets_kernel<I>, blocks_for(rows + 1, threads), threads, 0, sorted_keys, n, rows,
                  result.offsets.mutable_data_ptr<int64_t>());
  });
  return result;
}

}  // namespace spin_fast

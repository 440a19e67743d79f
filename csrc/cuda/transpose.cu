// A stable radix sort of the index, and where each row begins in it. One thread per entry or row. Keys and entries have
// 32 bits where these suffice: every round of the sort moves both.

#include <cub/cub.cuh>
#include <type_traits>

#include "device.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;

// What is sorted: the entries' numbers by their rows. `keys` is null where the index itself serves.
template <class I, class N>
__global__ void number_kernel(const I* index, int64_t n, N* keys, N* entries) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  entries[i] = static_cast<N>(i);
  if (keys) keys[i] = static_cast<N>(index[i]);
}

// offsets[u]: how many keys are smaller than u.
template <class N>
__global__ void offsets_kernel(const N* sorted, int64_t n, int64_t rows, int64_t* offsets) {
  const int64_t u = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (u <= rows) offsets[u] = first_not_below(sorted, n, u);
}

template <class I, class N>
void sort(const Device& device, const I* index, int64_t n, int64_t rows, const Transposed& to) {
  constexpr bool same = std::is_same_v<I, N>;
  Tensor converted = device.bytes_for<N>(same ? 0 : n), numbers = device.bytes_for<N>(n),
         sorted = device.bytes_for<N>(n);
  N *keys = nullptr, *unsorted = static_cast<N*>(numbers.mutable_data_ptr());
  N *sorted_keys = static_cast<N*>(sorted.mutable_data_ptr()), *entries = to.entries.mutable_data_ptr<N>();
  if constexpr (!same) keys = static_cast<N*>(converted.mutable_data_ptr());
  device.launch(&number_kernel<I, N>, blocks_for("index", n, threads), threads, 0, index, n, keys, unsorted);
  const N* given = keys;
  if constexpr (same) given = index;
  int bits = 1;  // the sign is not needed
  while (bits < static_cast<int>(8 * sizeof(N)) - 1 && int64_t{1} << bits < rows) ++bits;
  if (n > 0)
    with_memory(device, [&](void* memory, size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs(memory, bytes, given, sorted_keys, unsorted, entries, static_cast<N>(n), 0,
                                             bits, device.stream());
    });
  device.launch(&offsets_kernel<N>, blocks_for("index", rows + 1, threads), threads, 0, sorted_keys, n, rows,
                to.offsets.mutable_data_ptr<int64_t>());
}

}  // namespace

Transposed transposed(const Device& device, ScalarType type, const void* index, int64_t n, int64_t rows) {
  const ScalarType narrowest = index_type_for(std::max(n, rows));
  const Transposed result{device.empty({rows + 1}, ScalarType::Long), device.empty({n}, narrowest)};
  dispatch_index(type, [&](auto of_index) {
    dispatch_index(narrowest, [&](auto of_entries) {
      using I = typename decltype(of_index)::type;
      using N = typename decltype(of_entries)::type;
      sort<I, N>(device, static_cast<const I*>(index), n, rows, result);
    });
  });
  return result;
}

}  // namespace spin_fast

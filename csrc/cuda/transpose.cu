// A stable radix sort of the index, and the offset of each row in it. One thread per entry or row. Keys and entries
// have 32 bits if these suffice, since every pass of the sort moves both.

#include <cub/cub.cuh>
#include <type_traits>

#include "device.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;

// The input of the sort: entries, and their rows as keys. `keys` is null if the index itself serves.
template <class I, class N>
__global__ void number_kernel(const I* index, int64_t n, N* keys, N* entries) {
  const int64_t i = thread_index();
  if (i >= n) return;
  entries[i] = static_cast<N>(i);
  if (keys) keys[i] = static_cast<N>(index[i]);
}

// offsets[u]: the number of keys below u.
template <class N>
__global__ void offsets_kernel(const N* sorted, int64_t n, int64_t rows, int64_t* offsets) {
  const int64_t u = thread_index();
  if (u <= rows) offsets[u] = lower_bound(sorted, n, u);
}

template <class I, class N>
void sort(const Device& device, const I* index, int64_t n, int64_t rows, const Transposed& to) {
  constexpr bool same = std::is_same_v<I, N>;
  const Buffer<N> keys(device, same ? 0 : n), sorted_keys(device, n), unsorted(device, n);
  device.launch(&number_kernel<I, N>, blocks_for("index", n, threads), threads, 0, index, n, keys, unsorted);
  const N* given = keys;
  if constexpr (same) given = index;
  int bits = 1;  // the sign is not needed
  while (bits < static_cast<int>(8 * sizeof(N)) - 1 && int64_t{1} << bits < rows) ++bits;
  if (n > 0)
    with_memory(device, [&](void* memory, size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs<N, N>(memory, bytes, given, sorted_keys, unsorted,
                                                   to.entries.mutable_data_ptr<N>(), static_cast<N>(n), 0, bits,
                                                   device.stream());
    });
  device.launch(&offsets_kernel<N>, blocks_for("index", rows + 1, threads), threads, 0, sorted_keys, n, rows,
                to.offsets.mutable_data_ptr<int64_t>());
}

}  // namespace

Transposed transposed(const Device& device, ScalarType type, const void* index, int64_t n, int64_t rows) {
  const ScalarType narrowest = index_type_for(std::max(n, rows));
  const Transposed result{device.empty({rows + 1}, ScalarType::Long), device.empty({n}, narrowest)};
  dispatch_index(type, [&]<class I>(Tag<I>) {
    dispatch_index(narrowest,
                   [&]<class N>(Tag<N>) { sort<I, N>(device, static_cast<const I*>(index), n, rows, result); });
  });
  return result;
}

}  // namespace spin_fast

// distinct_rows: which rows of a branch are equal, and how often each graph has each.
//
// Items are the rows of all branches, [R + 1, N, d] read as [(R + 1) N, d], so the number of launches does not grow
// with R. A first radix sort brings together items of equal hash, a second one equal rows of a segment; scans number
// the results. One thread per item; to read values, a group of up to 32 lanes per item, over columns. All numbers are
// 64-bit integers, so the result does not depend on the order of threads.
//
// A hash only proposes candidates: rows are equal if their bits are, with -0 read as +0.

#include <bit>
#include <cub/cub.cuh>
#include <tuple>

#include "../arguments.h"
#include "device.h"
#include "ops.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;
// The rows of all branches, as bits W.
template <class W>
struct Items {
  const W* values;  // [size, width]
  int64_t size, nodes, width;
  int lanes;  // that read an item, a power of two
};

// A sum, so that lanes may add up in any order. The branch is part of the hash, since its rows are its own.
template <class W>
__global__ void hash_kernel(Items<W> items, uint64_t mask, uint64_t* hash, int64_t* item) {
  const int64_t i = thread_index() / items.lanes, lane = threadIdx.x % items.lanes;
  uint64_t sum = 0;
  if (i < items.size)
    for (int64_t j = lane; j < items.width; j += items.lanes)
      sum += mixed(positive_zero(items.values[i * items.width + j]) + (j + 1) * golden);
  sum = sum_over_lanes(sum, items.lanes);
  if (i >= items.size || lane != 0) return;
  hash[i] = (sum + mixed(i / items.nodes)) & mask;
  item[i] = i;
}

// For n items in the order of their hashes: the leader of an item is the first of its hash if they are equal; the
// others are left for another round.
template <class W>
__global__ void match_kernel(Items<W> items, int64_t n, const uint64_t* hash, const int64_t* item, int64_t* leader,
                             int64_t* left) {
  const int64_t k = thread_index() / items.lanes, lane = threadIdx.x % items.lanes;
  int64_t i = 0, first = 0;
  bool differ = false;
  if (k < n) {
    i = item[k], first = item[lower_bound(hash, n, hash[k])];
    differ = i / items.nodes != first / items.nodes;
    for (int64_t j = lane; j < items.width; j += items.lanes)
      differ |=
          positive_zero(items.values[i * items.width + j]) != positive_zero(items.values[first * items.width + j]);
  }
  differ = max_over_lanes<int>(differ, items.lanes) != 0;
  if (k > n || lane != 0) return;
  left[k] = differ;  // left[n] is 0
  if (k < n && !differ) leader[i] = first;
}

// `place`: the scan of left.
__global__ void keep_kernel(int64_t n, const uint64_t* hash, const int64_t* item, const int64_t* place,
                            uint64_t* left_hash, int64_t* left_item) {
  const int64_t k = thread_index();
  if (k >= n || place[k] == place[k + 1]) return;
  left_hash[place[k]] = hash[k];
  left_item[place[k]] = item[k];
}

__global__ void is_first_kernel(int64_t size, const int64_t* leader, int64_t* first) {
  const int64_t i = thread_index();
  if (i <= size) first[i] = i < size && leader[i] == i;
}

// `number`: the scan of `first`, which numbers rows by first appearance. A key is a segment, then a row.
template <class I>
__global__ void key_kernel(int64_t size, int64_t nodes, const int64_t* ptr, int64_t graphs, const int64_t* leader,
                           const int64_t* number, int row_bits, uint64_t* key, I* row_of_node) {
  const int64_t i = thread_index();
  if (i >= size) return;
  const int64_t row = number[leader[i]], segment = i / nodes * graphs + find_range(ptr, graphs, i % nodes);
  row_of_node[i] = static_cast<I>(row);
  key[i] = static_cast<uint64_t>(segment) << row_bits | static_cast<uint64_t>(row);
}

__global__ void is_entry_kernel(int64_t size, const uint64_t* key, int64_t* entry) {
  const int64_t k = thread_index();
  if (k <= size) entry[k] = k < size && (k == 0 || key[k] != key[k - 1]);
}

// `entry`: the scan of is_entry_kernel. The keys of a segment are at the positions of its nodes. `sizes`: the offsets
// of the rows of each branch, and the number of entries.
__global__ void offsets_kernel(int64_t branches, int64_t nodes, const int64_t* ptr, int64_t graphs,
                               const int64_t* number, const int64_t* entry, int64_t* entry_ptr, int64_t* sizes) {
  const int64_t s = thread_index(), segments = branches * graphs;
  if (s < segments) entry_ptr[s] = entry[s / graphs * nodes + ptr[s % graphs]];
  if (s == segments) entry_ptr[s] = entry[branches * nodes];
  if (s <= branches) sizes[s] = number[s * nodes];
  if (s == branches + 1) sizes[s] = entry[branches * nodes];
}

template <class W>
__global__ void rows_kernel(Items<W> items, const int64_t* number, W* rows) {
  const int64_t i = thread_index() / items.lanes, lane = threadIdx.x % items.lanes;
  if (i >= items.size || number[i] == number[i + 1]) return;
  for (int64_t j = lane; j < items.width; j += items.lanes)
    rows[number[i] * items.width + j] = positive_zero(items.values[i * items.width + j]);
}

template <class I>
__global__ void entries_kernel(int64_t size, const uint64_t* key, const int64_t* entry, int row_bits, I* index,
                               int32_t* count) {
  const int64_t k = thread_index();
  if (k >= size || entry[k] == entry[k + 1]) return;
  index[entry[k]] = static_cast<I>(key[k] & ((uint64_t{1} << row_bits) - 1));
  count[entry[k]] = static_cast<int32_t>(lower_bound(key, size, key[k] + 1) - k);
}

// In place.
void exclusive_sum(const Device& device, int64_t* values, int64_t n) {
  with_memory(device, [&](void* memory, size_t& bytes) {
    return cub::DeviceScan::ExclusiveSum(memory, bytes, values, values, n, device.stream());
  });
}

// Waits for the device.
void read(const Device& device, const int64_t* from, int64_t n, int64_t* to) {
  check(cudaMemcpyAsync(to, from, n * sizeof(int64_t), cudaMemcpyDeviceToHost, device.stream()));
  check(cudaStreamSynchronize(device.stream()));
}

struct HashedItems {
  Buffer<uint64_t> hash;
  Buffer<int64_t> item;

  HashedItems(const Device& device, int64_t n) : hash(device, n), item(device, n) {}
};

// All items in the order of their hashes, those of one hash in their own order.
template <class W>
HashedItems sorted_by_hash(const Device& device, const Items<W>& items, uint64_t mask) {
  const HashedItems given(device, items.size);
  HashedItems sorted(device, items.size);
  device.launch(&hash_kernel<W>, blocks_for("powers", items.size, threads / items.lanes), threads, 0, items, mask,
                given.hash, given.item);
  if (items.size > 0)
    with_memory(device, [&](void* memory, size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs<uint64_t, int64_t>(memory, bytes, given.hash, sorted.hash, given.item,
                                                                sorted.item, items.size, 0, 64, device.stream());
    });
  return sorted;
}

// For each item the first one that is equal to it. Each round leaves the items that differ from the first of their
// hash, so there are as many rounds as a hash has different rows: one, unless rows collide.
template <class W>
Buffer<int64_t> find_leaders(const Device& device, const Items<W>& items, uint64_t mask) {
  Buffer<int64_t> leader(device, items.size);
  const Buffer<int64_t> left(device, items.size + 1);
  HashedItems waiting = sorted_by_hash(device, items, mask);
  for (int64_t n = items.size, kept = 0; n > 0; n = kept) {
    device.launch(&match_kernel<W>, blocks_for("powers", n + 1, threads / items.lanes), threads, 0, items, n,
                  waiting.hash, waiting.item, leader, left);
    exclusive_sum(device, left, n + 1);
    read(device, left + n, 1, &kept);
    const HashedItems next(device, kept);
    if (kept > 0)
      device.launch(&keep_kernel, blocks_for("powers", n, threads), threads, 0, n, waiting.hash, waiting.item, left,
                    next.hash, next.item);
    waiting = next;
  }
  return leader;
}

template <class W>
Items<W> items_of(const Tensor& powers) {
  const int64_t nodes = powers.size(1), width = powers.size(2);
  const uint64_t lanes = std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(width, 1, warp_size)));
  return {static_cast<const W*>(powers.const_data_ptr()), powers.size(0) * nodes, nodes, width,
          static_cast<int>(lanes)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> distinct_rows(const Tensor& powers, const Tensor& node_ptr,
                                                                         bool wide_index, int64_t hash_bits, bool) {
  check_distinct(powers, node_ptr, wide_index, hash_bits);
  const ScalarType value = powers.scalar_type(), index_type = wide_index ? ScalarType::Long : ScalarType::Int;
  const int64_t branches = powers.size(0), nodes = powers.size(1), graphs = node_ptr.numel() - 1;
  const int64_t size = branches * nodes, segments = branches * graphs, *offsets = node_ptr.const_data_ptr<int64_t>();
  const uint64_t mask = lowest_bits(hash_bits);
  const int row_bits = std::bit_width(static_cast<uint64_t>(size));
  const int key_bits = row_bits + std::bit_width(static_cast<uint64_t>(segments));
  require(key_bits < 64, "powers must have fewer nodes, or ptr fewer graphs: together they need ", key_bits, " bits");
  const Device device(powers, {{"ptr", node_ptr}});

  Buffer<int64_t> leader;
  dispatch_words(value, [&]<class W>(Tag<W>) { leader = find_leaders(device, items_of<W>(powers), mask); });

  // Number the rows.
  const dim3 blocks = blocks_for("powers", size, threads), blocks_and_end = blocks_for("powers", size + 1, threads);
  const Buffer<int64_t> number(device, size + 1), entry(device, size + 1);
  device.launch(&is_first_kernel, blocks_and_end, threads, 0, size, leader, number);
  exclusive_sum(device, number, size + 1);

  // Number the entries.
  Tensor row_of_node = device.empty({branches, nodes}, index_type);
  const Buffer<uint64_t> key(device, size);
  {
    const Buffer<uint64_t> unsorted(device, size);
    dispatch_index(index_type, [&]<class I>(Tag<I>) {
      device.launch(&key_kernel<I>, blocks, threads, 0, size, nodes, offsets, graphs, leader, number, row_bits,
                    unsorted, row_of_node.mutable_data_ptr<I>());
    });
    if (size > 0)
      with_memory(device, [&](void* memory, size_t& bytes) {
        return cub::DeviceRadixSort::SortKeys<uint64_t>(memory, bytes, unsorted, key, size, 0, key_bits,
                                                        device.stream());
      });
  }
  device.launch(&is_entry_kernel, blocks_and_end, threads, 0, size, key, entry);
  exclusive_sum(device, entry, size + 1);

  // The sizes of the results, then these.
  Tensor ptr = device.empty({segments + 1}, ScalarType::Long);
  const Buffer<int64_t> sizes_on_device(device, branches + 2);
  device.launch(&offsets_kernel, blocks_for("ptr", std::max(segments + 1, branches + 2), threads), threads, 0, branches,
                nodes, offsets, graphs, number, entry, ptr.mutable_data_ptr<int64_t>(), sizes_on_device);
  std::vector<int64_t> sizes(branches + 2);
  read(device, sizes_on_device, branches + 2, sizes.data());
  Tensor row_ptr = allocated_on_cpu({branches + 1}, ScalarType::Long);
  std::copy_n(sizes.begin(), branches + 1, row_ptr.mutable_data_ptr<int64_t>());

  Tensor rows = device.empty({sizes[branches], powers.size(2)}, value);
  dispatch_words(value, [&]<class W>(Tag<W>) {
    const Items<W> items = items_of<W>(powers);
    device.launch(&rows_kernel<W>, blocks_for("powers", size, threads / items.lanes), threads, 0, items, number,
                  static_cast<W*>(rows.mutable_data_ptr()));
  });
  Tensor index = device.empty({sizes[branches + 1]}, index_type);
  Tensor count = device.empty({sizes[branches + 1]}, ScalarType::Int);
  dispatch_index(index_type, [&]<class I>(Tag<I>) {
    device.launch(&entries_kernel<I>, blocks, threads, 0, size, key, entry, row_bits, index.mutable_data_ptr<I>(),
                  count.mutable_data_ptr<int32_t>());
  });
  return {rows, row_ptr, ptr, index, count, row_of_node};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) { m.impl("distinct_rows", TORCH_BOX(&distinct_rows)); }

}  // namespace spin_fast

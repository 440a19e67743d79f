// distinct_rows: which rows of a branch are equal, and how often each graph has each.
//
// Items are the rows of all branches, [R + 1, N, d] read as [(R + 1) N, d], so the number of launches does not grow
// with R. Radix sorts bring together first items of equal hash, then, as numbers, equal rows of a segment; scans number
// what they find. One thread per item; where values are read, a group of up to 32 lanes per item, over columns. All
// numbers are 64-bit integers, so the result does not depend on the order of threads.
//
// As on the CPU a hash only proposes: rows are equal if their bits are, -0 read as +0.

#include <bit>
#include <cub/cub.cuh>
#include <tuple>
#include <type_traits>

#include "../arguments.h"
#include "device.h"
#include "ops.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;
constexpr uint64_t golden = 0x9e3779b97f4a7c15;

template <class W>
__host__ __device__ W positive_zero(W bits) {
  return bits == W(W{1} << (8 * sizeof(W) - 1)) ? W{0} : bits;
}

__host__ __device__ inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The rows of all branches, as bits W, and who reads them.
template <class W>
struct Items {
  const W* values;  // [size, width]
  int64_t size, nodes, width;
  int lanes;  // of the group that reads an item, a power of two
};

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// A sum, so that lanes may add up in any order; a row of another branch is another row.
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

// Of n items in the order of their hashes, those equal to the first of that hash have it as their leader; the others
// are left.
template <class W>
__global__ void match_kernel(Items<W> items, int64_t n, const uint64_t* hash, const int64_t* item, int64_t* leader,
                             int64_t* left) {
  const int64_t k = thread_index() / items.lanes, lane = threadIdx.x % items.lanes;
  int64_t i = 0, first = 0;
  bool differ = false;
  if (k < n) {
    i = item[k], first = item[first_not_below(hash, n, hash[k])];
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

// `number`: the scan of first, which numbers rows by first appearance. Keys are a segment, then a row.
template <class I>
__global__ void key_kernel(int64_t size, int64_t nodes, const int64_t* ptr, int64_t graphs, const int64_t* leader,
                           const int64_t* number, int row_bits, uint64_t* key, I* row_of_node) {
  const int64_t i = thread_index();
  if (i >= size) return;
  const int64_t row = number[leader[i]], segment = i / nodes * graphs + run_of(ptr, graphs, i % nodes);
  row_of_node[i] = static_cast<I>(row);
  key[i] = static_cast<uint64_t>(segment) << row_bits | static_cast<uint64_t>(row);
}

__global__ void is_entry_kernel(int64_t size, const uint64_t* key, int64_t* entry) {
  const int64_t k = thread_index();
  if (k <= size) entry[k] = k < size && (k == 0 || key[k] != key[k - 1]);
}

// `entry`: the scan of what is one. The keys of a segment are where its nodes are. `found`: where the rows of each
// branch begin, with their end, and the number of entries.
__global__ void offsets_kernel(int64_t branches, int64_t nodes, const int64_t* ptr, int64_t graphs,
                               const int64_t* number, const int64_t* entry, int64_t* entry_ptr, int64_t* found) {
  const int64_t s = thread_index(), segments = branches * graphs;
  if (s < segments) entry_ptr[s] = entry[s / graphs * nodes + ptr[s % graphs]];
  if (s == segments) entry_ptr[s] = entry[branches * nodes];
  if (s <= branches) found[s] = number[s * nodes];
  if (s == branches + 1) found[s] = entry[branches * nodes];
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
  count[entry[k]] = static_cast<int32_t>(first_not_below(key, size, key[k] + 1) - k);
}

// In place.
void exclusive_sum(const Device& device, int64_t* values, int64_t n) {
  with_memory(device, [&](void* memory, size_t& bytes) {
    return cub::DeviceScan::ExclusiveSum(memory, bytes, values, values, n, device.stream());
  });
}

// Waits for the device: at the end of every round, and for the sizes of the results.
void read(const Device& device, const int64_t* from, int64_t n, int64_t* to) {
  check(cudaMemcpyAsync(to, from, n * sizeof(int64_t), cudaMemcpyDeviceToHost, device.stream()));
  check(cudaStreamSynchronize(device.stream()));
}

// Items and their hashes.
class Hashed {
 public:
  Hashed(const Device& device, int64_t n)
      : hash_(device.empty({n}, ScalarType::Long)), item_(device.empty({n}, ScalarType::Long)) {}
  uint64_t* hash() const { return static_cast<uint64_t*>(hash_.mutable_data_ptr()); }
  int64_t* item() const { return item_.mutable_data_ptr<int64_t>(); }

 private:
  Tensor hash_, item_;
};

// In the order of their hashes, those of one hash as numbered.
template <class W>
Hashed sorted_by_hash(const Device& device, const Items<W>& items, uint64_t mask) {
  Hashed given(device, items.size), sorted(device, items.size);
  device.launch(&hash_kernel<W>, blocks_for("powers", items.size, threads / items.lanes), threads, 0, items, mask,
                given.hash(), given.item());
  if (items.size > 0)
    with_memory(device, [&](void* memory, size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs(memory, bytes, given.hash(), sorted.hash(), given.item(), sorted.item(),
                                             items.size, 0, 64, device.stream());
    });
  return sorted;
}

// The first item that is equal to each item. An item that is not equal to the first of its hash waits for the next
// round: there are as many as a hash has rows, so one, unless rows collide.
template <class W>
void find_leaders(const Device& device, const Items<W>& items, uint64_t mask, int64_t* leader) {
  Tensor left = device.empty({items.size + 1}, ScalarType::Long);
  int64_t* place = left.mutable_data_ptr<int64_t>();
  Hashed waiting = sorted_by_hash(device, items, mask);
  for (int64_t n = items.size, kept = 0; n > 0; n = kept) {
    device.launch(&match_kernel<W>, blocks_for("powers", n + 1, threads / items.lanes), threads, 0, items, n,
                  waiting.hash(), waiting.item(), leader, place);
    exclusive_sum(device, place, n + 1);
    read(device, place + n, 1, &kept);
    Hashed next(device, kept);
    if (kept > 0)
      device.launch(&keep_kernel, blocks_for("powers", n, threads), threads, 0, n, waiting.hash(), waiting.item(),
                    place, next.hash(), next.item());
    waiting = next;
  }
}

template <class W>
Items<W> items_of(const Tensor& powers) {
  const int64_t nodes = powers.size(1), width = powers.size(2);
  const uint64_t lanes = std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(width, 1, warp_size)));
  return {static_cast<const W*>(powers.const_data_ptr()), powers.size(0) * nodes, nodes, width,
          static_cast<int>(lanes)};
}

// Calls f(Tag<W>) for unsigned words as wide as the values.
template <class F>
void dispatch_words(ScalarType value, F f) {
  dispatch_storage(value, [&](auto tag) {
    constexpr size_t bytes = sizeof(typename decltype(tag)::type);
    f(Tag<std::conditional_t<bytes == 8, uint64_t, std::conditional_t<bytes == 4, uint32_t, uint16_t>>>{});
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> distinct_rows(const Tensor& powers, const Tensor& node_ptr,
                                                                         bool wide_index, int64_t hash_bits, bool) {
  check_distinct(powers, node_ptr, wide_index, hash_bits);
  const ScalarType value = powers.scalar_type(), index_type = wide_index ? ScalarType::Long : ScalarType::Int;
  const int64_t branches = powers.size(0), nodes = powers.size(1), graphs = node_ptr.numel() - 1;
  const int64_t size = branches * nodes, segments = branches * graphs, *offsets = node_ptr.const_data_ptr<int64_t>();
  const uint64_t mask = hash_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1;
  const int row_bits = std::bit_width(static_cast<uint64_t>(size));
  const int key_bits = row_bits + std::bit_width(static_cast<uint64_t>(segments));
  require(key_bits < 64, "powers must have fewer nodes, or ptr fewer graphs: together they need ", key_bits, " bits");
  const Device device(powers, {{"ptr", node_ptr}});

  Tensor leader = device.empty({size}, ScalarType::Long);
  dispatch_words(value, [&](auto tag) {
    using W = typename decltype(tag)::type;
    find_leaders(device, items_of<W>(powers), mask, leader.mutable_data_ptr<int64_t>());
  });

  // Rows.
  const int64_t* leaders = leader.const_data_ptr<int64_t>();
  const dim3 blocks = blocks_for("powers", size, threads), blocks_and_end = blocks_for("powers", size + 1, threads);
  Tensor numbers = device.empty({size + 1}, ScalarType::Long), entries = device.empty({size + 1}, ScalarType::Long);
  int64_t *number = numbers.mutable_data_ptr<int64_t>(), *entry = entries.mutable_data_ptr<int64_t>();
  device.launch(&is_first_kernel, blocks_and_end, threads, 0, size, leaders, number);
  exclusive_sum(device, number, size + 1);

  // Entries.
  Tensor row_of_node = device.empty({branches, nodes}, index_type), sorted = device.bytes_for<uint64_t>(size);
  uint64_t* key = static_cast<uint64_t*>(sorted.mutable_data_ptr());
  {
    Tensor unsorted = device.bytes_for<uint64_t>(size);
    uint64_t* given = static_cast<uint64_t*>(unsorted.mutable_data_ptr());
    dispatch_index(index_type, [&](auto tag) {
      using I = typename decltype(tag)::type;
      device.launch(&key_kernel<I>, blocks, threads, 0, size, nodes, offsets, graphs, leaders, number, row_bits, given,
                    row_of_node.mutable_data_ptr<I>());
    });
    if (size > 0)
      with_memory(device, [&](void* memory, size_t& bytes) {
        return cub::DeviceRadixSort::SortKeys(memory, bytes, given, key, size, 0, key_bits, device.stream());
      });
  }
  device.launch(&is_entry_kernel, blocks_and_end, threads, 0, size, key, entry);
  exclusive_sum(device, entry, size + 1);

  // What is found, and how much of it.
  Tensor ptr = device.empty({segments + 1}, ScalarType::Long), found = device.empty({branches + 2}, ScalarType::Long);
  device.launch(&offsets_kernel, blocks_for("ptr", std::max(segments + 1, branches + 2), threads), threads, 0, branches,
                nodes, offsets, graphs, number, entry, ptr.mutable_data_ptr<int64_t>(),
                found.mutable_data_ptr<int64_t>());
  std::vector<int64_t> sizes(branches + 2);
  read(device, found.const_data_ptr<int64_t>(), branches + 2, sizes.data());
  Tensor row_ptr = allocated_on_cpu({branches + 1}, ScalarType::Long);
  std::copy_n(sizes.begin(), branches + 1, row_ptr.mutable_data_ptr<int64_t>());

  Tensor rows = device.empty({sizes[branches], powers.size(2)}, value);
  dispatch_words(value, [&](auto tag) {
    using W = typename decltype(tag)::type;
    const Items<W> items = items_of<W>(powers);
    device.launch(&rows_kernel<W>, blocks_for("powers", size, threads / items.lanes), threads, 0, items, number,
                  static_cast<W*>(rows.mutable_data_ptr()));
  });
  Tensor index = device.empty({sizes[branches + 1]}, index_type);
  Tensor count = device.empty({sizes[branches + 1]}, ScalarType::Int);
  dispatch_index(index_type, [&](auto tag) {
    using I = typename decltype(tag)::type;
    device.launch(&entries_kernel<I>, blocks, threads, 0, size, key, entry, row_bits, index.mutable_data_ptr<I>(),
                  count.mutable_data_ptr<int32_t>());
  });
  return {rows, row_ptr, ptr, index, count, row_of_node};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) { m.impl("distinct_rows", TORCH_BOX(&distinct_rows)); }

}  // namespace spin_fast

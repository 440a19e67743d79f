// distinct_rows: which rows of a branch are equal, and how often each graph has each.
//
// A hash only proposes: rows are equal if their bits are, -0 read as +0. Who comes first does not depend on how the
// work is cut, so neither does the result on the number of threads.

#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../check.h"
#include "ops.h"

namespace spin_fast {
namespace {

constexpr int64_t block_nodes = 4096;  // a table of so many stays in the nearest caches
constexpr int64_t short_list = 64;

template <class W>
W canonical(W bits) {
  return bits == W(W{1} << (8 * sizeof(W) - 1)) ? W{0} : bits;
}

template <class W, class Width>
bool equal(const W* a, const W* b, Width width) {
  W differ = 0;
  for (int64_t j = 0; j < width; ++j) differ |= canonical(a[j]) ^ canonical(b[j]);
  return differ == 0;
}

template <class W, class Width>
uint64_t hash_of(const W* row, Width width, const uint32_t* keys) {
  uint64_t sum = 0;
  for (int64_t j = 0; j < width; ++j) {
    const W bits = canonical(row[j]);
    if constexpr (sizeof(W) == 8)
      sum += (bits & 0xffffffff) * keys[2 * j] + (bits >> 32) * keys[2 * j + 1];
    else
      sum += uint64_t{bits} * keys[j];
  }
  sum = (sum ^ (sum >> 32)) * 0xff51afd7ed558ccd;
  return sum ^ (sum >> 32);
}

// Odd numbers that look random: two for each feature, which are enough for 64 bits.
std::vector<uint32_t> hash_keys(int64_t width) {
  std::vector<uint32_t> keys(2 * width);
  uint64_t state = 0;
  for (uint32_t& key : keys) {
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    key = static_cast<uint32_t>(x >> 32) | 1;
  }
  return keys;
}

// Slots of a table for so many entries: a power of two.
int64_t table_size(int64_t entries) { return std::bit_ceil(static_cast<uint64_t>(2 * entries)); }

// Runs of nodes of one graph, none longer than block_nodes.
struct Blocks {
  std::vector<int64_t> begin;     // [blocks + 1] nodes
  std::vector<int64_t> of_graph;  // [G + 1] blocks

  int64_t size() const { return begin.size() - 1; }
};

Blocks blocks_of(const int64_t* ptr, int64_t graphs) {
  Blocks blocks;
  for (int64_t g = 0; g < graphs; ++g) {
    blocks.of_graph.push_back(blocks.begin.size());
    for (int64_t v = ptr[g]; v < ptr[g + 1]; v += block_nodes) blocks.begin.push_back(v);
  }
  blocks.of_graph.push_back(blocks.begin.size());
  blocks.begin.push_back(ptr[graphs]);
  return blocks;
}

template <class I>
struct Entry {
  I row;
  int32_t count;
};

// Writes entries sorted by row, adding up those of equal rows; returns how many are left.
template <class I>
int64_t write_sorted(std::vector<Entry<I>>& entries, int64_t size, bool distinct, I* row, int32_t* count) {
  if (distinct && size <= short_list) {  // as many as are smaller is the place: no branch to mispredict
    for (int64_t i = 0; i < size; ++i) {
      int32_t place = 0;
      for (int64_t j = 0; j < size; ++j) place += entries[j].row < entries[i].row;
      row[place] = entries[i].row, count[place] = entries[i].count;
    }
    return size;
  }
  const auto less = [](const Entry<I>& a, const Entry<I>& b) { return a.row < b.row; };
  std::sort(entries.begin(), entries.begin() + size, less);
  int64_t left = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (left > 0 && row[left - 1] == entries[i].row)
      count[left - 1] += entries[i].count;
    else
      row[left] = entries[i].row, count[left++] = entries[i].count;
  }
  return left;
}

// A slot of the table of all rows is free, or holds the node that claimed it and part of its hash, or a row number.
using Slot = std::atomic<uint64_t>;
constexpr uint64_t claimed = uint64_t{1} << 63;
constexpr int node_bits = 40;
constexpr auto relaxed = std::memory_order_relaxed;  // only slots themselves are shared while threads run

// One branch: its rows as bits W; numbers of nodes, entries and rows are of type I.
template <class W, class I>
struct Branch {
  const W* rows;  // [N, d]
  int64_t width;  // d
  int64_t nodes;  // N
  const int64_t* ptr;
  int64_t graphs;
  const Blocks& blocks;
  const uint32_t* keys;
  uint64_t hash_mask;
  // The entries of a block are its distinct rows. What belongs to them stands, in the order of their first appearance,
  // where the nodes of the block begin.
  int64_t* sizes;        // [blocks] entries
  int64_t* rows_before;  // [blocks] rows that first appear in earlier blocks
  uint64_t* hash;        // [N] each, of entries
  I* first_node;
  I* row;
  int32_t* count;
  I* row_of_node;  // [N]

  template <class F>
  void for_each_entry(int64_t block, F f) const {
    for (int64_t e = blocks.begin[block]; e < blocks.begin[block] + sizes[block]; ++e) f(e);
  }

  template <class F>
  void for_blocks(F f) const {
    const auto cost = [&](int64_t block) { return blocks.begin[block]; };
    parallel_items(blocks.size(), nodes * (width + 16), cost, f);
  }

  // Finds the entries of each block and the entry of each node, for now in row_of_node.
  void find_entries() const {
    for_blocks([&](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b)
        sizes[b] = width == 1 ? find_entries_of(b, std::integral_constant<int64_t, 1>()) : find_entries_of(b, width);
    });
  }

  // Width: a number, or a constant where that is faster.
  template <class Width>
  int64_t find_entries_of(int64_t block, Width width) const {
    const int64_t begin = blocks.begin[block], end = blocks.begin[block + 1], size = table_size(end - begin);
    I* slots = reinterpret_cast<I*>(thread_scratch(size * sizeof(I)));
    std::memset(slots, 0xff, size * sizeof(I));  // negative: free
    I next = static_cast<I>(begin);
    for (int64_t v = begin; v < end; ++v) {
      const uint64_t h = hash_of(rows + v * width, width, keys) & hash_mask;
      const auto same = [&](I e) {
        return hash[e] == h && equal(rows + first_node[e] * width, rows + v * width, width);
      };
      uint64_t i = h & (size - 1);
      while (slots[i] >= 0 && !same(slots[i])) i = (i + 1) & (size - 1);
      if (slots[i] < 0) {
        hash[next] = h;
        first_node[next] = static_cast<I>(v);
        count[next] = 0;
        slots[i] = next++;
      }
      row_of_node[v] = slots[i];
      ++count[slots[i]];
    }
    return next - begin;
  }

  // Finds for each entry the slot that it shares with all entries of the same row, for now in `hash`. Which of them
  // claims it is a matter of chance, and does not matter.
  void find_slots(std::vector<Slot>& slots) const {
    for_blocks([&](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b) {
        if (b + 1 < to)
          for_each_entry(b + 1, [&](int64_t e) { __builtin_prefetch(&slots[hash[e] & (slots.size() - 1)]); });
        for_each_entry(b, [&](int64_t e) { hash[e] = find_slot(slots, first_node[e], hash[e]); });
      }
    });
  }

  uint64_t find_slot(std::vector<Slot>& slots, uint64_t node, uint64_t h) const {
    const uint64_t tag = (h | claimed) >> node_bits, mask = slots.size() - 1;
    for (uint64_t i = h & mask;; i = (i + 1) & mask) {
      uint64_t other = slots[i].load(relaxed);
      if (other == 0 && slots[i].compare_exchange_strong(other, tag << node_bits | node, relaxed)) return i;
      const uint64_t other_node = other & ((uint64_t{1} << node_bits) - 1);
      if (other >> node_bits == tag && equal(rows + other_node * width, rows + node * width, width)) return i;
    }
  }

  // Numbers the rows by first appearance, and appends the node of each.
  void number_rows(std::vector<Slot>& slots, std::vector<I>& node_of_row, int64_t nodes_before) const {
    for (int64_t b = 0; b < blocks.size(); ++b) {
      rows_before[b] = node_of_row.size();
      if (b + 1 < blocks.size()) for_each_entry(b + 1, [&](int64_t e) { __builtin_prefetch(&slots[hash[e]]); });
      for_each_entry(b, [&](int64_t e) {
        Slot& slot = slots[hash[e]];
        if (slot.load(relaxed) >= claimed) {
          slot.store(node_of_row.size(), relaxed);
          node_of_row.push_back(static_cast<I>(nodes_before + first_node[e]));
        }
        row[e] = static_cast<I>(slot.load(relaxed));
      });
    }
  }

  // Gives each node its row; writes the entries of each graph, sorted by row, where its nodes begin, and how many.
  void list_entries(int64_t* list_sizes) const {
    const auto cost = [&](int64_t graph) { return ptr[graph]; };
    parallel_items(graphs, nodes * 16, cost, [&](int64_t from, int64_t to) {
      std::vector<Entry<I>> known, fresh;
      for (int64_t g = from; g < to; ++g) {
        for (int64_t v = ptr[g]; v < ptr[g + 1]; ++v) row_of_node[v] = row[row_of_node[v]];
        known.resize(std::max<size_t>(known.size(), ptr[g + 1] - ptr[g]));
        fresh.resize(known.size());
        // Rows that no earlier graph has are in order already, unless blocks share them.
        const int64_t first = blocks.of_graph[g], last = blocks.of_graph[g + 1];
        const bool one_block = last - first <= 1;
        const int64_t ordered = one_block && last > first ? rows_before[first] : INT64_MAX;
        int64_t num_known = 0, num_fresh = 0;
        for (int64_t b = first; b < last; ++b)
          for_each_entry(b, [&](int64_t e) {
            known[num_known] = fresh[num_fresh] = {row[e], count[e]};
            num_known += row[e] < ordered;
            num_fresh += row[e] >= ordered;
          });
        int64_t size = write_sorted(known, num_known, one_block, row + ptr[g], count + ptr[g]);
        for (int64_t i = 0; i < num_fresh; ++i, ++size)
          row[ptr[g] + size] = fresh[i].row, count[ptr[g] + size] = fresh[i].count;
        list_sizes[g] = size;
      }
    });
  }
};

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class W, class I>
Result find_distinct(const Tensor& powers, const Tensor& ptr_tensor, uint64_t hash_mask) {
  constexpr ScalarType index_type = std::is_same_v<I, int32_t> ? ScalarType::Int : ScalarType::Long;
  const int64_t branches = powers.size(0), nodes = powers.size(1), width = powers.size(2);
  const int64_t graphs = ptr_tensor.numel() - 1, segments = branches * graphs;
  const W* values = static_cast<const W*>(powers.const_data_ptr());
  const int64_t* ptr = ptr_tensor.const_data_ptr<int64_t>();
  const Blocks blocks = blocks_of(ptr, graphs);
  const std::vector<uint32_t> keys = hash_keys(width);
  std::vector<int64_t> sizes(blocks.begin.size()), rows_before(blocks.begin.size());
  std::vector<I> node_of_row;

  Tensor row_ptr = empty({branches + 1}, ScalarType::Long), list_ptr = empty({segments + 1}, ScalarType::Long);
  Tensor row_of_node = empty({branches, nodes}, index_type);
  Tensor row = empty({branches, nodes}, index_type), count = empty({branches, nodes}, ScalarType::Int);
  Tensor hash = empty({nodes}, ScalarType::Long), first_node = empty({nodes}, index_type);
  int64_t *row_ends = row_ptr.mutable_data_ptr<int64_t>(), *list_ends = list_ptr.mutable_data_ptr<int64_t>();
  *row_ends++ = *list_ends++ = 0;
  for (int64_t r = 0; r < branches; ++r) {
    const Branch<W, I> branch = {values + r * nodes * width,
                                 width,
                                 nodes,
                                 ptr,
                                 graphs,
                                 blocks,
                                 keys.data(),
                                 hash_mask,
                                 sizes.data(),
                                 rows_before.data(),
                                 reinterpret_cast<uint64_t*>(hash.mutable_data_ptr<int64_t>()),
                                 first_node.mutable_data_ptr<I>(),
                                 row.mutable_data_ptr<I>() + r * nodes,
                                 count.mutable_data_ptr<int32_t>() + r * nodes,
                                 row_of_node.mutable_data_ptr<I>() + r * nodes};
    branch.find_entries();
    std::vector<Slot> slots(table_size(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})));
    branch.find_slots(slots);
    branch.number_rows(slots, node_of_row, r * nodes);
    branch.list_entries(list_ends + r * graphs);
    row_ends[r] = static_cast<int64_t>(node_of_row.size());
  }
  std::partial_sum(list_ends, list_ends + segments, list_ends);

  const int64_t num_rows = static_cast<int64_t>(node_of_row.size()), entries = list_ends[segments - 1];
  Tensor rows = empty({num_rows, width}, powers.scalar_type());
  W* distinct = static_cast<W*>(rows.mutable_data_ptr());
  const auto same_cost = [](int64_t item) { return item; };
  parallel_items(num_rows, num_rows * (width + 4), same_cost, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u)
      std::transform(values + node_of_row[u] * width, values + (node_of_row[u] + int64_t{1}) * width,
                     distinct + u * width, canonical<W>);
  });
  Tensor index = empty({entries}, index_type), times = empty({entries}, ScalarType::Int);
  parallel_items(
      segments, entries * 8, [&](int64_t s) { return list_ends[s - 1]; },
      [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          const int64_t from = s / graphs * nodes + ptr[s % graphs], to = list_ends[s - 1], size = list_ends[s] - to;
          std::copy_n(row.const_data_ptr<I>() + from, size, index.mutable_data_ptr<I>() + to);
          std::copy_n(count.const_data_ptr<int32_t>() + from, size, times.mutable_data_ptr<int32_t>() + to);
        }
      });
  return {rows, row_ptr, list_ptr, index, times, row_of_node};
}

Result distinct_rows(const Tensor& powers, const Tensor& ptr, bool wide_index, int64_t hash_bits, bool checked) {
  expect("powers", powers, {-1, -1, -1}, powers.scalar_type());
  expect("ptr", ptr, {-1}, ScalarType::Long);
  STD_TORCH_CHECK(ptr.numel() >= 1, "ptr must have at least one entry");
  if (!checked) {
    const int64_t graphs = ptr.numel() - 1;
    const std::string problem = check_offsets("ptr", ptr.const_data_ptr<int64_t>(), graphs, powers.size(1), "nodes");
    STD_TORCH_CHECK(problem.empty(), problem);
  }
  STD_TORCH_CHECK(wide_index || powers.size(0) * powers.size(1) <= INT32_MAX, "so many rows need int64 numbers");
  STD_TORCH_CHECK(hash_bits >= 0 && hash_bits <= 64, "hash_bits must be between 0 and 64");
  const uint64_t mask = hash_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1;
  Result result;
  dispatch_storage(powers.scalar_type(), [&](auto value_tag) {
    constexpr size_t bytes = sizeof(typename decltype(value_tag)::type);
    using W = std::conditional_t<bytes == 8, uint64_t, std::conditional_t<bytes == 4, uint32_t, uint16_t>>;
    result = wide_index ? find_distinct<W, int64_t>(powers, ptr, mask) : find_distinct<W, int32_t>(powers, ptr, mask);
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) { m.impl("distinct_rows", TORCH_BOX(&distinct_rows)); }

}  // namespace spin_fast

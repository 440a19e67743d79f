// The distinct rows of branches whose powers come chunk by chunk, so that they need never be in memory as a whole.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "power.h"

namespace spin_fast {

// rows, row_ptr, ptr, index, count and row_of_node, as in spin_fast/ops. Of sparse rows `rows` are the values.
using DistinctTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// How rows are kept. `chosen`: sparse if the rows of the first graph that has nodes take a quarter of the memory so, or
// less, and each takes some cache lines otherwise: of fewer, reading them dense is faster.
enum class RowLayout { dense, sparse, chosen };

// Pseudo-random odd numbers, two per feature, for its 64 bits.
inline std::vector<uint32_t> hash_keys(int64_t width) {
  std::vector<uint32_t> keys(2 * width);
  for (size_t k = 0; k < keys.size(); ++k) keys[k] = static_cast<uint32_t>(mixed((k + 1) * golden) >> 32) | 1;
  return keys;
}

// Puts the rows [begin, end) into slots that are clear, or have others.
inline void fill_slots(const uint32_t* hashes, int64_t begin, int64_t end, uint64_t* slots, uint64_t mask) {
  for (int64_t u = begin; u < end; ++u) {
    uint64_t i = hashes[u] & mask;
    while (slots[i]) i = (i + 1) & mask;
    slots[i] = slot_tag(hashes[u]) | static_cast<uint64_t>(u);
  }
}

// Of the search for a row, in multiply-adds of vectors: about.
inline int64_t search_cost(int64_t width) { return 600 + 4 * width; }

class DistinctRows {
 public:
  DistinctRows(RowLayout layout, int64_t branches, int64_t width, int64_t bytes)
      : layout(layout), branches(branches), width(width), bytes(bytes) {}
  virtual ~DistinctRows() = default;
  // The graphs that come next: `powers` [R + 1, N, d], `ptr` [graphs + 1] from 0 to N.
  virtual void add(const void* powers, const int64_t* ptr, int64_t graphs) = 0;
  // The same of their graphs, by their patterns; false, and no graph taken, where these do not pay.
  virtual bool add(const GraphRange& graphs) = 0;
  // Of all branches, so far.
  virtual int64_t num_rows() const = 0;
  // What is found, as if all chunks had been one; nothing is left behind.
  virtual DistinctTensors take() = 0;
  // crow_indices and col_indices of sparse rows that are taken next; none of dense ones, which sparse ones become here
  // if they have more values than int32 counts, or take as much memory.
  virtual std::optional<std::pair<Tensor, Tensor>> take_indices() = 0;
  bool is_sparse() const { return layout == RowLayout::sparse; }

  RowLayout layout;
  const int64_t branches, width, bytes;  // of powers: R + 1, d, and the size of a value
};

// For at most so many nodes and graphs in all. `node_rows`: keep row_of_node, which is [R + 1, 0] otherwise.
// `operators`: one after the other, those that the hops are of; none where graphs do not come by their patterns.
std::unique_ptr<DistinctRows> make_distinct_rows(int64_t branches, int64_t nodes, int64_t width, int64_t graphs,
                                                 ScalarType value, bool wide_index, bool node_rows, int64_t hash_bits,
                                                 RowLayout layout, const std::vector<Operator>& operators);

}  // namespace spin_fast

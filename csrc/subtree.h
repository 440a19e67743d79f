// The arithmetic of subtree_keys, the same on every device: integers modulo 2^64, so results are equal on every
// machine. A change here changes the columns of models that were fitted before. Reference implementation: subtree_keys
// in spin_fast/ops/reference.py.
#pragma once

#include <cstring>

#include "arguments.h"

namespace spin_fast {

// Without these constants mixed(0) = 0, and equal parts could cancel.
constexpr uint64_t of_neighbours = mixed(2 * golden), of_edges = mixed(3 * golden), of_nodes = mixed(4 * golden);

// What a column adds to the key of a row; a value of 0 adds nothing.
constexpr uint64_t salt_of_column(int64_t column, uint64_t seed) {
  return mixed(seed + golden * (static_cast<uint64_t>(column) + 1));
}
constexpr uint64_t key_of_value(uint64_t bits, uint64_t salt) { return mixed(bits ^ salt); }

// The key of a node before any hop, from the sum over its columns.
constexpr uint64_t first_key(uint64_t sum, int64_t width, uint64_t seed) {
  return mixed(sum + seed + golden * (static_cast<uint64_t>(width) + 1));
}

// What a node adds to the sum of each neighbour, over an edge of some type.
constexpr uint64_t key_to_neighbours(uint64_t key) { return mixed(key + of_neighbours); }
constexpr uint64_t over_edge(uint64_t key, int64_t type) {
  return mixed(key ^ mixed(of_edges + static_cast<uint64_t>(type)));
}

// The key after a hop, from the one before and the sum over the neighbours.
constexpr uint64_t next_key(uint64_t key, uint64_t sum) { return mixed(mixed(key + of_nodes) + sum); }

// Checks all but contents; returns the type of x.
inline ScalarType check_subtree(const Tensor& indptr, const Tensor& indices, const Tensor& x,
                                const OptionalTensor& edge_type, int64_t num_hops) {
  const ScalarType value = expect("x", x, {any, any}, computed_types);
  check_adjacency(indptr, indices, value, x.size(0), std::nullopt, std::nullopt);
  if (edge_type) expect("edge_type", *edge_type, {indices.numel()}, {ScalarType::Long});
  check_num_hops(num_hops);
  return value;
}

}  // namespace spin_fast

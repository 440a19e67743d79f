// Checks of the metadata of the arguments of power_features, its gradient and distinct_rows, and hashes, the same on
// every device. (Those of readouts: segments.h; of the fused branch: model.h.)
#pragma once

#include <string>
#include <type_traits>

#include "tensors.h"

namespace spin_fast {

inline Operator parse_operator(const std::string& name) {
  if (name == "adj") return Operator::adj;
  if (name == "rw") return Operator::rw;
  if (name == "sym") return Operator::sym;
  if (name == "sym+adj") return Operator::sym_adj;
  refuse("operator must be one of adj, sym, sym+adj, rw, got '", name, "'");
}

// Checks all but contents. `value`: the type of x or of the gradient, which have one row per node.
inline void check_adjacency(const Tensor& indptr, const Tensor& indices, ScalarType value, int64_t nodes,
                            const OptionalTensor& ptr, const OptionalTensor& edge_weight) {
  const ScalarType index = expect("indptr", indptr, {sum_of("indptr", nodes, 1)}, index_types);
  expect("indices", indices, {any}, {index});
  if (ptr) expect("ptr", *ptr, {any}, {ScalarType::Long});
  require(!ptr || ptr->numel() >= 1, "ptr must have at least one entry, got none");
  if (edge_weight) expect("edge_weight", *edge_weight, {indices.numel()}, {compute_type(value)});
}

inline void check_num_hops(int64_t num_hops) {
  require(num_hops >= 0, "num_hops must be at least 0, got ", num_hops);
  require(num_hops < most_branches, "num_hops must be at most ", most_branches - 1, ", got ", num_hops);
}

// The type of a gradient of all powers.
inline ScalarType check_powers_gradient(const Tensor& grad) {
  const ScalarType value = expect("grad", grad, {any, any, any}, computed_types);
  require(grad.size(0) >= 1, "grad must have at least 1 branch, got 0");
  return value;
}

// Calls f(Tag<W>) for unsigned words as wide as the values.
template <class F>
void dispatch_words(ScalarType value, F f) {
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    constexpr size_t bytes = sizeof(S);
    f(Tag<std::conditional_t<bytes == 8, uint64_t, std::conditional_t<bytes == 4, uint32_t, uint16_t>>>{});
  });
}

// The bits of a value, 0 for those of -0.
template <class W>
constexpr W positive_zero(W bits) {
  return bits == W(W{1} << (8 * sizeof(W) - 1)) ? W{0} : bits;
}

// A bijection that mixes all bits (the finaliser of splitmix64, Steele et al. 2014), and a constant without a pattern.
constexpr uint64_t mixed(uint64_t key) {
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
  key = (key ^ key >> 27) * 0x94d049bb133111ebu;
  return key ^ key >> 31;
}
constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

constexpr uint64_t lowest_bits(int64_t n) { return n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

inline void check_distinct(const Tensor& powers, const Tensor& ptr, bool wide_index, int64_t hash_bits) {
  expect("powers", powers, {any, any, any}, stored_types);
  expect("ptr", ptr, {any}, {ScalarType::Long});
  require(powers.size(0) >= 1, "powers must have at least 1 branch, got 0");
  require(powers.size(0) <= most_branches, "powers must have at most ", most_branches, " branches, got ",
          powers.size(0));
  require(ptr.numel() >= 1, "ptr must have at least one entry, got none");
  require(hash_bits >= 0 && hash_bits <= 64, "hash_bits must be in [0, 64], got ", hash_bits);
  const int64_t rows = powers.size(0) * powers.size(1);
  require(wide_index || rows <= INT32_MAX, "wide_index must be True for ", rows, " rows, got False");
}

}  // namespace spin_fast

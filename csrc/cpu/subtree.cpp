// subtree_keys: the keys of all nodes after each hop.
//
// Layout: x row-major [N, d], keys [R + 1, N]. Parallel axis: nodes. Accumulator: integers modulo 2^64, in which the
// order of a sum changes nothing.

#include "../subtree.h"

#include "ops.h"

namespace spin_fast {
namespace {

// The key of each row; the columns that are 0, most of one-hot features, cost a comparison each.
template <class T>
void first_keys(const T* x, int64_t nodes, int64_t width, uint64_t seed, uint64_t* keys) {
  std::vector<uint64_t> salts(width);
  for (int64_t k = 0; k < width; ++k) salts[k] = salt_of_column(k, seed);
  parallel_items(nodes, nodes * (width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      uint64_t sum = 0;
      for (int64_t k = 0; k < width; ++k) {
        const double value = static_cast<double>(x[v * width + k]);
        uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof(bits));
        if (bits << 1 != 0) sum += key_of_value(bits, salts[k]);  // neither 0 nor -0
      }
      keys[v] = first_key(sum, width, seed);
    }
  });
}

template <class I>
void next_keys(const I* indptr, const I* indices, const int64_t* type, int64_t nodes, const uint64_t* keys,
               uint64_t* to_neighbours, uint64_t* next) {
  const auto cost = [&](int64_t v) { return static_cast<int64_t>(indptr[v]) + v; };
  parallel_items(nodes, nodes, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) to_neighbours[v] = key_to_neighbours(keys[v]);
  });
  parallel_items(nodes, cost(nodes), cost, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      uint64_t sum = 0;
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e)
        sum += type ? over_edge(to_neighbours[indices[e]], type[e]) : to_neighbours[indices[e]];
      next[v] = next_key(keys[v], sum);
    }
  });
}

Tensor subtree_keys(const Tensor& indptr, const Tensor& indices, const Tensor& x, OptionalTensor edge_type,
                    int64_t num_hops, int64_t seed, bool check_invariants) {
  const ScalarType value = check_subtree(indptr, indices, x, edge_type, num_hops);
  const int64_t nodes = x.size(0), width = x.size(1);
  Tensor result = empty({num_hops + 1, nodes}, ScalarType::Long);
  auto* keys = reinterpret_cast<uint64_t*>(result.mutable_data_ptr<int64_t>());
  dispatch_index(indptr.scalar_type(), [&]<class I>(Tag<I>) {
    const I *begins = indptr.const_data_ptr<I>(), *columns = indices.const_data_ptr<I>();
    if (check_invariants) refuse_if(check_csr(begins, columns, indices.numel(), nullptr, 0, nodes));
    if (value == ScalarType::Float)
      first_keys(x.const_data_ptr<float>(), nodes, width, static_cast<uint64_t>(seed), keys);
    else
      first_keys(x.const_data_ptr<double>(), nodes, width, static_cast<uint64_t>(seed), keys);
    std::vector<uint64_t> to_neighbours(num_hops > 0 ? nodes : 0);
    for (int64_t r = 0; r < num_hops; ++r)
      next_keys(begins, columns, data<int64_t>(edge_type), nodes, keys + r * nodes, to_neighbours.data(),
                keys + (r + 1) * nodes);
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) { m.impl("subtree_keys", TORCH_BOX(&subtree_keys)); }

}  // namespace spin_fast

// subtree_keys on CUDA.
//
// Layout: x row-major [N, d], keys [R + 1, N]. Parallel axis: a thread per node, which adds up its row or its
// neighbours alone. Accumulator: integers modulo 2^64, in which the order of a sum changes nothing.

#include "../subtree.h"
#include "device.h"
#include "ops.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;

__global__ void salts_kernel(int64_t width, uint64_t seed, uint64_t* salts) {
  const int64_t k = thread_index();
  if (k < width) salts[k] = salt_of_column(k, seed);
}

template <class T>
__global__ void first_kernel(const T* x, int64_t nodes, int64_t width, const uint64_t* salts, uint64_t seed,
                             uint64_t* keys) {
  const int64_t v = thread_index();
  if (v >= nodes) return;
  uint64_t sum = 0;
  for (int64_t k = 0; k < width; ++k) {
    const double value = static_cast<double>(x[v * width + k]);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    if (bits << 1 != 0) sum += key_of_value(bits, salts[k]);  // neither 0 nor -0
  }
  keys[v] = first_key(sum, width, seed);
}

__global__ void to_neighbours_kernel(const uint64_t* keys, int64_t nodes, uint64_t* to_neighbours) {
  const int64_t v = thread_index();
  if (v < nodes) to_neighbours[v] = key_to_neighbours(keys[v]);
}

template <class I>
__global__ void next_kernel(const I* indptr, const I* indices, const int64_t* type, int64_t nodes, const uint64_t* keys,
                            const uint64_t* to_neighbours, uint64_t* next) {
  const int64_t v = thread_index();
  if (v >= nodes) return;
  uint64_t sum = 0;
  for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e)
    sum += type ? over_edge(to_neighbours[indices[e]], type[e]) : to_neighbours[indices[e]];
  next[v] = next_key(keys[v], sum);
}

Tensor subtree_keys(const Tensor& indptr, const Tensor& indices, const Tensor& x, OptionalTensor edge_type,
                    int64_t num_hops, int64_t seed, bool) {
  const ScalarType value = check_subtree(indptr, indices, x, edge_type, num_hops);
  const int64_t nodes = x.size(0), width = x.size(1);
  const Device device(x, {{"indptr", indptr}, {"indices", indices}, {"edge_type", edge_type}});
  Tensor result = device.empty({num_hops + 1, nodes}, ScalarType::Long);
  auto* const keys = reinterpret_cast<uint64_t*>(result.mutable_data_ptr<int64_t>());
  const dim3 blocks = blocks_for("x", nodes, threads);
  const Buffer<uint64_t> salts(device, width), to_neighbours(device, num_hops > 0 ? nodes : 0);
  const auto bits_of_seed = static_cast<uint64_t>(seed);
  device.launch(&salts_kernel, blocks_for("x", width, threads), threads, 0, width, bits_of_seed, salts);
  const auto first = [&]<class T>(Tag<T>) {
    device.launch(&first_kernel<T>, blocks, threads, 0, x.const_data_ptr<T>(), nodes, width, salts, bits_of_seed, keys);
  };
  if (value == ScalarType::Float)
    first(Tag<float>{});
  else
    first(Tag<double>{});
  dispatch_index(indptr.scalar_type(), [&]<class I>(Tag<I>) {
    for (int64_t r = 0; r < num_hops; ++r) {
      device.launch(&to_neighbours_kernel, blocks, threads, 0, keys + r * nodes, nodes, to_neighbours);
      device.launch(&next_kernel<I>, blocks, threads, 0, indptr.const_data_ptr<I>(), indices.const_data_ptr<I>(),
                    data<int64_t>(edge_type), nodes, keys + r * nodes, to_neighbours, keys + (r + 1) * nodes);
    }
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) { m.impl("subtree_keys", TORCH_BOX(&subtree_keys)); }

}  // namespace spin_fast

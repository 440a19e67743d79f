// power_features and its gradient: from tensors to the hop kernel in power.inl.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../check.h"
#include "ops.h"

namespace spin_fast {
namespace {

template <class T, class I>
struct Adjacency {
  const I* indptr;
  const I* indices;
  const T* weight;
  int64_t nodes, arcs;
};

// left and right of Ā[v, u] = A[v, u] * (left[v] * right[u] + plain); both empty for `adj`.
struct Scales {
  std::vector<double> left, right;
  double plain;
};

template <class T, class I>
Scales scales_of(const Adjacency<T, I>& a, const std::string& op) {
  if (op == "adj") return {{}, {}, 1.0};
  STD_TORCH_CHECK(op == "sym" || op == "sym+adj" || op == "rw", "operator must be one of adj, sym, sym+adj, rw");
  std::vector<double> scale(a.nodes);
  for (int64_t v = 0; v < a.nodes; ++v) {
    double degree = static_cast<double>(a.indptr[v + 1] - a.indptr[v]);
    if (a.weight) {
      degree = 0;
      for (int64_t e = a.indptr[v]; e < a.indptr[v + 1]; ++e) degree += static_cast<double>(a.weight[e]);
    }
    if (op == "rw") {
      scale[v] = degree == 0 ? 0 : 1 / degree;
    } else {
      STD_TORCH_CHECK(!(degree < 0), "edge_weight must give no negative row sum under sym");
      scale[v] = degree == 0 ? 0 : 1 / std::sqrt(degree);
    }
  }
  if (op == "rw") return {std::move(scale), std::vector<double>(a.nodes, 1.0), 0.0};
  return {scale, scale, op == "sym+adj" ? 1.0 : 0.0};
}

template <class T, class I>
Hop<T, I> hop_of(const Adjacency<T, I>& a, const Scales& scales, int64_t width) {
  const bool scaled = !scales.left.empty();
  return {
      a.indptr,     a.indices, a.weight, scaled ? scales.left.data() : nullptr, scaled ? scales.right.data() : nullptr,
      scales.plain, width};
}

// Runs `graph(begin, end)` for the nodes of each graph, graphs in parallel.
template <class T, class I, class F>
void for_each_graph(const Adjacency<T, I>& a, const int64_t* ptr, int64_t graphs, int64_t cost, F graph) {
  const auto arcs_and_nodes = [&](int64_t g) { return static_cast<int64_t>(a.indptr[ptr[g]]) + ptr[g]; };
  parallel_items(graphs, cost, arcs_and_nodes, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) graph(ptr[g], ptr[g + 1]);
  });
}

// Whether graphs are small enough to be one piece of work each; a few large ones are split by rows, hop by hop.
inline bool fits_one_thread(int64_t cost, int64_t graphs) { return cost <= 16 * piece_cost * graphs; }

template <class T, class I, class F>
void for_each_row(const Adjacency<T, I>& a, int64_t cost, F rows) {
  parallel_items(a.nodes, cost, [&](int64_t v) { return static_cast<int64_t>(a.indptr[v]) + v; }, rows);
}

template <class T, class I>
void powers(const Adjacency<T, I>& a, const std::string& op, const int64_t* ptr, int64_t graphs, const T* x,
            int64_t width, int64_t hops, T* out) {
  const Scales scales = scales_of(a, op);
  const Hop<T, I> hop = hop_of(a, scales, width);
  const auto kernel = kernels<T, I>().hop;
  const int64_t plane = a.nodes * width, cost = (a.arcs + a.nodes) * width;
  const auto copy = [&](int64_t begin, int64_t end) {
    std::copy(x + begin * width, x + end * width, out + begin * width);
  };
  const auto step = [&](int64_t r, int64_t begin, int64_t end) {
    kernel(hop, out + (r - 1) * plane, nullptr, out + r * plane, begin, end);
  };
  if (ptr && fits_one_thread(cost, graphs)) {
    for_each_graph(a, ptr, graphs, cost * std::max<int64_t>(hops, 1), [&](int64_t begin, int64_t end) {
      copy(begin, end);
      for (int64_t r = 1; r <= hops; ++r) step(r, begin, end);
    });
    return;
  }
  for_each_row(a, a.nodes * width, copy);
  for (int64_t r = 1; r <= hops; ++r) for_each_row(a, cost, [&](int64_t begin, int64_t end) { step(r, begin, end); });
}

template <class T, class I>
struct Transposed {
  std::vector<I> indptr, indices;
  std::vector<T> weight;
};

// Counting sort by column; the entries of a row of the transpose keep the order of the rows they came from.
template <class T, class I>
Transposed<T, I> transpose(const Adjacency<T, I>& a) {
  Transposed<T, I> t{std::vector<I>(a.nodes + 1), std::vector<I>(a.arcs), std::vector<T>(a.weight ? a.arcs : 0)};
  for (int64_t e = 0; e < a.arcs; ++e) ++t.indptr[a.indices[e] + 1];
  for (int64_t v = 0; v < a.nodes; ++v) t.indptr[v + 1] += t.indptr[v];
  std::vector<I> next(t.indptr.begin(), t.indptr.end() - 1);
  for (int64_t v = 0; v < a.nodes; ++v)
    for (int64_t e = a.indptr[v]; e < a.indptr[v + 1]; ++e) {
      const I at = next[a.indices[e]]++;
      t.indices[at] = static_cast<I>(v);
      if (a.weight) t.weight[at] = a.weight[e];
    }
  return t;
}

// dx = sum_r (Ā^T)^r grad_r, by Horner's rule: t = grad_R; t = Ā^T t + grad_r for r = R-1 .. 0.
template <class T, class I>
void powers_backward(const Adjacency<T, I>& a, const std::string& op, const int64_t* ptr, int64_t graphs, const T* grad,
                     int64_t width, int64_t hops, ScalarType value, T* dx) {
  const int64_t plane = a.nodes * width, cost = (a.arcs + a.nodes) * width;
  if (hops == 0) {
    std::copy(grad, grad + plane, dx);
    return;
  }
  Scales scales = scales_of(a, op);
  std::swap(scales.left, scales.right);
  const Transposed<T, I> t = transpose(a);
  const Adjacency<T, I> back = {t.indptr.data(), t.indices.data(), a.weight ? t.weight.data() : nullptr, a.nodes,
                                a.arcs};
  const Hop<T, I> hop = hop_of(back, scales, width);
  const auto kernel = kernels<T, I>().hop;
  // Two buffers in turn, the last hop ending in dx.
  Tensor scratch = empty({hops > 1 ? plane : 0}, value);
  T* spare = scratch.mutable_data_ptr<T>();
  const auto target = [&](int64_t r) { return r % 2 == 0 ? dx : spare; };
  const auto step = [&](int64_t r, int64_t begin, int64_t end) {
    kernel(hop, r + 1 == hops ? grad + hops * plane : target(r + 1), grad + r * plane, target(r), begin, end);
  };
  if (ptr && fits_one_thread(cost, graphs)) {
    for_each_graph(back, ptr, graphs, cost * hops, [&](int64_t begin, int64_t end) {
      for (int64_t r = hops - 1; r >= 0; --r) step(r, begin, end);
    });
    return;
  }
  for (int64_t r = hops - 1; r >= 0; --r)
    for_each_row(back, cost, [&](int64_t begin, int64_t end) { step(r, begin, end); });
}

// Checks the arguments that both directions share, then calls f(adjacency, ptr, graphs).
template <class F>
void with_adjacency(const Tensor& indptr, const Tensor& indices, ScalarType value, int64_t nodes,
                    const OptionalTensor& ptr, const OptionalTensor& edge_weight, bool checked, F f) {
  dispatch(value, indptr.scalar_type(), [&](auto value_tag, auto index_tag) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    expect("indptr", indptr, {nodes + 1}, indptr.scalar_type());
    expect("indices", indices, {-1}, indptr.scalar_type());
    if (ptr) expect("ptr", *ptr, {-1}, ScalarType::Long);
    if (edge_weight) expect("edge_weight", *edge_weight, {indices.numel()}, value);
    const Adjacency<T, I> a = {indptr.const_data_ptr<I>(), indices.const_data_ptr<I>(), data<T>(edge_weight), nodes,
                               indices.numel()};
    const int64_t* offsets = data<int64_t>(ptr);
    const int64_t graphs = ptr ? ptr->numel() - 1 : 0;
    STD_TORCH_CHECK(!ptr || graphs >= 0, "ptr must have at least one entry");
    if (!checked) {
      const std::string problem = check_csr(a.indptr, a.indices, a.arcs, offsets, graphs, nodes);
      STD_TORCH_CHECK(problem.empty(), problem);
    }
    f(a, offsets, graphs);
  });
}

void power_features_out(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops, std::string op,
                        OptionalTensor ptr, OptionalTensor edge_weight, bool checked, Tensor out) {
  const ScalarType value = x.scalar_type();
  expect("x", x, {-1, -1}, value);
  STD_TORCH_CHECK(num_hops >= 0, "num_hops must not be negative");
  expect("out", out, {num_hops + 1, x.size(0), x.size(1)}, value);
  with_adjacency(indptr, indices, value, x.size(0), ptr, edge_weight, checked,
                 [&](const auto& a, const int64_t* offsets, int64_t graphs) {
                   using T = std::remove_const_t<std::remove_pointer_t<decltype(a.weight)>>;
                   powers(a, op, offsets, graphs, x.const_data_ptr<T>(), x.size(1), num_hops,
                          out.mutable_data_ptr<T>());
                 });
}

Tensor power_features(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops, std::string op,
                      OptionalTensor ptr, OptionalTensor edge_weight, bool checked) {
  expect("x", x, {-1, -1}, x.scalar_type());
  STD_TORCH_CHECK(num_hops >= 0, "num_hops must not be negative");
  Tensor out = empty({num_hops + 1, x.size(0), x.size(1)}, x.scalar_type());
  power_features_out(indptr, indices, x, num_hops, std::move(op), ptr, edge_weight, checked, out);
  return out;
}

Tensor power_features_backward(const Tensor& indptr, const Tensor& indices, const Tensor& grad, std::string op,
                               OptionalTensor ptr, OptionalTensor edge_weight, bool checked) {
  const ScalarType value = grad.scalar_type();
  expect("grad", grad, {-1, -1, -1}, value);
  STD_TORCH_CHECK(grad.size(0) >= 1, "grad must have at least one branch");
  Tensor dx = empty({grad.size(1), grad.size(2)}, value);
  with_adjacency(indptr, indices, value, grad.size(1), ptr, edge_weight, checked,
                 [&](const auto& a, const int64_t* offsets, int64_t graphs) {
                   using T = std::remove_const_t<std::remove_pointer_t<decltype(a.weight)>>;
                   powers_backward(a, op, offsets, graphs, grad.const_data_ptr<T>(), grad.size(2), grad.size(0) - 1,
                                   value, dx.mutable_data_ptr<T>());
                 });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) {
  m.impl("power_features", TORCH_BOX(&power_features));
  m.impl("power_features_out", TORCH_BOX(&power_features_out));
  m.impl("power_features_backward", TORCH_BOX(&power_features_backward));
}

}  // namespace spin_fast

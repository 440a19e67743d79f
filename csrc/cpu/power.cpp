// power_features and its gradient: from tensors to the kernels in power.inl and spmm.inl.

#include "power.h"

#include <atomic>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "transpose.h"

namespace spin_fast {
namespace {

// left and right of Ā[v, u] = A[v, u] * (left[v] * right[u] + plain), from node `first` on; both empty for `adj`.
struct Scales {
  std::vector<double> left, right;
  double plain;
  int64_t first;
};

// Runs `rows(begin, end)` over the rows of nodes [first, last), tasks in parallel.
template <class I, class F>
void for_each_row(const I* indptr, int64_t first, int64_t last, int64_t width, F rows) {
  const auto cost = [&](int64_t v) { return static_cast<int64_t>(indptr[first + v]) + v; };
  parallel_items(last - first, (cost(last - first) - cost(0)) * width, cost,
                 [&](int64_t begin, int64_t end) { rows(first + begin, first + end); });
}

// The scales of the nodes [first, last), the only ones that are read.
template <class T, class I>
Scales scales_of(const Adjacency<T, I>& a, Operator op, int64_t first, int64_t last) {
  if (op == Operator::adj) return {{}, {}, 1.0, first};
  std::vector<double> scale(last - first);
  const auto degree_of = [&](int64_t v) {
    if (!a.weight) return static_cast<double>(a.indptr[v + 1] - a.indptr[v]);
    double degree = 0;
    for (int64_t e = a.indptr[v]; e < a.indptr[v + 1]; ++e) degree += static_cast<double>(a.weight[e]);
    return degree;
  };
  std::atomic<bool> negative = false;
  for_each_row(a.indptr, first, last, 16, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      const double degree = degree_of(v);
      if (op != Operator::rw && degree < 0) negative = true;
      scale[v - first] = degree == 0 ? 0 : 1 / (op == Operator::rw ? degree : std::sqrt(degree));
    }
  });
  for (int64_t v = first; negative && v < last; ++v)
    require(degree_of(v) >= 0 || std::isnan(degree_of(v)), "edge_weight must give no negative row sum under ",
            op == Operator::sym ? "sym" : "sym+adj", ", got ", degree_of(v), " at node ", v);
  if (op == Operator::rw) return {std::move(scale), std::vector<double>(last - first, 1.0), 0.0, first};
  return {scale, scale, op == Operator::sym_adj ? 1.0 : 0.0, first};
}

template <class T, class I>
Hop<T, I> make_hop(const Adjacency<T, I>& a, const Scales& scales, int64_t width) {
  const bool scaled = !scales.left.empty();
  const double* left = scaled ? scales.left.data() - scales.first : nullptr;
  const double* right = scaled ? scales.right.data() - scales.first : nullptr;
  return {a.indptr, a.indices, a.weight, left, right, scales.plain, width, a.edges};
}

// Graphs with larger sources or more edges go hop by hop, their rows in parallel.
constexpr int64_t cache_bytes = 2 << 20, cache_edges = 256 << 10;
// Outputs larger than this are written past the caches, since they would evict everything else.
constexpr int64_t stream_bytes = 32 << 20;

// All powers of one large graph. Between hops values are not rounded: where T is stored in half precision, `planes`
// holds those of two hops.
template <class T, class I>
void powers_of_large(const Powers<T, I>& of, int64_t first, int64_t last) {
  using A = Compute<T>;
  const Hop<A, I>& hop = of.hop;
  const int64_t width = hop.width, plane = of.nodes * width, hops = of.hops;
  const T* const x = of.x;
  T* const out = of.out;
  const auto table = isa_kernels<PowerKernels<T, I>>();
  if (of.with_x)
    for_each_row(hop.indptr, first, last, width, [&](int64_t begin, int64_t end) {
      std::copy(x + begin * width, x + end * width, out + begin * width);
    });
  if constexpr (std::is_same_v<T, A>) {
    for (int64_t r = 1; r <= hops; ++r)
      for_each_row(hop.indptr, first, last, width, [&](int64_t begin, int64_t end) {
        table.hop(hop, r == 1 ? x : out + (r - 1) * plane, nullptr, out + r * plane, begin, end);
      });
  } else {
    const int64_t size = (last - first) * width;
    Tensor planes = empty({2, size}, ScalarType::Float);
    const auto of_hop = [&](int64_t r) { return planes.mutable_data_ptr<A>() + r % 2 * size - first * width; };
    for_each_row(hop.indptr, first, last, width, [&](int64_t begin, int64_t end) {
      table.widen(x + begin * width, of_hop(0) + begin * width, (end - begin) * width);
    });
    for (int64_t r = 1; r <= hops; ++r)
      for_each_row(hop.indptr, first, last, width, [&](int64_t begin, int64_t end) {
        table.hop(hop, of_hop(r - 1), nullptr, of_hop(r), begin, end);
        table.narrow(of_hop(r) + begin * width, out + r * plane + begin * width, (end - begin) * width);
      });
  }
}

// Nodes [first, last), all or those of a range of graphs; `out` has a row for each, its plane 0 not written unless
// `with_x`. `check`, of graphs: false where an index is outside its graph, which is not followed. `full_width`: of
// the whole rows, of which x may have some columns; sums are rounded as theirs.
template <class T, class I>
bool powers(const Adjacency<Compute<T>, I>& a, Operator op, const int64_t* ptr, int64_t graphs, int64_t first,
            int64_t last, const T* x, int64_t width, int64_t full_width, int64_t hops, bool float64_sums, bool with_x,
            bool check, T* out) {
  if (hops == 0 || width == 0 || first == last) {
    if (with_x) std::copy(x + first * width, x + last * width, out);
    return true;
  }
  out -= first * width;  // so that row v is that of node v
  const int64_t stride = full_width > 8 ? full_width : 2 * full_width;
  const int64_t sum_bytes = float64_sums ? sizeof(double) : sizeof(Compute<T>);
  const auto nodes_of = [&](int64_t g) { return ptr[g + 1] - ptr[g]; };
  const auto edges_of = [&](int64_t g) { return static_cast<int64_t>(a.indptr[ptr[g + 1]] - a.indptr[ptr[g]]); };
  // By the graph alone, since hops of large ones are rounded in another way.
  const auto is_large = [&](int64_t g) {
    const int64_t nodes = nodes_of(g), edges = edges_of(g);
    if (full_width == 1 && nodes <= dense_nodes && edges <= nodes * nodes) return false;
    return 2 * nodes * stride * sum_bytes > cache_bytes || edges > cache_edges;
  };
  const bool by_edge = a.weight || op == Operator::sym_adj;
  bool any_large = !ptr;
  for (int64_t g = 0; g < graphs && !any_large; ++g) any_large = is_large(g);
  const Scales scales = any_large || by_edge ? scales_of(a, op, first, last) : Scales{};
  const bool stream = (hops + 1) * (last - first) * width * static_cast<int64_t>(sizeof(T)) > stream_bytes;
  const Powers<T, I> task = {
      make_hop(a, scales, width), op, by_edge, last - first, hops, x, out, full_width, with_x, stream, check};
  if (!ptr) {
    powers_of_large(task, first, last);
    return true;
  }
  const auto table = isa_kernels<PowerKernels<T, I>>();
  const auto kernel = float64_sums ? table.float64_powers : table.powers;
  std::atomic<bool> inside = true;
  for (int64_t g = 0, end = 0; g < graphs && inside; g = end) {
    if (is_large(g)) {
      if (check && !is_within(a.indices, a.indptr[ptr[g]], a.indptr[ptr[g + 1]], ptr[g], ptr[g + 1])) return false;
      powers_of_large(task, ptr[g], ptr[g + 1]);
      end = g + 1;
      continue;
    }
    int64_t nodes = power_chunk_bytes / (2 * width * sum_bytes), edges = power_chunk_edges;
    for (end = g; end < graphs && !is_large(end); ++end) {
      nodes = std::max(nodes, nodes_of(end));
      edges = std::max(edges, edges_of(end));
    }
    const auto cost = [&](int64_t i) { return static_cast<int64_t>(a.indptr[ptr[g + i]]) + ptr[g + i]; };
    // What is in cache takes a quarter of the time.
    parallel_items(end - g, (cost(end - g) - cost(0)) * width * hops / 4, cost, [&](int64_t from, int64_t to) {
      if (!kernel(task, ptr + g + from, to - from, thread_scratch(scratch_bytes(nodes, edges, width)))) inside = false;
    });
  }
  return inside;
}

// dx = sum_r (Ā^T)^r grad_r, by Horner's rule: t = grad_R; t = Ā^T t + grad_r for r = R-1 .. 0.
template <class T, class I>
void powers_backward(const Adjacency<T, I>& a, Operator op, const int64_t* ptr, int64_t graphs, const T* grad,
                     int64_t width, int64_t hops, ScalarType value, T* dx) {
  const int64_t plane = a.nodes * width, cost = (a.edges + a.nodes) * width;
  if (hops == 0) {
    std::copy(grad, grad + plane, dx);
    return;
  }
  Scales scales = scales_of(a, op, 0, a.nodes);
  std::swap(scales.left, scales.right);
  const TransposedAdjacency<T, I> t = transpose(a);
  const Adjacency<T, I> back = {t.indptr.data(), t.indices.data(), a.weight ? t.weight.data() : nullptr, a.nodes,
                                a.edges};
  const Hop<T, I> hop = make_hop(back, scales, width);
  const auto kernel = isa_kernels<PowerKernels<T, I>>().hop;
  // Two buffers in turn, the last hop ending in dx.
  Tensor scratch = empty({hops > 1 ? plane : 0}, value);
  T* spare = scratch.mutable_data_ptr<T>();
  const auto target = [&](int64_t r) { return r % 2 == 0 ? dx : spare; };
  const auto step = [&](int64_t r, int64_t begin, int64_t end) {
    kernel(hop, r + 1 == hops ? grad + hops * plane : target(r + 1), grad + r * plane, target(r), begin, end);
  };
  int64_t largest = ptr ? 0 : a.edges + a.nodes;
  for (int64_t g = 0; g < graphs; ++g)
    largest = std::max<int64_t>(largest, back.indptr[ptr[g + 1]] - back.indptr[ptr[g]] + ptr[g + 1] - ptr[g]);
  if (ptr && largest * width <= std::max(16 * task_cost, cost / 8)) {  // each graph is one thread's
    const auto edges_and_nodes = [&](int64_t g) { return static_cast<int64_t>(back.indptr[ptr[g]]) + ptr[g]; };
    parallel_items(graphs, cost * hops, edges_and_nodes, [&](int64_t first, int64_t last) {
      for (int64_t g = first; g < last; ++g)
        for (int64_t r = hops - 1; r >= 0; --r) step(r, ptr[g], ptr[g + 1]);
    });
    return;
  }
  for (int64_t r = hops - 1; r >= 0; --r)
    for_each_row(back.indptr, 0, a.nodes, width, [&](int64_t begin, int64_t end) { step(r, begin, end); });
}

// Checks the arguments that both directions share, but for the contents of `indices`, then calls
// f(adjacency, operator, ptr, graphs, Tag<T>).
template <class F>
void with_adjacency(const Tensor& indptr, const Tensor& indices, ScalarType value, int64_t nodes,
                    const OptionalTensor& ptr, const OptionalTensor& edge_weight, const std::string& operator_name,
                    bool check_invariants, F f) {
  const Operator op = parse_operator(operator_name);
  check_adjacency(indptr, indices, value, nodes, ptr, edge_weight);
  dispatch_storage(value, [&]<class T>(Tag<T> tag) {
    dispatch_index(indptr.scalar_type(), [&]<class I>(Tag<I>) {
      using A = Compute<T>;
      const Adjacency<A, I> a = {indptr.const_data_ptr<I>(), indices.const_data_ptr<I>(), data<A>(edge_weight), nodes,
                                 indices.numel()};
      const int64_t* offsets = data<int64_t>(ptr);
      const int64_t graphs = ptr ? ptr->numel() - 1 : 0;
      if (check_invariants) refuse_if(check_csr_offsets(a.indptr, a.edges, offsets, graphs, nodes));
      f(a, op, offsets, graphs, tag);
    });
  });
}

template <class T, class I>
void refuse_wrong_indices(const Adjacency<T, I>& a, const int64_t* ptr, int64_t graphs) {
  refuse_if(check_csr_indices(a.indptr, a.indices, a.edges, ptr, graphs, a.nodes));
}

void power_features_out(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops,
                        std::string operator_name, OptionalTensor ptr, OptionalTensor edge_weight,
                        bool check_invariants, bool float64_sums, Tensor out) {
  const ScalarType value = expect("x", x, {any, any}, stored_types);
  check_num_hops(num_hops);
  with_adjacency(indptr, indices, value, x.size(0), ptr, edge_weight, operator_name, check_invariants,
                 [&]<class T>(const auto& a, Operator op, const int64_t* offsets, int64_t graphs, Tag<T>) {
                   const int64_t first = offsets ? offsets[0] : 0, last = offsets ? offsets[graphs] : a.nodes;
                   require(0 <= first && first <= last && last <= a.nodes, "ptr must be ascending from 0 to ", a.nodes,
                           " nodes at most, got ", first, " to ", last);
                   expect("out", out, {num_hops + 1, last - first, x.size(1)}, {value});
                   expect_apart(out, x, indptr, indices, ptr, edge_weight);
                   const bool check_graphs = check_invariants && offsets && num_hops > 0 && x.size(1) > 0;
                   if (check_invariants && !check_graphs) refuse_wrong_indices(a, offsets, graphs);
                   if (!powers(a, op, offsets, graphs, first, last, static_cast<const T*>(x.data_ptr()), x.size(1),
                               x.size(1), num_hops, float64_sums, true, check_graphs, static_cast<T*>(out.data_ptr())))
                     refuse_wrong_indices(a, offsets, graphs);
                 });
}

Tensor power_features(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops,
                      std::string operator_name, OptionalTensor ptr, OptionalTensor edge_weight, bool check_invariants,
                      bool float64_sums) {
  const ScalarType value = expect("x", x, {any, any}, stored_types);
  check_num_hops(num_hops);
  Tensor out = empty({num_hops + 1, x.size(0), x.size(1)}, value);
  power_features_out(indptr, indices, x, num_hops, std::move(operator_name), ptr, edge_weight, check_invariants,
                     float64_sums, out);
  return out;
}

Tensor power_features_backward(const Tensor& indptr, const Tensor& indices, const Tensor& grad,
                               std::string operator_name, OptionalTensor ptr, OptionalTensor edge_weight,
                               bool check_invariants) {
  const ScalarType value = check_powers_gradient(grad);
  Tensor dx = empty({grad.size(1), grad.size(2)}, value);
  with_adjacency(indptr, indices, value, grad.size(1), ptr, edge_weight, operator_name, check_invariants,
                 [&]<class T>(const auto& a, Operator op, const int64_t* offsets, int64_t graphs, Tag<T>) {
                   if (check_invariants) refuse_wrong_indices(a, offsets, graphs);
                   if constexpr (sizeof(T) > 2)
                     powers_backward(a, op, offsets, graphs, grad.const_data_ptr<T>(), grad.size(2), grad.size(0) - 1,
                                     value, dx.mutable_data_ptr<T>());
                 });
  return dx;
}

}  // namespace

void write_hops(const GraphRange& graphs, const std::vector<Operator>& operators, int64_t hops, int64_t width,
                int64_t full_width, ScalarType value, void* out) {
  const int64_t first = graphs.ptr[0], last = graphs.ptr[graphs.graphs];
  dispatch_storage(value, [&]<class T>(Tag<T>) {
    dispatch_index(graphs.wide_index ? ScalarType::Long : ScalarType::Int, [&]<class I>(Tag<I>) {
      const Adjacency<Compute<T>, I> a = {static_cast<const I*>(graphs.indptr), static_cast<const I*>(graphs.indices),
                                          nullptr, last, graphs.edges};
      T* before = static_cast<T*>(out) - (last - first) * width;  // where x would be
      for (const Operator op : operators) {
        powers(a, op, graphs.ptr, graphs.graphs, first, last, static_cast<const T*>(graphs.x), width, full_width, hops,
               false, false, false, before);
        before += hops * (last - first) * width;
      }
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) {
  m.impl("power_features", TORCH_BOX(&power_features));
  m.impl("power_features_out", TORCH_BOX(&power_features_out));
  m.impl("power_features_backward", TORCH_BOX(&power_features_backward));
}

}  // namespace spin_fast

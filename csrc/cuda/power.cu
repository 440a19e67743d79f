// power_features and its gradient on CUDA: from tensors to the kernels in power_graphs.h and spmm.h.
//
// Each graph of a batch is taken by one block, in shared memory; graphs that do not fit, a single big graph, and
// gradients go hop by hop. The host knows only totals: it chooses the shared memory for the average graph, and omits
// launches that no graph can need. The device assigns each graph to a launch (Levels::first_fitting).

#include <string>
#include <type_traits>

#include "../arguments.h"
#include "ops.h"
#include "power_graphs.h"
#include "spmm.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;

// Calls f(constant K): columns of a thread.
template <class F>
void dispatch_columns(int64_t width, F f) {
  if (width == 1) return f(std::integral_constant<int, 1>{});
  f(std::integral_constant<int, 4>{});
}

// The number of rows that a block takes at once.
int64_t rows_at_once(int64_t width) {
  int units = 0;
  dispatch_columns(width, [&](auto k) { units = units_of<k>(width); });
  return std::max<int64_t>(threads / units, 1);
}

Rows all_rows(int64_t nodes, int64_t each) { return {nullptr, nullptr, nodes, each, (nodes + each - 1) / each}; }

// The launches of one hop: the rows that it takes, and the heavy ones among them.
class HopByHop {
 public:
  // Unless `scale` is null, it gets the scales of the rows by `weight`, null for ones.
  template <class V>
  HopByHop(const Device& device, const Csr& csr, int64_t edges, const Rows& rows, int64_t width, Operator op,
           double* scale, const V* weight)
      : device_(device),
        csr_(csr),
        rows_(rows),
        one_column_rows_(rows.ranges ? rows : all_rows(rows.nodes, threads)),
        most_pieces_(edges / (light_edges + 1) + edges / piece_edges),
        most_long_rows_(edges / piece_edges),
        pieces_(device, most_pieces_),
        long_rows_(device, most_long_rows_),
        partial_(device, 2 * most_long_rows_ * width),
        counts_(device, 3),
        heavy_{pieces_, long_rows_, partial_, counts_} {
    device.zero<Count>(counts_, 3);
    if ((scale && !weight) || most_pieces_ > 0)
      device.launch(&cut_kernel, grid(rows_.most), threads, 0, csr_, one_column_rows_, op, weight ? nullptr : scale,
                    heavy_);
    if (scale && weight) run(Degrees<V>{weight, op, scale});
  }

  template <class Task>
  void run(const Task& task) const {
    dispatch_columns(task.width, [&](auto most) {
      constexpr int k = std::min<int>(most, Task::most_columns);
      const Rows& rows = Task::most_columns == 1 ? one_column_rows_ : rows_;
      const int units = units_of<k>(task.width);
      const Team team(task.width, units);
      const int64_t tiles = (units + team.column_lanes() - 1) / team.column_lanes(), teams = threads / team.lanes();
      const auto kernel = k > 1 && task.aligned() ? &hop_kernel<k, (k > 1), Task> : &hop_kernel<k, false, Task>;
      device_.launch(kernel, grid(rows_.most + most_pieces_ * tiles / teams), threads, 0, task, csr_, rows, heavy_);
    });
    if (most_long_rows_ > 0)
      device_.launch(&long_rows_kernel<Task>, grid(most_long_rows_ * task.width / threads), threads, 0, task, heavy_);
  }

  // Copies x to out and, in half precision, to the plane that the first hop reads.
  template <class S>
  void copy(const int64_t* first, int64_t width, const S* x, Compute<S>* plane, S* out) const {
    device_.launch(&copy_kernel<S>, grid(rows_.most), threads, 0, rows_, first, width, x, plane, out);
  }

 private:
  // Blocks loop over ranges: more blocks would only wait.
  dim3 grid(int64_t most) const {
    return dim3(static_cast<unsigned>(std::clamp<int64_t>(most, 1, 32 * device_.multiprocessors())));
  }

  const Device& device_;
  Csr csr_;
  Rows rows_, one_column_rows_;  // with one column, a block takes more rows at once
  int64_t most_pieces_, most_long_rows_;
  Buffer<HeavyPiece> pieces_;
  Buffer<LongRow> long_rows_;
  Buffer<double> partial_;
  Buffer<Count> counts_;
  Heavy heavy_;
};

template <class S>
void set_scales(Gather<S>& hop, Operator op, const double* scale) {
  hop.left = scale;
  hop.right = op == Operator::sym || op == Operator::sym_adj ? scale : nullptr;
  hop.mixed = op == Operator::sym_adj;
}

// out: [R + 1, out_rows, d].
template <class S>
void powers_hop_by_hop(const Device& device, const Adjacency& a, const Rows& rows, const S* x, int64_t width,
                       int64_t hops, int64_t out_rows, S* out) {
  using V = Compute<S>;
  constexpr bool half = sizeof(S) == 2;
  const int64_t plane = out_rows * width;
  const Buffer<double> scale(device, a.op == Operator::adj ? 0 : a.nodes);
  const Buffer<V> planes(device, half ? 2 * plane : 0);  // what hops read in half precision
  const auto values = [&](int64_t r) {
    if constexpr (half)
      return planes + r % 2 * plane;
    else
      return out + r * plane;
  };
  const V* weight = static_cast<const V*>(a.weight);
  const HopByHop work(device, a.csr, a.edges, rows, width, a.op, scale, weight);
  work.copy(a.ptr, width, x, values(0), out);
  Gather<S> hop = {a.csr, weight};
  set_scales(hop, a.op, scale);
  hop.width = static_cast<int>(width);
  hop.first = a.ptr;
  for (int64_t r = 1; r <= hops; ++r) {
    hop.in = values(r - 1);
    hop.out = values(r);
    hop.stored = out + r * plane;
    work.run(hop);
  }
}

// For an average graph of so many nodes and edges.
Levels levels_of(const Device& device, const Footprint& footprint, int64_t nodes, int64_t edges) {
  // With `some`, two blocks are resident on a multiprocessor, as many as have registers for 512 threads each.
  const int64_t few = 8 << 10, some = device.most_shared_bytes(2);
  const auto most = static_cast<int>(device.most_shared_bytes());
  int64_t first = std::clamp(footprint.bytes(3 * nodes, 3 * edges, footprint.units), few, some);  // most graphs fit
  first = std::max(first, footprint.bytes(nodes + nodes / 2, edges + edges / 2, footprint.fewest_units()));
  if (first >= most) return {footprint, 1, {most}};
  if (first > some / 2) return {footprint, 2, {static_cast<int>(first), most}};
  return {footprint, 3, {static_cast<int>(first), static_cast<int>(some), most}};
}

template <int K, class S, class A>
void powers_of_graphs(const Device& device, const Graphs<S>& task) {
  const Adjacency& a = task.a;
  const bool scaled = a.op != Operator::adj;
  const Footprint footprint = {K, units_of<K>(task.width), sizeof(A), scaled};
  const int64_t nodes = (task.rows + a.graphs - 1) / a.graphs;  // of the average graph
  const auto edges = static_cast<int64_t>(static_cast<double>(nodes) / a.nodes * a.edges);
  const Levels levels = levels_of(device, footprint, nodes, edges);
  const int highest = levels.first_fitting(task.rows, a.edges);  // of a graph that has all nodes and edges

  // The footprint of a graph that fits no level exceeds most_bytes.
  const int64_t most_bytes = levels.bytes[levels.count - 1], each = rows_at_once(task.width);
  const int64_t most_large = std::min(
      a.graphs, footprint.bytes(task.rows, a.edges, footprint.fewest_units()) / std::max<int64_t>(most_bytes - 4, 1));
  const int64_t most_ranges = highest == levels.count ? task.rows / each + most_large : 0;
  const Buffer<int64_t> lists(device, highest > 0 ? (levels.count - 1) * a.graphs : 0);
  const Buffer<RowRange> ranges(device, most_ranges);
  const Buffer<Count> counts(device, levels.count);
  if (highest > 0) {
    device.zero<Count>(counts, levels.count);
    device.launch(&list_kernel, blocks_for("ptr", a.graphs, threads), threads, 0, a.csr, a.ptr, a.graphs, levels, each,
                  lists, ranges, counts);
  }
  for (int level = 0; level < levels.count && level <= highest; ++level) {
    int64_t most = 1024;
    dim3 grid = blocks_for("ptr", a.graphs, 1);
    if (level == 0) {
      const int64_t units = std::max(footprint.units_in(levels.bytes[0], nodes, edges), 1);
      const int64_t work = std::max(nodes * units, edges / 8) / 2;
      most = std::clamp<int64_t>((work + warp_size - 1) / warp_size * warp_size, 64, 512);
    } else {
      const int64_t held = device.resident_blocks(&graph_kernel<K, S, A>, most, levels.bytes[level]);
      grid.x = static_cast<unsigned>(std::min<int64_t>(grid.x, held));
    }
    const int64_t* list = level == 0 ? nullptr : lists + (level - 1) * a.graphs;
    const Count* count = level == 0 ? nullptr : counts + level - 1;
    device.launch(&graph_kernel<K, S, A>, grid, most, levels.bytes[level], task, levels, level, list, count);
  }
  if (highest < levels.count) return;
  const Rows rows = {ranges, counts + levels.count - 1, 0, each, most_ranges};
  powers_hop_by_hop(device, a, rows, task.x, task.width, task.hops, task.rows, task.out);
}

// Checks the arguments that both directions share.
Adjacency adjacency_of(const Tensor& indptr, const Tensor& indices, ScalarType value, int64_t nodes, int64_t width,
                       const OptionalTensor& ptr, const OptionalTensor& edge_weight, const std::string& op) {
  check_adjacency(indptr, indices, value, nodes, ptr, edge_weight);
  constexpr int64_t most = INT32_MAX - 4;
  require(width <= most, "x must have at most ", most, " features, got ", width);
  Adjacency a = {{integers_of(indptr), integers_of(indices)}, edge_weight ? edge_weight->const_data_ptr() : nullptr};
  a.op = parse_operator(op);
  a.nodes = nodes;
  a.edges = indices.numel();
  a.ptr = data<int64_t>(ptr);
  a.graphs = ptr ? ptr->numel() - 1 : 0;
  return a;
}

// If ptr is part of the offsets of a larger batch, out has a row for each of its nodes.
void power_features_out(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops, std::string op,
                        OptionalTensor ptr, OptionalTensor edge_weight, bool check_invariants, bool float64_sums,
                        Tensor out) {
  const ScalarType value = expect("x", x, {any, any}, stored_types);
  check_num_hops(num_hops);
  const int64_t nodes = x.size(0), width = x.size(1);
  expect("out", out, {num_hops + 1, ptr ? any : Size(nodes), width}, {value});
  const Adjacency a = adjacency_of(indptr, indices, value, nodes, width, ptr, edge_weight, op);
  expect_apart(out, x, indptr, indices, ptr, edge_weight);
  const int64_t rows = out.size(1);
  require(rows <= nodes, "out must have at most ", nodes, " rows (nodes), got ", rows);
  if (rows == 0 || width == 0 || (ptr && a.graphs == 0)) return;
  const Device device(
      x, {{"indptr", indptr}, {"indices", indices}, {"ptr", ptr}, {"edge_weight", edge_weight}, {"out", out}});
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    using V = Compute<S>;
    S* const to = static_cast<S*>(out.mutable_data_ptr());
    if (!ptr)
      return powers_hop_by_hop(device, a, all_rows(nodes, rows_at_once(width)), stored<S>(x), width, num_hops, rows,
                               to);
    const Graphs<S> task = {a, static_cast<int>(width), num_hops, rows, stored<S>(x), to};
    dispatch_columns(width, [&](auto k) {
      if (float64_sums)
        powers_of_graphs<k, S, double>(device, task);
      else
        powers_of_graphs<k, S, V>(device, task);
    });
  });
}

Tensor power_features(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops, std::string op,
                      OptionalTensor ptr, OptionalTensor edge_weight, bool check_invariants, bool float64_sums) {
  const ScalarType value = expect("x", x, {any, any}, stored_types);
  check_num_hops(num_hops);
  Tensor out = Device(x, {}).empty({num_hops + 1, x.size(0), x.size(1)}, value);
  power_features_out(indptr, indices, x, num_hops, std::move(op), ptr, edge_weight, check_invariants, float64_sums,
                     out);
  return out;
}

// ---- The gradient

// One thread per edge of the transpose: the row and the weight of the original edge. `weight` may be null.
template <class V, class I>
__global__ void __launch_bounds__(256)
    edges_kernel(Csr csr, int64_t nodes, int64_t edges, Integers entries, const V* weight, I* neighbours, V* weights) {
  const int64_t i = thread_index();
  if (i >= edges) return;
  const int64_t e = entries[i];
  const Integers& of = csr.indptr;
  const int64_t row = of.wide ? find_range(of.wide, nodes, e) : find_range(of.narrow, nodes, e);
  neighbours[i] = static_cast<I>(row);
  if (weight) weights[i] = weight[e];
}

// dx = sum_r (Ā^T)^r grad_r, by Horner's rule: t = grad_R; t = Ā^T t + grad_r for r = R-1 .. 0.
template <class V>
void powers_backward(const Device& device, const Adjacency& a, const Tensor& indices, const V* grad, int64_t width,
                     int64_t hops, V* dx) {
  const int64_t plane = a.nodes * width;
  if (hops == 0) {
    check(cudaMemcpyAsync(dx, grad, plane * sizeof(V), cudaMemcpyDeviceToDevice, device.stream()));
    return;
  }
  const Rows rows = all_rows(a.nodes, rows_at_once(width));
  const Buffer<double> scale(device, a.op == Operator::adj ? 0 : a.nodes);
  const V* weight = static_cast<const V*>(a.weight);
  if (scale) HopByHop(device, a.csr, a.edges, rows, 1, a.op, scale, weight);
  const Transposed back = transposed(device, indices.scalar_type(), indices.const_data_ptr(), a.edges, a.nodes);
  Tensor sources = device.empty({a.edges}, index_type_for(a.nodes));
  const Buffer<V> weights(device, a.weight ? a.edges : 0);
  dispatch_index(sources.scalar_type(), [&]<class I>(Tag<I>) {
    device.launch(&edges_kernel<V, I>, blocks_for("indices", a.edges, threads), threads, 0, a.csr, a.nodes, a.edges,
                  integers_of(back.entries), weight, sources.mutable_data_ptr<I>(), weights);
  });
  const Csr csr = {integers_of(back.offsets), integers_of(sources)};

  const HopByHop work(device, csr, a.edges, rows, width, a.op, nullptr, weight);
  Gather<V> hop = {csr, weights};
  set_scales(hop, a.op, scale);
  std::swap(hop.left, hop.right);
  hop.width = static_cast<int>(width);
  // The hops alternate between two buffers and end in dx.
  const Buffer<V> spare(device, hops > 1 ? plane : 0);
  const auto target = [&](int64_t r) { return r % 2 == 0 ? dx : static_cast<V*>(spare); };
  for (int64_t r = hops - 1; r >= 0; --r) {
    hop.in = r + 1 == hops ? grad + hops * plane : target(r + 1);
    hop.add = grad + r * plane;
    hop.out = target(r);
    work.run(hop);
  }
}

Tensor power_features_backward(const Tensor& indptr, const Tensor& indices, const Tensor& grad, std::string op,
                               OptionalTensor ptr, OptionalTensor edge_weight, bool check_invariants) {
  const ScalarType value = check_powers_gradient(grad);
  const int64_t hops = grad.size(0) - 1, nodes = grad.size(1), width = grad.size(2);
  const Adjacency a = adjacency_of(indptr, indices, value, nodes, width, ptr, edge_weight, op);
  const Device device(grad, {{"indptr", indptr}, {"indices", indices}, {"ptr", ptr}, {"edge_weight", edge_weight}});
  Tensor dx = device.empty({nodes, width}, value);
  if (dx.numel() == 0) return dx;
  const auto backward = [&]<class V>(Tag<V>) {
    powers_backward(device, a, indices, grad.const_data_ptr<V>(), width, hops, dx.mutable_data_ptr<V>());
  };
  value == ScalarType::Float ? backward(Tag<float>{}) : backward(Tag<double>{});
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) {
  m.impl("power_features", TORCH_BOX(&power_features));
  m.impl("power_features_out", TORCH_BOX(&power_features_out));
  m.impl("power_features_backward", TORCH_BOX(&power_features_backward));
}

}  // namespace spin_fast

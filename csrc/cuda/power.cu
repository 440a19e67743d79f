// power_features and its gradient on CUDA: from tensors to the kernels in power_graphs.h and spmm.h.
//
// Graphs of a batch are one block's each, in shared memory; those that do not fit, one big graph, and gradients go hop
// by hop. The host knows the totals only: it chooses the shared memory by the average graph, and which launches no
// graph can need. Which of the others takes a graph, Levels::of says on the device.

#include <string>
#include <type_traits>

#include "../arguments.h"
#include "spmm.h"
#include "ops.h"
#include "power_graphs.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t threads = 256;

struct Adjacency {
  Csr csr;
  ScalarType index;
  const void* weight;  // or null
  Operator op;
  int64_t nodes, edges;
  const int64_t* ptr;  // or null
  int64_t graphs;
};

// Calls f(constant K): columns of a thread.
template <class F>
void dispatch_columns(int64_t width, F f) {
  if (width == 1) return f(std::integral_constant<int, 1>{});
  f(std::integral_constant<int, 4>{});
}

// Rows that a block of threads takes at once.
int64_t rows_at_once(int64_t width) {
  int units = 0;
  dispatch_columns(width, [&](auto k) { units = units_of<k>(width); });
  return std::max<int64_t>(threads / units, 1);
}

template <class T>
T* pointer(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// The rows that are taken hop by hop, at most `blocks` times rows.each, and what is listed of them.
class HopByHop {
 public:
  // Where there are no weights, the degrees give the scales; scale may be null.
  HopByHop(const Device& device, const Csr& csr, int64_t edges, const Rows& rows, int64_t blocks, int64_t width,
           Operator op, double* scale)
      : device_(device),
        csr_(csr),
        rows_(rows),
        narrow_(rows.runs ? rows : Rows{nullptr, nullptr, rows.nodes, threads}),
        blocks_(blocks),
        most_pieces_(edges / (light_edges + 1) + edges / piece_edges),
        most_long_rows_(edges / piece_edges),
        pieces_(device.bytes_for<HeavyPiece>(most_pieces_)),
        long_rows_(device.bytes_for<LongRow>(most_long_rows_)),
        partial_(device.bytes_for<double>(2 * most_long_rows_ * width)),
        counts_(device.bytes_for<Count>(3)),
        heavy_{pointer<HeavyPiece>(pieces_), pointer<LongRow>(long_rows_), pointer<double>(partial_),
               pointer<Count>(counts_)} {
    device.zero(counts_);
    if (scale || most_pieces_ > 0)
      device.launch(&cut_kernel, grid(blocks_), threads, 0, csr_, narrow_, op, scale, heavy_);
  }

  template <class Task>
  void run(const Task& task) const {
    dispatch_columns(task.width, [&](auto most) {
      constexpr int k = std::min<int>(most, Task::most_columns);
      const Rows& rows = Task::most_columns == 1 ? narrow_ : rows_;
      const int units = units_of<k>(task.width);
      const Team team(task.width, units);
      const int64_t shares = (units + team.side() - 1) / team.side(), teams = threads / team.lanes();
      const auto kernel = k > 1 && task.aligned() ? &hop_kernel<k, (k > 1), Task> : &hop_kernel<k, false, Task>;
      device_.launch(kernel, grid(blocks_ + most_pieces_ * shares / teams), threads, 0, task, csr_, rows, heavy_);
    });
    if (most_long_rows_ > 0)
      device_.launch(&long_rows_kernel<Task>, grid(most_long_rows_ * task.width / threads), threads, 0, task, heavy_);
  }

  // x itself, to out and, of half precision, to the plane that the first hop reads.
  template <class S>
  void copy(const int64_t* first, int64_t width, const S* x, Compute<S>* plane, S* out) const {
    device_.launch(&first_kernel<S>, grid(blocks_), threads, 0, rows_, first, width, x, plane, out);
  }

 private:
  // Blocks loop: more than these would only wait.
  dim3 grid(int64_t most) const {
    return dim3(static_cast<unsigned>(std::clamp<int64_t>(most, 1, 32 * device_.multiprocessors())));
  }

  const Device& device_;
  Csr csr_;
  Rows rows_, narrow_;  // what is one thread's per row takes more rows at once
  int64_t blocks_, most_pieces_, most_long_rows_;
  Tensor pieces_, long_rows_, partial_, counts_;
  Heavy heavy_;
};

// The scales of the rows that `rows` has.
template <class V>
void weighted_scales(const HopByHop& rows, const Adjacency& a, double* scale) {
  if (a.weight && a.op != Operator::plain) rows.run(Degrees<V>{static_cast<const V*>(a.weight), a.op, scale});
}

template <class S>
void set_scales(Gather<S>& hop, Operator op, const double* scale) {
  hop.left = op == Operator::plain ? nullptr : scale;
  hop.right = op == Operator::symmetric || op == Operator::mixed ? scale : nullptr;
  hop.mixed = op == Operator::mixed;
}

// out: [R + 1, out_rows, d].
template <class S>
void powers_hop_by_hop(const Device& device, const Adjacency& a, const Rows& rows, int64_t blocks, const S* x,
                       int64_t width, int64_t hops, int64_t out_rows, S* out) {
  using V = Compute<S>;
  constexpr bool half = sizeof(S) == 2;
  const int64_t plane = out_rows * width;
  const bool scaled = a.op != Operator::plain;
  Tensor scales = device.empty({scaled ? a.nodes : 0}, ScalarType::Double);
  double* const scale = scaled ? scales.mutable_data_ptr<double>() : nullptr;
  Tensor planes = device.empty({2, half ? plane : 0}, ScalarType::Float);  // what hops read, of half precision
  const auto values = [&](int64_t r) {
    if constexpr (half)
      return planes.mutable_data_ptr<float>() + r % 2 * plane;
    else
      return out + r * plane;
  };
  const HopByHop work(device, a.csr, a.edges, rows, blocks, width, a.op, a.weight ? nullptr : scale);
  weighted_scales<V>(work, a, scale);
  work.copy(a.ptr, width, x, values(0), out);
  Gather<S> hop = {a.csr, static_cast<const V*>(a.weight)};
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

Levels levels_of(const Device& device, const Fit& fit, int64_t nodes, int64_t edges) {
  // Of the latter, two blocks fit on a multiprocessor, as many as have registers for 512 threads each.
  const int64_t few = 8 << 10, some = device.most_shared_bytes(2);
  const auto most = static_cast<int>(device.most_shared_bytes());
  int64_t first = std::clamp(fit.bytes(3 * nodes, 3 * edges, fit.units), few, some);  // room for most graphs
  first = std::max(first, fit.bytes(nodes + nodes / 2, edges + edges / 2, fit.fewest_units()));
  if (first >= most) return {fit, 1, {most}};
  if (first > some / 2) return {fit, 2, {static_cast<int>(first), most}};
  return {fit, 3, {static_cast<int>(first), static_cast<int>(some), most}};
}

template <int K, class S, class A>
void powers_of_graphs(const Device& device, const Adjacency& a, const Graphs<S>& task) {
  const bool scaled = a.op != Operator::plain;
  const Fit fit = {K, units_of<K>(task.width), sizeof(A), scaled};
  const int64_t nodes = (task.rows + a.graphs - 1) / a.graphs;  // of the average graph
  const auto edges = static_cast<int64_t>(static_cast<double>(nodes) / a.nodes * a.edges);
  const Levels levels = levels_of(device, fit, nodes, edges);
  const int needed = levels.of(task.rows, a.edges);  // by a graph that has all nodes and edges: by none is more

  // A graph that fits nowhere has more nodes, at this many bytes each, and edges than most_bytes.
  const int64_t most_bytes = levels.bytes[levels.count - 1], each = rows_at_once(task.width);
  const int64_t most_large =
      std::min(a.graphs, fit.bytes(task.rows, a.edges, fit.fewest_units()) / std::max<int64_t>(most_bytes - 4, 1));
  const int64_t blocks = needed == levels.count ? task.rows / each + most_large : 0;
  Tensor lists = device.empty({needed > 0 ? levels.count - 1 : 0, a.graphs}, ScalarType::Long);
  Tensor runs = device.bytes_for<Run>(blocks), counts = device.bytes_for<Count>(levels.count);
  if (needed > 0) {
    device.zero(counts);
    device.launch(&sort_kernel, blocks_for("ptr", a.graphs, threads), threads, 0, a.csr, a.ptr, a.graphs, levels, each,
                  lists.mutable_data_ptr<int64_t>(), pointer<Run>(runs), pointer<Count>(counts));
  }
  for (int level = 0; level < levels.count && level <= needed; ++level) {
    int64_t most = 1024;
    dim3 grid = blocks_for("ptr", a.graphs, 1);
    if (level == 0) {
      const int64_t units = std::max(fit.units_in(levels.bytes[0], nodes, edges), 1);
      const int64_t work = std::max(nodes * units, edges / 8) / 2;
      most = std::clamp<int64_t>((work + warp_size - 1) / warp_size * warp_size, 64, 512);
    } else {
      const int64_t held = device.resident_blocks(&graph_kernel<K, S, A>, most, levels.bytes[level]);
      grid.x = static_cast<unsigned>(std::min<int64_t>(grid.x, held));
    }
    const int64_t* list = level == 0 ? nullptr : lists.mutable_data_ptr<int64_t>() + (level - 1) * a.graphs;
    const Count* count = level == 0 ? nullptr : pointer<Count>(counts) + level - 1;
    device.launch(&graph_kernel<K, S, A>, grid, most, levels.bytes[level], task, levels, level, list, count);
  }
  if (needed < levels.count) return;
  const Rows rows = {pointer<Run>(runs), pointer<Count>(counts) + levels.count - 1, 0, each};
  powers_hop_by_hop(device, a, rows, blocks, task.x, task.width, task.hops, task.rows, task.out);
}

// Checks the arguments that both directions share.
Adjacency adjacency_of(const Tensor& indptr, const Tensor& indices, ScalarType value, int64_t nodes, int64_t width,
                       const OptionalTensor& ptr, const OptionalTensor& edge_weight, const std::string& op) {
  check_adjacency(indptr, indices, value, nodes, ptr, edge_weight, op);
  constexpr int64_t most = INT32_MAX - 4;
  require(width <= most, "x must have at most ", most, " features, got ", width);
  Adjacency a = {{}, indptr.scalar_type(), edge_weight ? edge_weight->const_data_ptr() : nullptr};
  if (a.index == ScalarType::Int)
    a.csr = {indptr.const_data_ptr<int32_t>(), indices.const_data_ptr<int32_t>(), nullptr, nullptr};
  else
    a.csr = {nullptr, nullptr, indptr.const_data_ptr<int64_t>(), indices.const_data_ptr<int64_t>()};
  a.op = op == "adj"   ? Operator::plain
         : op == "rw"  ? Operator::row
         : op == "sym" ? Operator::symmetric
                       : Operator::mixed;
  a.nodes = nodes;
  a.edges = indices.numel();
  a.ptr = data<int64_t>(ptr);
  a.graphs = ptr ? ptr->numel() - 1 : 0;
  return a;
}

// Where ptr is a run of the offsets, out has a row for each of its nodes.
void power_features_out(const Tensor& indptr, const Tensor& indices, const Tensor& x, int64_t num_hops, std::string op,
                        OptionalTensor ptr, OptionalTensor edge_weight, bool check_invariants, bool float64_sums,
                        Tensor out) {
  const ScalarType value = expect("x", x, {any, any}, stored_types);
  check_num_hops(num_hops);
  const int64_t nodes = x.size(0), width = x.size(1);
  expect("out", out, {num_hops + 1, ptr ? any : Size(nodes), width}, {value});
  const Adjacency a = adjacency_of(indptr, indices, value, nodes, width, ptr, edge_weight, op);
  const int64_t rows = out.size(1);
  require(rows <= nodes, "out must have at most ", nodes, " rows (nodes), got ", rows);
  if (rows == 0 || width == 0 || (ptr && a.graphs == 0)) return;
  const Device device(
      x, {{"indptr", indptr}, {"indices", indices}, {"ptr", ptr}, {"edge_weight", edge_weight}, {"out", out}});
  dispatch_storage(value, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using V = Compute<S>;
    S* const to = static_cast<S*>(out.mutable_data_ptr());
    if (!ptr) {
      const int64_t each = rows_at_once(width);
      const Rows all = {nullptr, nullptr, nodes, each};
      return powers_hop_by_hop(device, a, all, (nodes + each - 1) / each, stored<S>(x), width, num_hops, rows, to);
    }
    const Graphs<S> task = {a.csr,        static_cast<const V*>(a.weight),
                            a.op,         a.ptr,
                            a.graphs,     static_cast<int>(width),
                            num_hops,     rows,
                            stored<S>(x), to};
    dispatch_columns(width, [&](auto k) {
      if (float64_sums)
        powers_of_graphs<k, S, double>(device, a, task);
      else
        powers_of_graphs<k, S, V>(device, a, task);
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

// One thread per edge of the transpose: the row and the weight of the edge that it was. `weight` may be null.
template <class V, class I>
__global__ void __launch_bounds__(256)
    edges_kernel(Csr csr, int64_t nodes, int64_t edges, Integers entries, const V* weight, I* neighbours, V* weights) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= edges) return;
  const int64_t e = entries[i];
  const int64_t row = csr.wide_indptr ? run_of(csr.wide_indptr, nodes, e) : run_of(csr.narrow_indptr, nodes, e);
  neighbours[i] = static_cast<I>(row);
  if (weight) weights[i] = weight[e];
}

// dx = sum_r (Ā^T)^r grad_r, by Horner's rule: t = grad_R; t = Ā^T t + grad_r for r = R-1 .. 0.
template <class V>
void powers_backward(const Device& device, const Adjacency& a, const V* grad, int64_t width, int64_t hops,
                     ScalarType value, V* dx) {
  const int64_t plane = a.nodes * width, each = rows_at_once(width), blocks = (a.nodes + each - 1) / each;
  if (hops == 0) {
    check(cudaMemcpyAsync(dx, grad, plane * sizeof(V), cudaMemcpyDeviceToDevice, device.stream()));
    return;
  }
  const Rows rows = {nullptr, nullptr, a.nodes, each};
  const bool scaled = a.op != Operator::plain;
  Tensor scales = device.empty({scaled ? a.nodes : 0}, ScalarType::Double);
  double* const scale = scaled ? scales.mutable_data_ptr<double>() : nullptr;
  if (scaled) {
    const HopByHop forward(device, a.csr, a.edges, rows, blocks, 1, a.op, a.weight ? nullptr : scale);
    weighted_scales<V>(forward, a, scale);
  }

  const void* const indices = a.csr.wide_indices ? static_cast<const void*>(a.csr.wide_indices) : a.csr.narrow_indices;
  const Transposed back = transposed(device, a.index, indices, a.edges, a.nodes);
  Tensor sources = device.empty({a.edges}, index_type_for(a.nodes));
  Tensor weights = device.empty({a.weight ? a.edges : 0}, value);
  dispatch_index(sources.scalar_type(), [&](auto tag) {
    using I = typename decltype(tag)::type;
    device.launch(&edges_kernel<V, I>, blocks_for("indices", a.edges, threads), threads, 0, a.csr, a.nodes, a.edges,
                  integers_of(back.entries), static_cast<const V*>(a.weight), sources.mutable_data_ptr<I>(),
                  pointer<V>(weights));
  });
  const Integers neighbours = integers_of(sources);
  const Csr csr = {nullptr, neighbours.narrow, back.offsets.const_data_ptr<int64_t>(), neighbours.wide};

  const HopByHop work(device, csr, a.edges, rows, blocks, width, a.op, nullptr);
  Gather<V> hop = {csr, a.weight ? pointer<V>(weights) : nullptr};
  set_scales(hop, a.op, scale);
  std::swap(hop.left, hop.right);
  hop.width = static_cast<int>(width);
  // Two buffers in turn, the last hop ending in dx.
  Tensor spare = device.empty({hops > 1 ? plane : 0}, value);
  const auto target = [&](int64_t r) { return r % 2 == 0 ? dx : pointer<V>(spare); };
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
  if (value == ScalarType::Float)
    powers_backward(device, a, grad.const_data_ptr<float>(), width, hops, value, dx.mutable_data_ptr<float>());
  else
    powers_backward(device, a, grad.const_data_ptr<double>(), width, hops, value, dx.mutable_data_ptr<double>());
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) {
  m.impl("power_features", TORCH_BOX(&power_features));
  m.impl("power_features_out", TORCH_BOX(&power_features_out));
  m.impl("power_features_backward", TORCH_BOX(&power_features_backward));
}

}  // namespace spin_fast

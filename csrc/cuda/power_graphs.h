// All powers of graphs that fit into shared memory, one block of threads per graph.
//
// Layout: x row-major [N, d], out row-major [R + 1, N, d]. In shared memory: the scales of the nodes, the values of a
// hop and the next one, as many columns at a time as fit, and the arcs, their neighbours as numbers of 16 bits counted
// from the graph's first node. Rows have an odd stride there, so that they begin in different banks. Under `symmetric`
// sources are kept scaled (y_u = scale_u p_u): a hop is one addition per arc and column, p_v = scale_v sum_u y_u.
// Parallel axis within a block: rows and columns, as in hop.h; a row of more than `light_arcs` arcs is a team's.
// Accumulator: A for up to light_arcs arcs; of longer rows chains of `chain_terms` in A, added up in double. A row is
// added up in an order that depends on its length and the width alone: not on the batch that a graph is in.
//
// A graph with more arcs than fit goes hop by hop too: its arcs would come from global memory in every hop anyway, and
// there they are shared by all multiprocessors.
#pragma once

#include "hop.h"

namespace spin_fast {
namespace {

constexpr int chain_terms = 64;

// What a graph needs of shared memory.
struct Fit {
  int64_t width;
  int64_t value_bytes;  // of A
  bool scaled;

  // Columns of one pass over a graph, at least; less would read and write parts of sectors of 32 bytes.
  __host__ __device__ int64_t fewest_columns() const { return width < 32 / value_bytes ? width : 32 / value_bytes; }
  __host__ __device__ int64_t bytes(int64_t nodes, int64_t arcs, int64_t columns) const {
    return nodes * ((2 * (columns | 1) + scaled) * value_bytes + 4) + 4 + 2 * arcs;
  }
  // Columns of one pass over a graph in so much shared memory; 0 where it does not fit.
  __host__ __device__ int64_t columns(int64_t nodes, int64_t arcs, int64_t most_bytes) const {
    if (nodes == 0) return width;
    const int64_t rest = most_bytes - bytes(nodes, arcs, 0) + 2 * nodes * value_bytes;  // 0 columns have a stride of 1
    int64_t most = rest < 0 ? 0 : rest / (2 * nodes * value_bytes);
    most -= most % 2 == 0;
    if (most < fewest_columns() || nodes > 0x10000) return 0;
    const int64_t passes = (width + most - 1) / most;
    return (width + passes - 1) / passes;
  }
};

// Launches of the kernel with more and more shared memory. A graph is taken by the first one that it fits.
struct Levels {
  Fit fit;
  int count;
  int64_t bytes[3];

  __host__ __device__ int of(int64_t nodes, int64_t arcs) const {
    int level = 0;
    while (level < count && fit.columns(nodes, arcs, bytes[level]) == 0) ++level;
    return level;  // `count`: hop by hop
  }
};

template <class S>
struct Graphs {
  Csr csr;
  const Compute<S>* weight;  // or null for ones
  Operator op;
  const int64_t* ptr;  // [graphs + 1]
  int64_t graphs;
  int width;     // d
  int64_t hops;  // R
  int64_t rows;  // of a branch of out
  const S* x;    // [N, d]
  S* out;        // [R + 1, rows, d]
};

// One thread per graph: lists those of each level but the first, and runs of at most `each` rows of those of none.
// lists: [count - 1, graphs]; counts: of level 1, .., of runs.
__global__ void __launch_bounds__(256)
    sort_kernel(Csr csr, const int64_t* ptr, int64_t graphs, const __grid_constant__ Levels levels, int64_t each,
                int64_t* lists, Run* runs, Count* counts) {
  const int64_t g = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  Run rows = {0, 0};
  if (g < graphs) {
    const int64_t first = ptr[g], last = ptr[g + 1];
    const int level = levels.of(last - first, csr.begin(last) - csr.begin(first));
    if (level == levels.count)
      rows = {first, last};
    else if (level > 0)
      lists[(level - 1) * graphs + static_cast<int64_t>(atomicAdd(counts + level - 1, Count{1}))] = g;
  }
  // A large graph may have many runs: all lanes write them.
  const int lane = threadIdx.x % warp_size;
  for (unsigned large = __ballot_sync(all_lanes, rows.end > rows.begin); large != 0; large &= large - 1) {
    const int from = __ffs(static_cast<int>(large)) - 1;
    const int64_t begin = __shfl_sync(all_lanes, rows.begin, from), end = __shfl_sync(all_lanes, rows.end, from);
    const int64_t number = (end - begin + each - 1) / each;
    Count at = 0;
    if (lane == 0) at = atomicAdd(counts + levels.count - 1, static_cast<Count>(number));
    at = __shfl_sync(all_lanes, at, 0);
    for (int64_t i = lane; i < number; i += warp_size) {
      const int64_t row = begin + i * each;
      runs[static_cast<int64_t>(at) + i] = {row, row + each < end ? row + each : end};
    }
  }
}

// i / divisor for products i * divisor below 2^32.
struct Quotient {
  uint64_t inverse;

  __host__ __device__ explicit Quotient(uint32_t divisor) : inverse(((uint64_t{1} << 32) + divisor - 1) / divisor) {}
  __host__ __device__ int of(uint32_t i) const { return static_cast<int>(i * inverse >> 32); }
};

// A graph in shared memory, and of its columns those of one pass.
template <class S, class A>
struct Block {
  int nodes, columns, units, stride;
  Operator op;
  const Compute<S>* weight;  // of the graph's arcs, in global memory, or null
  A* scale;                  // [n]
  int* offsets;              // [n + 1]
  uint16_t* neighbours;      // [arcs]
  bool any_heavy;            // rows of more than light_arcs
  int width;
};

// y -> next, both [n, stride], and to the rows of `out`. Plain: additions only. next may be null.
template <int K, bool Plain, class S, class A>
__device__ void hop_in_block(const Block<S, A>& block, const A* y, A* next, S* out) {
  using V = Compute<S>;
  const int units = block.units, stride = block.stride;
  const auto add_arc = [&](int e, A own, const A* column, int columns, A(&sum)[K]) {
    const int u = block.neighbours[e];
    const A* row = column + u * stride;
    A factor = 1;
    if constexpr (!Plain) {
      if (block.op == Operator::mixed) factor += own * block.scale[u];
      if (block.weight) factor *= block.weight[e];
    }
    for (int k = 0; k < K; ++k)
      if (k < columns) sum[k] += Plain ? row[k * units] : factor * row[k * units];
  };
  const auto own_of = [&](int v) { return !Plain && block.op == Operator::mixed ? block.scale[v] : A{1}; };
  const auto store = [&](int v, int c, const auto& sum) {
    const A scale = block.op == Operator::plain ? A{1} : block.scale[v];
    const A left = block.op == Operator::mixed ? A{1} : scale, right = block.op == Operator::symmetric ? scale : A{1};
    for (int k = 0; k < K; ++k) {
      const int column = c + k * units;
      if (column >= block.columns) break;
      const V power = static_cast<V>(left * sum[k]);
      out[int64_t{v} * block.width + column] = Narrowed<S>::of(power);
      if (next) next[v * stride + column] = right * power;
    }
  };

  const int items = block.nodes * units;
  const Quotient row_of(units);
  for (int i = threadIdx.x; i < items; i += blockDim.x) {
    const int v = row_of.of(i), c = i - v * units, begin = block.offsets[v], end = block.offsets[v + 1];
    if (end - begin > light_arcs) continue;
    const int columns = columns_of<K>(c, units, block.columns);
    const A own = own_of(v);
    A sum[K] = {};
#pragma unroll 2
    for (int e = begin; e < end; ++e) add_arc(e, own, y + c, columns, sum);
    store(v, c, sum);
  }
  if (!block.any_heavy) return;
  const Team team(block.width, units);
  for (int v = threadIdx.x / team.lanes(); v < block.nodes; v += blockDim.x / team.lanes()) {
    const int begin = block.offsets[v], end = block.offsets[v + 1];
    if (end - begin <= light_arcs) continue;
    const A own = own_of(v);
    for (int share = 0; share < units; share += team.side) {
      const int c = share + team.column(), columns = c < units ? columns_of<K>(c, units, block.columns) : 0;
      double sum[K] = {};
      for (int e = begin + team.way(); e < end;) {
        A chain[K] = {};
        for (int i = 0; i < chain_terms && e < end; ++i, e += team.ways) add_arc(e, own, y + c, columns, chain);
        for (int k = 0; k < K; ++k) sum[k] += chain[k];
      }
      team.add_up(sum);
      if (c < units && team.way() == 0) store(v, c, sum);
    }
  }
}

// Offsets, neighbours and scales of a graph, into shared memory.
template <class S, class A>
__device__ void load_block(const Graphs<S>& task, int64_t first, int64_t begin, Block<S, A>& block) {
  bool heavy = false;
  for (int v = threadIdx.x; v <= block.nodes; v += blockDim.x) {
    const int64_t at = task.csr.begin(first + v);
    block.offsets[v] = static_cast<int>(at - begin);
    if (v == block.nodes) break;
    const int64_t degree = task.csr.begin(first + v + 1) - at;
    heavy |= degree > light_arcs;
    if (block.op != Operator::plain && !block.weight)
      block.scale[v] = static_cast<A>(scale_of(block.op, static_cast<double>(degree)));
  }
  block.any_heavy = __syncthreads_or(heavy);
  const int arcs = block.offsets[block.nodes];
#pragma unroll 4
  for (int e = threadIdx.x; e < arcs; e += blockDim.x)
    block.neighbours[e] = static_cast<uint16_t>(task.csr.neighbour(begin + e) - first);
  if (block.op != Operator::plain && block.weight) {
    const Team team(1, 1);
    for (int v = threadIdx.x / team.lanes(); v < block.nodes; v += blockDim.x / team.lanes()) {
      double sum[1] = {};
      for (int e = block.offsets[v] + team.way(); e < block.offsets[v + 1]; e += team.ways)
        sum[0] += static_cast<double>(block.weight[e]);
      team.add_up(sum);
      if (team.way() == 0) block.scale[v] = static_cast<A>(scale_of(block.op, sum[0]));
    }
  }
  __syncthreads();
}

template <int K, class S, class A>
__device__ void powers_of_graph(const Graphs<S>& task, int64_t g, int columns) {
  const int64_t first = task.ptr[g], begin = task.csr.begin(first);
  Block<S, A> block;
  block.nodes = static_cast<int>(task.ptr[g + 1] - first);
  block.stride = columns | 1;
  block.op = task.op;
  block.weight = task.weight ? task.weight + begin : nullptr;
  block.width = task.width;
  A* const values = shared_memory<A>();
  block.scale = values + 2 * block.nodes * block.stride;
  block.offsets = reinterpret_cast<int*>(block.scale + (task.op == Operator::plain ? 0 : block.nodes));
  block.neighbours = reinterpret_cast<uint16_t*>(block.offsets + block.nodes + 1);
  load_block(task, first, begin, block);

  const int64_t plane = task.rows * task.width;
  const S* const x = task.x + first * task.width;
  S* const out = task.out + (first - task.ptr[0]) * task.width;
  const bool additions = !task.weight && task.op != Operator::mixed;
  for (int column = 0; column < task.width; column += columns) {
    block.columns = task.width - column < columns ? task.width - column : columns;
    block.units = units_of<K>(block.columns);
    A *y = values, *next = values + block.nodes * block.stride;
    const Quotient row_of(block.units);
    for (int i = threadIdx.x; i < block.nodes * block.units; i += blockDim.x) {
      const int v = row_of.of(i), c = i - v * block.units;
      const A right = task.op == Operator::symmetric ? block.scale[v] : A{1};
      for (int k = 0; k < K; ++k) {
        const int j = c + k * block.units;
        if (j >= block.columns) break;
        const int64_t at = int64_t{v} * task.width + column + j;
        const S value = x[at];
        out[at] = value;
        y[v * block.stride + j] = right * widened(value);
      }
    }
    __syncthreads();
    for (int64_t r = 1; r <= task.hops; ++r) {
      A* const to = r == task.hops ? nullptr : next;
      if (additions)
        hop_in_block<K, true>(block, y, to, out + r * plane + column);
      else
        hop_in_block<K, false>(block, y, to, out + r * plane + column);
      __syncthreads();
      next = y;
      y = to;
    }
  }
}

// Level 0: a block for every graph, those of other levels have nothing to do. Else the graphs of a list, which is as
// long as the device found it.
template <int K, class S, class A>
__global__ void __launch_bounds__(1024) graph_kernel(Graphs<S> task, const __grid_constant__ Levels levels, int level,
                                                     const int64_t* list, const Count* count) {
  const int64_t graphs = level == 0 ? task.graphs : static_cast<int64_t>(*count);
  for (int64_t i = blockIdx.x; i < graphs; i += gridDim.x) {
    const int64_t g = level == 0 ? i : list[i], first = task.ptr[g], last = task.ptr[g + 1];
    const int64_t nodes = last - first, arcs = task.csr.begin(last) - task.csr.begin(first);
    if (level == 0 && levels.of(nodes, arcs) != 0) continue;
    powers_of_graph<K, S, A>(task, g, static_cast<int>(levels.fit.columns(nodes, arcs, levels.bytes[level])));
  }
}

}  // namespace
}  // namespace spin_fast

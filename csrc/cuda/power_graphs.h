// All powers of graphs that fit into shared memory, one thread block per graph.
//
// Layout: x row-major [N, d], out row-major [R + 1, N, d]. In shared memory: the values of a hop and the next one, as
// many columns at a time as fit, the scales of the nodes, and the edges, their neighbours as numbers of 16 bits counted
// from the graph's first node. A thread takes a unit of K columns of a row, `units` apart, so that neighbouring threads
// are at neighbouring columns of x and out whatever the width; in shared memory these K are adjacent, one load of 16
// bytes per four floats. Under `sym`, sources are kept scaled (y_u = scale_u p_u): a hop is one addition per edge
// and column, p_v = scale_v sum_u y_u. Parallel axis within a block: rows and columns; a row of more than `light_edges`
// edges is taken by a team, as in spmm.h. Accumulator: A for up to light_edges edges; of heavier rows chains of
// `chain_terms` in A, added up in double. A row is added up in an order that depends on its length and the width alone:
// not on the batch that a graph is in.
//
// A graph with more edges than fit goes hop by hop too: its edges would come from global memory in every hop anyway,
// and there all multiprocessors share them.
#pragma once

#include "spmm.h"

namespace spin_fast {
namespace {

constexpr int chain_terms = 64;

// The shared memory that a graph needs. Numbers within a graph have 32 bits, since most blocks are small and each of
// their threads computes these.
struct Footprint {
  int columns;      // K
  int units;        // of d
  int value_bytes;  // of A
  bool scaled;

  // The least number of units in one pass over a graph: fewer would read and write parts of sectors of 32 bytes.
  __host__ __device__ int fewest_units() const { return units < 2 ? units : 2; }
  __host__ __device__ int64_t bytes(int64_t nodes, int64_t edges, int at_once) const {
    return nodes * ((int64_t{2} * columns * at_once + scaled) * value_bytes + 4) + 4 + 2 * edges;
  }
  // The number of units in one pass over a graph in so much shared memory; 0 if the graph does not fit.
  __host__ __device__ int units_in(int most_bytes, int64_t nodes, int64_t edges) const {
    if (nodes > 0x10000 || nodes * units * columns > INT32_MAX || bytes(nodes, edges, fewest_units()) > most_bytes)
      return 0;
    if (bytes(nodes, edges, units) <= most_bytes) return units;
    const int rest = most_bytes - static_cast<int>(bytes(nodes, edges, 0));
    const int most = rest / (static_cast<int>(nodes) * 2 * columns * value_bytes);
    const int passes = (units + most - 1) / most;
    return (units + passes - 1) / passes;
  }
};

// Launches of the kernel with increasing amounts of shared memory. The first one that a graph fits takes it.
struct Levels {
  Footprint footprint;
  int count;
  int bytes[3];

  // `count` if the graph fits none: it goes hop by hop.
  __host__ __device__ int first_fitting(int64_t nodes, int64_t edges) const {
    int level = 0;
    while (level < count && footprint.units_in(bytes[level], nodes, edges) == 0) ++level;
    return level;
  }
};

template <class S>
struct Graphs {
  Adjacency a;
  int width;     // d
  int64_t hops;  // R
  int64_t rows;  // of a branch of out
  const S* x;    // [N, d]
  S* out;        // [R + 1, rows, d]
};

// One thread per graph: appends it to the list of the first level it fits, unless that is level 0, which looks at all
// graphs; splits graphs that fit none into row ranges of at most `each`. lists: [count - 1, graphs]; counts: the length
// of each list and the number of ranges.
__global__ void __launch_bounds__(256)
    list_kernel(Csr csr, const int64_t* ptr, int64_t graphs, const __grid_constant__ Levels levels, int64_t each,
                int64_t* lists, RowRange* ranges, Count* counts) {
  const int64_t g = thread_index();
  RowRange rows = {0, 0};
  if (g < graphs) {
    const int64_t first = ptr[g], last = ptr[g + 1];
    const int level = levels.first_fitting(last - first, csr.indptr[last] - csr.indptr[first]);
    if (level == levels.count)
      rows = {first, last};
    else if (level > 0)
      lists[(level - 1) * graphs + static_cast<int64_t>(atomicAdd(counts + level - 1, Count{1}))] = g;
  }
  // A large graph may have many ranges: all lanes write them.
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
      ranges[static_cast<int64_t>(at) + i] = {row, row + each < end ? row + each : end};
    }
  }
}

// i / divisor for products i * divisor below 2^32.
struct Quotient {
  uint64_t inverse;

  Quotient() = default;
  __device__ explicit Quotient(unsigned divisor) : inverse(uint64_t{0xffffffffu / divisor} + 1) {}
  __device__ int of(unsigned i) const { return static_cast<int>(i * inverse >> 32); }
};

// A graph in shared memory, with the columns of one pass.
template <int K, class S, class A>
struct SharedGraph {
  int nodes, columns, units, stride;  // the stride of rows is in packs
  Quotient row_of;                    // i / units
  Operator op;
  const Compute<S>* weight;  // of the graph's edges, in global memory, or null
  A* scale;                  // [n]
  int* offsets;              // [n + 1]
  uint16_t* neighbours;      // [edges]
  bool any_heavy;            // rows of more than light_edges
  int width;                 // of x and out
};

// One hop from y to `next`, both [n, stride], and to the rows of `out`. Plain: additions only. `next` may be null.
template <bool Plain, int K, class S, class A>
__device__ void hop_in_shared_memory(const SharedGraph<K, S, A>& graph, const Pack<A, K>* y, Pack<A, K>* next, S* out) {
  using V = Compute<S>;
  const int units = graph.units, stride = graph.stride;
  // Adds `terms` edges: e, e + step, ..
  const auto add_edges = [&](int e, int terms, int step, A own, const Pack<A, K>* unit, A(&sum)[K]) {
    constexpr int together = K * sizeof(A) <= 16 ? 4 : 2;  // loads in flight at once
    for (int i = 0; i < terms; i += together) {
      int u[together] = {};  // node 0 without an edge: its value is loaded but not added
      A factor[together];
      Pack<A, K> source[together];
      for (int j = 0; j < together; ++j)
        if (i + j < terms) u[j] = graph.neighbours[e + (i + j) * step];
      for (int j = 0; j < together; ++j) {
        source[j] = unit[u[j] * stride];
        factor[j] = !Plain && graph.op == Operator::sym_adj ? own * graph.scale[u[j]] + 1 : A{1};
        if (!Plain && graph.weight && i + j < terms) factor[j] *= graph.weight[e + (i + j) * step];
      }
      for (int j = 0; j < together; ++j)
        if (i + j < terms)
          for (int k = 0; k < K; ++k) sum[k] += Plain ? source[j].at[k] : factor[j] * source[j].at[k];
    }
  };
  const auto own_of = [&](int v) { return !Plain && graph.op == Operator::sym_adj ? graph.scale[v] : A{1}; };
  const auto store = [&](int v, int c, const auto& sum) {
    const A scale = graph.op == Operator::adj ? A{1} : graph.scale[v];
    const A left = graph.op == Operator::sym_adj ? A{1} : scale, right = graph.op == Operator::sym ? scale : A{1};
    S* const row = out + (v * graph.width + c);
    Pack<A, K> source;
    for (int k = 0; k < K; ++k) {
      const V power = static_cast<V>(left * sum[k]);
      source.at[k] = right * power;
      if (c + k * units < graph.columns) row[k * units] = narrowed<S>(power);
    }
    if (next) next[v * stride + c] = source;
  };

  const int items = graph.nodes * units;
  for (int i = threadIdx.x; i < items; i += blockDim.x) {
    const int v = graph.row_of.of(i), c = i - v * units, begin = graph.offsets[v], end = graph.offsets[v + 1];
    if (end - begin > light_edges) continue;
    const A own = own_of(v);
    A sum[K] = {};
    add_edges(begin, end - begin, 1, own, y + c, sum);
    store(v, c, sum);
  }
  if (!graph.any_heavy) return;
  const Team team(graph.width, units);
  const int edge_lanes = team.edge_lanes();
  for (int first = team.first_of_warp(); first < graph.nodes; first += team.teams_of_block()) {
    const int v = first + team.team_of_warp();
    int begin = 0, end = 0;
    if (v < graph.nodes) begin = graph.offsets[v], end = graph.offsets[v + 1];
    const bool heavy = end - begin > light_edges;
    if (!__any_sync(all_lanes, heavy)) continue;
    if (!heavy) end = begin;
    const A own = heavy ? own_of(v) : A{1};
    for (int tile = 0; tile < units; tile += team.column_lanes()) {
      const int c = tile + team.column_lane(), there = c < units ? c : 0;
      double sum[K] = {};
      for (int e = begin + team.edge_lane(); e < end;) {
        const int left = (end - e + edge_lanes - 1) >> team.log_edge_lanes,
                  terms = left < chain_terms ? left : chain_terms;
        A chain[K] = {};
        add_edges(e, terms, edge_lanes, own, y + there, chain);
        for (int k = 0; k < K; ++k) sum[k] += chain[k];
        e += terms * edge_lanes;
      }
      team.add_up(sum);
      if (heavy && c < units && team.edge_lane() == 0) store(v, c, sum);
    }
  }
}

// Loads offsets, neighbours and scales of a graph into shared memory.
template <int K, class S, class A>
__device__ void load_graph(const Graphs<S>& task, int64_t first, int64_t begin, SharedGraph<K, S, A>& graph) {
  bool heavy = false;
  for (int v = threadIdx.x; v <= graph.nodes; v += blockDim.x)
    graph.offsets[v] = static_cast<int>(task.a.csr.indptr[first + v] - begin);
  __syncthreads();
  const int edges = graph.offsets[graph.nodes], step = blockDim.x;
  constexpr int together = 4;  // loads in flight at once
  for (int e = threadIdx.x; e < edges; e += together * step) {
    int64_t loaded[together] = {};
    for (int i = 0; i < together; ++i)
      if (e + i * step < edges) loaded[i] = task.a.csr.indices[begin + e + i * step];
    for (int i = 0; i < together; ++i)
      if (e + i * step < edges) graph.neighbours[e + i * step] = static_cast<uint16_t>(loaded[i] - first);
  }
#pragma unroll 1
  for (int v = threadIdx.x; v < graph.nodes; v += step) {
    const int degree = graph.offsets[v + 1] - graph.offsets[v];
    heavy |= degree > light_edges;
    if (graph.op != Operator::adj && !graph.weight) graph.scale[v] = static_cast<A>(scale_of(graph.op, degree));
  }
  if (graph.op != Operator::adj && graph.weight) {
    const Team team(1, 1);
#pragma unroll 1
    for (int first = team.first_of_warp(); first < graph.nodes; first += team.teams_of_block()) {
      const int v = first + team.team_of_warp(), end = v < graph.nodes ? graph.offsets[v + 1] : 0;
      double sum[1] = {};
      for (int e = v < graph.nodes ? graph.offsets[v] + team.edge_lane() : 0; e < end; e += team.edge_lanes())
        sum[0] += static_cast<double>(graph.weight[e]);
      team.add_up(sum);
      if (v < graph.nodes && team.edge_lane() == 0) graph.scale[v] = static_cast<A>(scale_of(graph.op, sum[0]));
    }
  }
  graph.any_heavy = __syncthreads_or(heavy);
}

// In passes of `units` units.
template <int K, class S, class A>
__device__ void powers_of_graph(const Graphs<S>& task, int64_t first, int nodes, int64_t begin, int units) {
  Pack<A, K>* const values = shared_memory<Pack<A, K>>();
  SharedGraph<K, S, A> graph;
  graph.nodes = nodes;
  graph.stride = units;
  graph.op = task.a.op;
  graph.weight = task.a.weight ? static_cast<const Compute<S>*>(task.a.weight) + begin : nullptr;
  graph.width = task.width;
  graph.scale = reinterpret_cast<A*>(values + 2 * nodes * units);
  graph.offsets = reinterpret_cast<int*>(graph.scale + (task.a.op == Operator::adj ? 0 : nodes));
  graph.neighbours = reinterpret_cast<uint16_t*>(graph.offsets + nodes + 1);
  load_graph(task, first, begin, graph);

  const int64_t plane = task.rows * task.width;
  const S* const x = task.x + first * task.width;
  S* const out = task.out + (first - task.a.ptr[0]) * task.width;
  const bool additions = !task.a.weight && task.a.op != Operator::sym_adj;
  for (int column = 0; column < task.width; column += K * units) {
    graph.columns = task.width - column < K * units ? task.width - column : K * units;
    graph.units = units_of<K>(graph.columns);
    Pack<A, K>*y = values, *next = values + nodes * units;
    graph.row_of = Quotient(graph.units);
    for (int i = threadIdx.x; i < nodes * graph.units; i += blockDim.x) {
      const int v = graph.row_of.of(i), c = i - v * graph.units;
      const A right = task.a.op == Operator::sym ? graph.scale[v] : A{1};
      const int at = v * task.width + column + c;
      const S* const from = x + at;
      S *const to = out + at, row[K] = {};
      for (int k = 0; k < K; ++k)
        if (c + k * graph.units < graph.columns) row[k] = from[k * graph.units];
      Pack<A, K> source;
      for (int k = 0; k < K; ++k) {
        if (c + k * graph.units < graph.columns) to[k * graph.units] = row[k];
        source.at[k] = right * widened(row[k]);
      }
      y[v * units + c] = source;
    }
    __syncthreads();
    for (int64_t r = 1; r <= task.hops; ++r) {
      Pack<A, K>* const to = r == task.hops ? nullptr : next;
      if (additions)
        hop_in_shared_memory<true>(graph, y, to, out + r * plane + column);
      else
        hop_in_shared_memory<false>(graph, y, to, out + r * plane + column);
      __syncthreads();
      next = y;
      y = to;
    }
  }
}

// Level 0: one block per graph, which returns at once for a graph of another level. Further levels: the graphs of a
// list, whose length only the device knows.
template <int K, class S, class A>
__global__ void __launch_bounds__(1024) graph_kernel(Graphs<S> task, const __grid_constant__ Levels levels, int level,
                                                     const int64_t* list, const Count* count) {
  const int64_t graphs = level == 0 ? task.a.graphs : static_cast<int64_t>(*count);
  for (int64_t i = blockIdx.x; i < graphs; i += gridDim.x) {
    const int64_t g = level == 0 ? i : list[i], first = task.a.ptr[g], last = task.a.ptr[g + 1];
    const int64_t nodes = last - first, begin = task.a.csr.indptr[first];
    const int units = levels.footprint.units_in(levels.bytes[level], nodes, task.a.csr.indptr[last] - begin);
    if (units > 0) powers_of_graph<K, S, A>(task, first, static_cast<int>(nodes), begin, units);
  }
}

}  // namespace
}  // namespace spin_fast

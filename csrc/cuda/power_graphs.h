// All powers of graphs that fit into shared memory, one block of threads per graph.
//
// Layout: x row-major [N, d], out row-major [R + 1, N, d]. In shared memory: the values of a hop and the next one, as
// many columns at a time as fit, the scales of the nodes, and the edges, their neighbours as numbers of 16 bits counted
// from the graph's first node. A thread takes K columns of a row, `units` apart, so that neighbouring threads are at
// neighbouring columns of x and out whatever the width; in shared memory these K stand side by side, one load of 16
// bytes each four floats. Under `symmetric` sources are kept scaled (y_u = scale_u p_u): a hop is one addition per edge
// and column, p_v = scale_v sum_u y_u. Parallel axis within a block: rows and columns; a row of more than `light_edges`
// edges is a team's, as in spmm.h. Accumulator: A for up to light_edges edges; of longer rows chains of `chain_terms` in
// A, added up in double. A row is added up in an order that depends on its length and the width alone: not on the batch
// that a graph is in.
//
// A graph with more edges than fit goes hop by hop too: its edges would come from global memory in every hop anyway,
// and there they are shared by all multiprocessors.
#pragma once

#include "spmm.h"

namespace spin_fast {
namespace {

constexpr int chain_terms = 64;

// What a graph needs of shared memory. Within a graph, numbers have 32 bits: most blocks are small, and each of their
// threads computes these.
struct Fit {
  int columns;      // K
  int units;        // of d
  int value_bytes;  // of A
  bool scaled;

  // Units of one pass over a graph, at least: fewer would read and write parts of sectors of 32 bytes.
  __host__ __device__ int fewest_units() const { return units < 2 ? units : 2; }
  __host__ __device__ int64_t bytes(int64_t nodes, int64_t edges, int at_once) const {
    return nodes * ((int64_t{2} * columns * at_once + scaled) * value_bytes + 4) + 4 + 2 * edges;
  }
  // Units of one pass over a graph in so much shared memory; 0 where it does not fit.
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

// Launches of the kernel with more and more shared memory. A graph is taken by the first one that it fits.
struct Levels {
  Fit fit;
  int count;
  int bytes[3];

  __host__ __device__ int of(int64_t nodes, int64_t edges) const {
    int level = 0;
    while (level < count && fit.units_in(bytes[level], nodes, edges) == 0) ++level;
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

  Quotient() = default;
  __device__ explicit Quotient(unsigned divisor) : inverse(uint64_t{0xffffffffu / divisor} + 1) {}
  __device__ int of(unsigned i) const { return static_cast<int>(i * inverse >> 32); }
};

// A graph in shared memory, and of its columns those of one pass.
template <int K, class S, class A>
struct Block {
  int nodes, columns, units, stride;  // of a row, in Values
  Quotient row_of;                    // i / units
  Operator op;
  const Compute<S>* weight;  // of the graph's edges, in global memory, or null
  A* scale;                  // [n]
  int* offsets;              // [n + 1]
  uint16_t* neighbours;      // [edges]
  bool any_heavy;            // rows of more than light_edges
  int width;                 // of x and out
};

// y -> next, both [n, stride], and to the rows of `out`. Plain: additions only. next may be null.
template <bool Plain, int K, class S, class A>
__device__ void hop_in_block(const Block<K, S, A>& block, const Values<K, A>* y, Values<K, A>* next, S* out) {
  using V = Compute<S>;
  const int units = block.units, stride = block.stride;
  // sum += edges e, e + step, ..: `terms`.
  const auto add_edges = [&](int e, int terms, int step, A own, const Values<K, A>* unit, A(&sum)[K]) {
    constexpr int together = K * sizeof(A) <= 16 ? 4 : 2;  // loads on their way at once
    for (int i = 0; i < terms; i += together) {
      int u[together] = {};  // node 0 where there is no edge: its value is loaded, and not added
      A factor[together];
      Values<K, A> source[together];
      for (int j = 0; j < together; ++j)
        if (i + j < terms) u[j] = block.neighbours[e + (i + j) * step];
      for (int j = 0; j < together; ++j) {
        source[j] = unit[u[j] * stride];
        factor[j] = !Plain && block.op == Operator::mixed ? own * block.scale[u[j]] + 1 : A{1};
        if (!Plain && block.weight && i + j < terms) factor[j] *= block.weight[e + (i + j) * step];
      }
      for (int j = 0; j < together; ++j)
        if (i + j < terms)
          for (int k = 0; k < K; ++k) sum[k] += Plain ? source[j].at[k] : factor[j] * source[j].at[k];
    }
  };
  const auto own_of = [&](int v) { return !Plain && block.op == Operator::mixed ? block.scale[v] : A{1}; };
  const auto store = [&](int v, int c, const auto& sum) {
    const A scale = block.op == Operator::plain ? A{1} : block.scale[v];
    const A left = block.op == Operator::mixed ? A{1} : scale, right = block.op == Operator::symmetric ? scale : A{1};
    S* const row = out + (v * block.width + c);
    Values<K, A> source;
    for (int k = 0; k < K; ++k) {
      const V power = static_cast<V>(left * sum[k]);
      source.at[k] = right * power;
      if (c + k * units < block.columns) row[k * units] = Narrowed<S>::of(power);
    }
    if (next) next[v * stride + c] = source;
  };

  const int items = block.nodes * units;
  for (int i = threadIdx.x; i < items; i += blockDim.x) {
    const int v = block.row_of.of(i), c = i - v * units, begin = block.offsets[v], end = block.offsets[v + 1];
    if (end - begin > light_edges) continue;
    const A own = own_of(v);
    A sum[K] = {};
    add_edges(begin, end - begin, 1, own, y + c, sum);
    store(v, c, sum);
  }
  if (!block.any_heavy) return;
  const Team team(block.width, units);
  const int ways = team.ways();
  for (int first = team.first_of_warp(); first < block.nodes; first += team.in_block()) {
    const int v = first + team.of_warp();
    int begin = 0, end = 0;
    if (v < block.nodes) begin = block.offsets[v], end = block.offsets[v + 1];
    const bool heavy = end - begin > light_edges;
    if (!__any_sync(all_lanes, heavy)) continue;
    if (!heavy) end = begin;
    const A own = heavy ? own_of(v) : A{1};
    for (int share = 0; share < units; share += team.side()) {
      const int c = share + team.column(), there = c < units ? c : 0;
      double sum[K] = {};
      for (int e = begin + team.way(); e < end;) {
        const int left = (end - e + ways - 1) >> team.log_ways, terms = left < chain_terms ? left : chain_terms;
        A chain[K] = {};
        add_edges(e, terms, ways, own, y + there, chain);
        for (int k = 0; k < K; ++k) sum[k] += chain[k];
        e += terms * ways;
      }
      team.add_up(sum);
      if (heavy && c < units && team.way() == 0) store(v, c, sum);
    }
  }
}

// Offsets, neighbours and scales of a graph, into shared memory.
template <int K, class S, class A>
__device__ void load_block(const Graphs<S>& task, int64_t first, int64_t begin, Block<K, S, A>& block) {
  bool heavy = false;
  for (int v = threadIdx.x; v <= block.nodes; v += blockDim.x)
    block.offsets[v] = static_cast<int>(task.csr.begin(first + v) - begin);
  __syncthreads();
  const int edges = block.offsets[block.nodes], step = blockDim.x;
  constexpr int together = 4;  // loads on their way
  for (int e = threadIdx.x; e < edges; e += together * step) {
    int64_t loaded[together] = {};
    for (int i = 0; i < together; ++i)
      if (e + i * step < edges) loaded[i] = task.csr.neighbour(begin + e + i * step);
    for (int i = 0; i < together; ++i)
      if (e + i * step < edges) block.neighbours[e + i * step] = static_cast<uint16_t>(loaded[i] - first);
  }
#pragma unroll 1
  for (int v = threadIdx.x; v < block.nodes; v += step) {
    const int degree = block.offsets[v + 1] - block.offsets[v];
    heavy |= degree > light_edges;
    if (block.op != Operator::plain && !block.weight) block.scale[v] = static_cast<A>(scale_of(block.op, degree));
  }
  if (block.op != Operator::plain && block.weight) {
    const Team team(1, 1);
#pragma unroll 1
    for (int first = team.first_of_warp(); first < block.nodes; first += team.in_block()) {
      const int v = first + team.of_warp(), end = v < block.nodes ? block.offsets[v + 1] : 0;
      double sum[1] = {};
      for (int e = v < block.nodes ? block.offsets[v] + team.way() : 0; e < end; e += team.ways())
        sum[0] += static_cast<double>(block.weight[e]);
      team.add_up(sum);
      if (v < block.nodes && team.way() == 0) block.scale[v] = static_cast<A>(scale_of(block.op, sum[0]));
    }
  }
  block.any_heavy = __syncthreads_or(heavy);
}

// `units`: of one pass.
template <int K, class S, class A>
__device__ void powers_of_graph(const Graphs<S>& task, int64_t first, int nodes, int64_t begin, int units) {
  Values<K, A>* const values = shared_memory<Values<K, A>>();
  Block<K, S, A> block;
  block.nodes = nodes;
  block.stride = units;
  block.op = task.op;
  block.weight = task.weight ? task.weight + begin : nullptr;
  block.width = task.width;
  block.scale = reinterpret_cast<A*>(values + 2 * nodes * units);
  block.offsets = reinterpret_cast<int*>(block.scale + (task.op == Operator::plain ? 0 : nodes));
  block.neighbours = reinterpret_cast<uint16_t*>(block.offsets + nodes + 1);
  load_block(task, first, begin, block);

  const int64_t plane = task.rows * task.width;
  const S* const x = task.x + first * task.width;
  S* const out = task.out + (first - task.ptr[0]) * task.width;
  const bool additions = !task.weight && task.op != Operator::mixed;
  for (int column = 0; column < task.width; column += K * units) {
    block.columns = task.width - column < K * units ? task.width - column : K * units;
    block.units = units_of<K>(block.columns);
    Values<K, A>*y = values, *next = values + nodes * units;
    block.row_of = Quotient(block.units);
    for (int i = threadIdx.x; i < nodes * block.units; i += blockDim.x) {
      const int v = block.row_of.of(i), c = i - v * block.units;
      const A right = task.op == Operator::symmetric ? block.scale[v] : A{1};
      const int at = v * task.width + column + c;
      const S* const from = x + at;
      S *const to = out + at, row[K] = {};
      for (int k = 0; k < K; ++k)
        if (c + k * block.units < block.columns) row[k] = from[k * block.units];
      Values<K, A> source;
      for (int k = 0; k < K; ++k) {
        if (c + k * block.units < block.columns) to[k * block.units] = row[k];
        source.at[k] = right * widened(row[k]);
      }
      y[v * units + c] = source;
    }
    __syncthreads();
    for (int64_t r = 1; r <= task.hops; ++r) {
      Values<K, A>* const to = r == task.hops ? nullptr : next;
      if (additions)
        hop_in_block<true>(block, y, to, out + r * plane + column);
      else
        hop_in_block<false>(block, y, to, out + r * plane + column);
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
    const int64_t nodes = last - first, begin = task.csr.begin(first);
    const int units = levels.fit.units_in(levels.bytes[level], nodes, task.csr.begin(last) - begin);
    if (units > 0) powers_of_graph<K, S, A>(task, first, static_cast<int>(nodes), begin, units);
  }
}

}  // namespace
}  // namespace spin_fast

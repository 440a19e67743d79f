// One hop over the rows of a graph that is too large for shared memory, and over those of every gradient.
//
// Layout: `in`, `add`, `out` row-major [N, d]. Parallel axis: rows and columns; a thread takes a row of at most
// `light_arcs` arcs and up to K of its columns, `units` apart, so that neighbouring threads are at neighbouring columns
// whatever the width and the alignment of a row. Longer rows are cut into pieces of `piece_arcs`, and teams of lanes
// take one piece after the other: a hub is not one warp's alone. Accumulator: double, rounded once; gathering
// neighbours takes longer than converting them. A row is added up in an order that depends on its length and the width
// alone.
#pragma once

#include "device.h"

namespace spin_fast {
namespace {

using Count = unsigned long long;  // what atomicAdd takes

constexpr int light_arcs = 32;
constexpr int64_t piece_arcs = 2048;

// An adjacency with indices of one of two types; the pointers of the other one are null.
struct Csr {
  const int32_t *narrow_indptr, *narrow_indices;
  const int64_t *wide_indptr, *wide_indices;

  __device__ int64_t begin(int64_t v) const { return wide_indptr ? wide_indptr[v] : narrow_indptr[v]; }
  __device__ int64_t neighbour(int64_t e) const { return wide_indices ? wide_indices[e] : narrow_indices[e]; }
};

// adj, rw, sym, sym+adj: Ā[v, u] is A[v, u] times 1, scale[v], scale[v] scale[u], scale[v] scale[u] + 1.
enum class Operator { plain, row, symmetric, mixed };

// The sum of a row may be negative: the host cannot refuse it without waiting. Then the scale under `symmetric` is NaN,
// and so is all that it is multiplied with: that row, and what gathers from it.
__device__ inline double scale_of(Operator op, double degree) {
  if (degree == 0) return 0;
  return op == Operator::row ? 1 / degree : rsqrt(degree);
}

template <int K>
__host__ __device__ int units_of(int64_t width) {
  return static_cast<int>((width + K - 1) / K);
}

// Of c, c + units, .. (K columns) those below width.
template <int K>
__device__ int columns_of(int c, int units, int width) {
  int columns = 0;
  for (int k = 0; k < K; ++k) columns += c + k * units < width;
  return columns;
}

// Lanes that take a row of many arcs together: `ways` share the arcs, and as many times `side` are at different
// columns.
struct Team {
  int ways, side;

  __host__ __device__ Team(int width, int units) : ways(width <= 16 ? 8 : 4), side(1) {
    while (side < units && side * ways < warp_size) side *= 2;
  }
  __host__ __device__ int lanes() const { return ways * side; }
  __device__ int way() const { return static_cast<int>(threadIdx.x) % lanes() / side; }
  __device__ int column() const { return static_cast<int>(threadIdx.x) % side; }

  // The sums of all ways; every lane has them.
  template <int K>
  __device__ void add_up(double (&sum)[K]) const {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const unsigned mates = (all_lanes >> (warp_size - lanes())) << (lane / lanes() * lanes());
    for (int step = side; step < lanes(); step *= 2)
      for (int k = 0; k < K; ++k) sum[k] += __shfl_xor_sync(mates, sum[k], step);
  }
};

// ---- Which rows

struct Run {
  int64_t begin, end;
};

// The rows that are taken hop by hop: `runs` of at most `each`, whose number only the device knows, or all nodes.
struct Rows {
  const Run* runs;
  const Count* count;
  int64_t nodes, each;

  __device__ int64_t blocks() const { return runs ? static_cast<int64_t>(*count) : (nodes + each - 1) / each; }
  __device__ Run block(int64_t b) const {
    if (runs) return runs[b];
    return {b * each, (b + 1) * each < nodes ? (b + 1) * each : nodes};
  }
};

struct HeavyPiece {
  int64_t row, begin, end;  // arcs
  int64_t slot;             // in `partial`, or -1 where it is the whole row
};

struct LongRow {
  int64_t row, slot, pieces;
};

// What is to be done beside the light rows. In whatever order the pieces are listed, slots of a row follow its arcs.
struct Heavy {
  HeavyPiece* pieces;
  LongRow* long_rows;
  double* partial;  // [slots, d]
  Count* counts;    // of pieces, slots, long rows
};

// One thread per row: lists the pieces of heavy rows and, where `scale` is given, scales each row by its degree.
__global__ void __launch_bounds__(256) cut_kernel(Csr csr, Rows rows, Operator op, double* scale, Heavy heavy) {
  const int64_t blocks = rows.blocks();
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Run run = rows.block(b);
    for (int64_t v = run.begin + threadIdx.x; v < run.end; v += blockDim.x) {
      const int64_t begin = csr.begin(v), end = csr.begin(v + 1);
      if (scale) scale[v] = scale_of(op, static_cast<double>(end - begin));
      if (end - begin <= light_arcs) continue;
      const int64_t pieces = (end - begin + piece_arcs - 1) / piece_arcs;
      const auto at = static_cast<int64_t>(atomicAdd(heavy.counts, static_cast<Count>(pieces)));
      if (pieces == 1) {
        heavy.pieces[at] = {v, begin, end, -1};
        continue;
      }
      const auto slot = static_cast<int64_t>(atomicAdd(heavy.counts + 1, static_cast<Count>(pieces)));
      heavy.long_rows[atomicAdd(heavy.counts + 2, Count{1})] = {v, slot, pieces};
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t from = begin + p * piece_arcs;
        heavy.pieces[at + p] = {v, from, from + piece_arcs < end ? from + piece_arcs : end, slot + p};
      }
    }
  }
}

// ---- What is summed: `sum` adds every step-th arc of [begin, end), of row v; `store` takes the sum of a column.

// out = Ā in (+ add). Of half precision `out` are the values that the next hop reads, and `stored` what is kept.
template <class S>
struct Gather {
  using V = Compute<S>;
  Csr csr;
  const V* weight;             // [E], or null for ones
  const double *left, *right;  // [N], or null for ones
  bool mixed;                  // left right + 1
  int width;                   // d
  const int64_t* first;        // the node that in, add and out begin with, or null for 0
  const V *in, *add;           // add may be null
  V* out;
  S* stored;

  // Lets in, add and out begin with node 0.
  __device__ void place() {
    const int64_t skip = first ? *first * width : 0;
    in -= skip;
    out -= skip;
    if (add) add -= skip;
    if (sizeof(S) == 2) stored -= skip;
  }

  static constexpr int most_columns = 4;  // of a thread

  template <int K>
  __device__ void sum(int64_t v, int64_t begin, int64_t end, int step, int c, int units, double (&sum)[K]) const {
    const int columns = columns_of<K>(c, units, width);
    const double own = mixed ? left[v] : 1;
#pragma unroll 2
    for (int64_t e = begin; e < end; e += step) {
      const int64_t u = csr.neighbour(e);
      double factor = right ? right[u] : 1;
      if (mixed) factor = own * factor + 1;
      if (weight) factor *= static_cast<double>(weight[e]);
      const V* row = in + u * width + c;
      for (int k = 0; k < K; ++k)
        if (k < columns) sum[k] += factor * static_cast<double>(row[k * units]);
    }
  }

  __device__ void store(int64_t v, int column, double sum) const {
    const int64_t at = v * width + column;
    if (left && !mixed) sum *= left[v];
    if (add) sum += static_cast<double>(add[at]);
    out[at] = static_cast<V>(sum);
    if constexpr (sizeof(S) == 2) stored[at] = Narrowed<S>::of(static_cast<V>(sum));
  }
};

// The scales of rows by the sums of their weights.
template <class V>
struct Degrees {
  const V* weight;
  Operator op;
  double* scale;
  static constexpr int width = 1, most_columns = 1;

  __device__ void place() {}
  template <int K>
  __device__ void sum(int64_t, int64_t begin, int64_t end, int step, int, int, double (&sum)[K]) const {
    for (int64_t e = begin; e < end; e += step) sum[0] += static_cast<double>(weight[e]);
  }
  __device__ void store(int64_t v, int, double sum) const { scale[v] = scale_of(op, sum); }
};

// All rows, but of long ones the partial sums only.
template <int K, class Task>
__global__ void __launch_bounds__(256) hop_kernel(Task task, Csr csr, Rows rows, Heavy heavy) {
  task.place();
  const int width = task.width, units = units_of<K>(width);
  const Team team(width, units);
  const int shares = (units + team.side - 1) / team.side;  // of a piece: columns that a team takes at once
  const int64_t work = static_cast<int64_t>(heavy.counts[0]) * shares;
  const int64_t teams = blockDim.x / team.lanes();
  for (int64_t i = blockIdx.x * teams + threadIdx.x / team.lanes(); i < work; i += gridDim.x * teams) {
    const HeavyPiece piece = heavy.pieces[i / shares];
    const int c = static_cast<int>(i % shares) * team.side + team.column();
    double sum[K] = {};
    if (c < units) task.sum(piece.row, piece.begin + team.way(), piece.end, team.ways, c, units, sum);
    team.add_up(sum);
    if (c >= units || team.way() != 0) continue;
    for (int k = 0; k < K; ++k) {
      const int column = c + k * units;
      if (column >= width) break;
      if (piece.slot < 0)
        task.store(piece.row, column, sum[k]);
      else
        heavy.partial[piece.slot * width + column] = sum[k];
    }
  }
  const int64_t blocks = rows.blocks();
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Run run = rows.block(b);
    const int items = static_cast<int>(run.end - run.begin) * units;
    for (int i = threadIdx.x; i < items; i += blockDim.x) {
      const int row = i / units, c = i - row * units;
      const int64_t v = run.begin + row, begin = csr.begin(v), end = csr.begin(v + 1);
      if (end - begin > light_arcs) continue;
      double sum[K] = {};
      task.sum(v, begin, end, 1, c, units, sum);
      for (int k = 0; k < K; ++k)
        if (c + k * units < width) task.store(v, c + k * units, sum[k]);
    }
  }
}

// One thread per long row and column.
template <class Task>
__global__ void __launch_bounds__(256) long_rows_kernel(Task task, Heavy heavy) {
  task.place();
  const int64_t width = task.width, items = static_cast<int64_t>(heavy.counts[2]) * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < items; i += step) {
    const LongRow row = heavy.long_rows[i / width];
    const double* partial = heavy.partial + row.slot * width + i % width;
    double sum = 0;
#pragma unroll 8
    for (int64_t p = 0; p < row.pieces; ++p) sum += partial[p * width];
    task.store(row.row, static_cast<int>(i % width), sum);
  }
}

// The rows of x themselves; `plane` as `out` in Gather.
template <class S>
__global__ void __launch_bounds__(256)
    first_kernel(Rows rows, const int64_t* first, int64_t width, const S* x, Compute<S>* plane, S* out) {
  const int64_t skip = first ? *first * width : 0, blocks = rows.blocks();
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Run run = rows.block(b);
    for (int64_t i = run.begin * width + threadIdx.x; i < run.end * width; i += blockDim.x) {
      out[i - skip] = x[i];
      if constexpr (sizeof(S) == 2) plane[i - skip] = widened(x[i]);
    }
  }
}

}  // namespace
}  // namespace spin_fast

// One hop as a product of a sparse and a dense matrix: of graphs that are too large for shared memory, and of
// gradients.
//
// Layout: `in`, `add`, `out` row-major [N, d]. Parallel axis: rows and columns; a thread takes a row of at most
// `light_edges` edges and up to K of its columns (Columns). Heavier rows are cut into pieces of `piece_edges`, each
// taken by a team of lanes, so that a hub is spread over many warps. Accumulator: double, rounded once; gathering
// neighbours takes longer than converting them. A row is added up in an order that depends on its length and the width
// alone.
#pragma once

#include "device.h"

namespace spin_fast {
namespace {

using Count = unsigned long long;  // what atomicAdd takes

constexpr int light_edges = 32;
constexpr int64_t piece_edges = 2048;

struct Csr {
  Integers indptr, indices;
};

struct Adjacency {
  Csr csr;
  const void* weight;  // [E] or null, in Compute<S> of the values
  Operator op;
  int64_t nodes, edges;
  const int64_t* ptr;  // [graphs + 1] or null
  int64_t graphs;
};

// The host cannot refuse a negative row sum without waiting for the device. Its scale under `sym` is NaN, and so
// are that row and all rows that gather from it.
__device__ inline double scale_of(Operator op, double degree) {
  if (degree == 0) return 0;
  return op == Operator::rw ? 1 / degree : rsqrt(degree);
}

// A row is divided into units of K columns, one thread each.
template <int K>
__host__ __device__ int units_of(int64_t width) {
  return static_cast<int>((width + K - 1) / K);
}

// The columns of unit c: K adjacent ones if rows are aligned and consist of whole packs; else `units` apart, so that
// neighbouring threads read neighbouring columns whatever the width and the alignment of a row.
template <int K, bool Aligned>
struct Columns {
  int at[K], count;

  __device__ Columns(int c, int units, int width) : count(0) {
    for (int k = 0; k < K; ++k) {
      const int column = Aligned ? c * K + k : c + k * units;
      count += column < width;
      at[k] = column < width ? column : width - 1;  // clamped: read but not stored
    }
  }
  template <class T>
  __device__ void load(const T* row, T (&values)[K]) const {
    if constexpr (Aligned) {
      const Pack<T, K> pack = spin_fast::load<K>(row + at[0]);
      for (int k = 0; k < K; ++k) values[k] = pack.at[k];
    } else {
      for (int k = 0; k < K; ++k) values[k] = row[at[k]];
    }
  }
  template <class T>
  __device__ void store(const T (&values)[K], T* row) const {
    if constexpr (Aligned) {
      Pack<T, K> pack;
      for (int k = 0; k < K; ++k) pack.at[k] = values[k];
      spin_fast::store(row + at[0], pack);
    } else {
      for (int k = 0; k < K; ++k)
        if (k < count) row[at[k]] = values[k];
    }
  }
};

// The lanes that take a heavy row together: `edge_lanes` divide the edges, and as many times `column_lanes` the
// columns; powers of two. The teams of a warp run in lockstep: a shuffle of all lanes costs a fraction of one whose
// mask the compiler does not know.
struct Team {
  int log_edge_lanes, log_column_lanes;

  __host__ __device__ Team(int width, int units) : log_edge_lanes(width <= 16 ? 3 : 2), log_column_lanes(0) {
    while (column_lanes() < units && lanes() < warp_size) ++log_column_lanes;
  }
  __host__ __device__ int edge_lanes() const { return 1 << log_edge_lanes; }
  __host__ __device__ int column_lanes() const { return 1 << log_column_lanes; }
  __host__ __device__ int log_lanes() const { return log_edge_lanes + log_column_lanes; }
  __host__ __device__ int lanes() const { return 1 << log_lanes(); }
  __device__ int teams_of_block() const { return static_cast<int>(blockDim.x) >> log_lanes(); }
  __device__ int first_of_warp() const { return static_cast<int>(threadIdx.x / warp_size * warp_size) >> log_lanes(); }
  __device__ int team_of_warp() const { return static_cast<int>(threadIdx.x % warp_size) >> log_lanes(); }
  __device__ int edge_lane() const { return static_cast<int>(threadIdx.x) >> log_column_lanes & (edge_lanes() - 1); }
  __device__ int column_lane() const { return static_cast<int>(threadIdx.x) & (column_lanes() - 1); }

  // The sums over the edge lanes, returned to all of them.
  template <int K>
  __device__ void add_up(double (&sum)[K]) const {
    for (int step = column_lanes(); step < lanes(); step *= 2)
      for (int k = 0; k < K; ++k) sum[k] += __shfl_xor_sync(all_lanes, sum[k], step);
  }
};

using OneColumn = Columns<1, false>;

// ---- Which rows

struct RowRange {
  int64_t begin, end;
};

// The rows that are taken hop by hop, in ranges of at most `each`: those listed, whose number only the device knows, or
// all nodes.
struct Rows {
  const RowRange* ranges;  // or null for all nodes
  const Count* count;
  int64_t nodes, each;
  int64_t most;  // ranges

  __device__ int64_t num_ranges() const { return ranges ? static_cast<int64_t>(*count) : (nodes + each - 1) / each; }
  __device__ RowRange range(int64_t i) const {
    if (ranges) return ranges[i];
    return {i * each, (i + 1) * each < nodes ? (i + 1) * each : nodes};
  }
};

struct HeavyPiece {
  int64_t row, begin, end;  // edges
  int64_t partial;          // where its sums go, a row of Heavy::partial; -1 if it is the whole row
};

struct LongRow {
  int64_t row, partial, pieces;
};

// The rows of more than `light_edges` edges, in pieces, and those of more than one piece. The order of the pieces does
// not matter: the partial sums of a row follow the order of its edges.
struct Heavy {
  HeavyPiece* pieces;
  LongRow* long_rows;
  double* partial;  // [partial sums, d]
  Count* counts;    // of pieces, partial sums, long rows
};

// One thread per row: lists the pieces of heavy rows and, unless `scale` is null, computes each scale from the degree.
__global__ void __launch_bounds__(256) cut_kernel(Csr csr, Rows rows, Operator op, double* scale, Heavy heavy) {
  const int64_t ranges = rows.num_ranges();
  for (int64_t b = blockIdx.x; b < ranges; b += gridDim.x) {
    const RowRange range = rows.range(b);
    for (int64_t v = range.begin + threadIdx.x; v < range.end; v += blockDim.x) {
      const int64_t begin = csr.indptr[v], end = csr.indptr[v + 1];
      if (scale) scale[v] = scale_of(op, static_cast<double>(end - begin));
      if (end - begin <= light_edges) continue;
      const int64_t pieces = (end - begin + piece_edges - 1) / piece_edges;
      if (pieces == 1) {  // the usual case: the compiler combines additions of 1 into one per warp
        heavy.pieces[atomicAdd(heavy.counts, Count{1})] = {v, begin, end, -1};
        continue;
      }
      const auto at = static_cast<int64_t>(atomicAdd(heavy.counts, static_cast<Count>(pieces)));
      const auto partial = static_cast<int64_t>(atomicAdd(heavy.counts + 1, static_cast<Count>(pieces)));
      heavy.long_rows[atomicAdd(heavy.counts + 2, Count{1})] = {v, partial, pieces};
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t from = begin + p * piece_edges;
        heavy.pieces[at + p] = {v, from, from + piece_edges < end ? from + piece_edges : end, partial + p};
      }
    }
  }
}

// ---- What is summed. sum(): adds every step-th edge of [begin, end), of row v; store(): takes the sums of its
// columns.

// out = Ā in (+ add). In half precision, the next hop reads the unrounded `out`, and `stored` is the result.
template <class S>
struct Gather {
  using V = Compute<S>;
  Csr csr;
  const V* weight;             // [E], or null for ones
  const double *left, *right;  // [N], or null for ones
  bool mixed;                  // left right + 1
  int width;                   // d
  const int64_t* first;        // the first node of in, add and out, or null for 0
  const V *in, *add;           // add may be null
  V* out;
  S* stored;

  // Shifts in, add and out, so that nodes index them.
  __device__ void shift() {
    const int64_t skip = first ? *first * width : 0;
    in -= skip;
    out -= skip;
    if (add) add -= skip;
    if (sizeof(S) == 2) stored -= skip;
  }

  static constexpr int most_columns = 4;  // of a thread

  bool aligned() const {
    const auto at = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
    constexpr size_t pack = alignof(Pack<V, most_columns>);
    return width % most_columns == 0 && at(in, pack) && at(add, pack) && at(out, pack) &&
           at(stored, alignof(Pack<S, most_columns>));
  }

  template <int K, bool Aligned>
  __device__ void sum(int64_t v, int64_t begin, int64_t end, int step, const Columns<K, Aligned>& columns,
                      double (&sum)[K]) const {
    // Edges whose loads are in flight at once, as registers allow: compilers would wait for each.
    constexpr int together = sizeof(V) == 4 && (K == 1 || Aligned) ? 4 : 2;
    const double own = mixed ? left[v] : 1, plain = mixed ? 1 : 0;
    const int edges = static_cast<int>(end - begin);
    for (int i = 0; i < edges; i += together * step) {
      int64_t u[together] = {};
      double factor[together] = {};
      V times[together] = {}, values[together][K] = {};
      for (int j = 0; j < together; ++j)
        if (i + j * step < edges) u[j] = csr.indices[begin + i + j * step];
      for (int j = 0; j < together; ++j)
        if (i + j * step < edges) {
          factor[j] = right ? right[u[j]] : 1;
          times[j] = weight ? weight[begin + i + j * step] : V{1};
          columns.load(in + u[j] * width, values[j]);
        }
      for (int j = 0; j < together; ++j)
        if (i + j * step < edges) {
          const double product = (own * factor[j] + plain) * static_cast<double>(times[j]);
          for (int k = 0; k < K; ++k) sum[k] += product * static_cast<double>(values[j][k]);
        }
    }
  }

  template <int K, bool Aligned>
  __device__ void store(int64_t v, const Columns<K, Aligned>& columns, const double (&sum)[K]) const {
    const double scale = left && !mixed ? left[v] : 1;
    V added[K] = {}, power[K];
    if (add) columns.load(add + v * width, added);
    for (int k = 0; k < K; ++k) power[k] = static_cast<V>(scale * sum[k] + static_cast<double>(added[k]));
    columns.store(power, out + v * width);
    if constexpr (sizeof(S) == 2) {
      S rounded[K];
      for (int k = 0; k < K; ++k) rounded[k] = narrowed<S>(power[k]);
      columns.store(rounded, stored + v * width);
    }
  }
};

// The scales of rows by the sums of their weights.
template <class V>
struct Degrees {
  const V* weight;
  Operator op;
  double* scale;
  static constexpr int width = 1, most_columns = 1;

  bool aligned() const { return false; }
  __device__ void shift() {}
  __device__ void sum(int64_t, int64_t begin, int64_t end, int step, const OneColumn&, double (&sum)[1]) const {
    for (int64_t e = begin; e < end; e += step) sum[0] += static_cast<double>(weight[e]);
  }
  __device__ void store(int64_t v, const OneColumn&, const double (&sum)[1]) const { scale[v] = scale_of(op, sum[0]); }
};

// All rows; of long rows only the partial sums. Registers are limited to those of three resident blocks: more would
// leave few warps, fewer would not hold the loads in flight.
template <int K, bool Aligned, class Task>
__global__ void __launch_bounds__(256, 3) hop_kernel(Task task, Csr csr, Rows rows, Heavy heavy) {
  task.shift();
  const int width = task.width, units = units_of<K>(width);
  const Team team(width, units);
  const int tiles = (units + team.column_lanes() - 1) / team.column_lanes();  // of columns, one team each
  const int64_t work = static_cast<int64_t>(heavy.counts[0]) * tiles;
  const int64_t teams = team.teams_of_block();
  for (int64_t first = blockIdx.x * teams + team.first_of_warp(); first < work; first += gridDim.x * teams) {
    const int64_t i = first + team.team_of_warp();
    HeavyPiece piece = {};
    int c = units;
    if (i < work) {
      piece = heavy.pieces[i / tiles];
      c = static_cast<int>(i % tiles) * team.column_lanes() + team.column_lane();
    }
    const Columns<K, Aligned> columns(c, units, width);
    double sum[K] = {};
    if (c < units) task.sum(piece.row, piece.begin + team.edge_lane(), piece.end, team.edge_lanes(), columns, sum);
    team.add_up(sum);
    if (c >= units || team.edge_lane() != 0) continue;
    if (piece.partial < 0)
      task.store(piece.row, columns, sum);
    else
      columns.store(sum, heavy.partial + piece.partial * width);
  }
  const int64_t ranges = rows.num_ranges();
  for (int64_t b = blockIdx.x; b < ranges; b += gridDim.x) {
    const RowRange range = rows.range(b);
    const int items = static_cast<int>(range.end - range.begin) * units;
    for (int i = threadIdx.x; i < items; i += blockDim.x) {
      const int row = i / units, c = i - row * units;
      const int64_t v = range.begin + row, begin = csr.indptr[v], end = csr.indptr[v + 1];
      if (end - begin > light_edges) continue;
      const Columns<K, Aligned> columns(c, units, width);
      double sum[K] = {};
      task.sum(v, begin, end, 1, columns, sum);
      task.store(v, columns, sum);
    }
  }
}

// One thread per long row and column.
template <class Task>
__global__ void __launch_bounds__(256) long_rows_kernel(Task task, Heavy heavy) {
  task.shift();
  const int64_t width = task.width, items = static_cast<int64_t>(heavy.counts[2]) * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = thread_index(); i < items; i += step) {
    const LongRow row = heavy.long_rows[i / width];
    const double* partial = heavy.partial + row.partial * width + i % width;
    double sum[1] = {};
#pragma unroll 8
    for (int64_t p = 0; p < row.pieces; ++p) sum[0] += partial[p * width];
    task.store(row.row, OneColumn(static_cast<int>(i % width), 1, task.width), sum);
  }
}

// Copies x to `out` and, in half precision, unrounded to `plane`, which the first hop reads.
template <class S>
__global__ void __launch_bounds__(256)
    copy_kernel(Rows rows, const int64_t* first, int64_t width, const S* __restrict__ x, Compute<S>* plane, S* out) {
  const int64_t skip = first ? *first * width : 0, ranges = rows.num_ranges();
  for (int64_t b = blockIdx.x; b < ranges; b += gridDim.x) {
    const RowRange range = rows.range(b);
#pragma unroll 4
    for (int64_t i = range.begin * width + threadIdx.x; i < range.end * width; i += blockDim.x) {
      out[i - skip] = x[i];
      if constexpr (sizeof(S) == 2) plane[i - skip] = widened(x[i]);
    }
  }
}

}  // namespace
}  // namespace spin_fast

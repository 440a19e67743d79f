// One hop over the rows of a graph that is too large for shared memory, and over those of every gradient.
//
// Layout: `in`, `add`, `out` row-major [N, d]. Parallel axis: rows and columns; a thread takes a row of at most
// `light_edges` edges and up to K of its columns (Columns). Longer rows are cut into pieces of `piece_edges`, and teams
// of lanes take one piece after the other: a hub is not one warp's alone. Accumulator: double, rounded once; gathering
// neighbours takes longer than converting them. A row is added up in an order that depends on its length and the width
// alone.
#pragma once

#include "device.h"

namespace spin_fast {
namespace {

using Count = unsigned long long;  // what atomicAdd takes

constexpr int light_edges = 32;
constexpr int64_t piece_edges = 2048;

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

// Neighbouring values, of one thread: one load or store of up to 16 bytes.
template <int K, class T>
struct alignas(K * sizeof(T) < 16 ? K * sizeof(T) : 16) Values {
  T at[K];
};

// The columns of a thread: K side by side where rows are aligned and whole Values; else `units` apart, so that
// neighbouring threads are at neighbouring columns whatever the width and the alignment of a row.
template <int K, bool Aligned>
struct Columns {
  int at[K], count;

  __device__ Columns(int c, int units, int width) : count(0) {
    for (int k = 0; k < K; ++k) {
      const int column = Aligned ? c * K + k : c + k * units;
      count += column < width;
      at[k] = column < width ? column : width - 1;  // is read too, and not kept
    }
  }
  template <class T>
  __device__ void load(const T* row, T (&values)[K]) const {
    if constexpr (Aligned) {
      const auto side_by_side = *reinterpret_cast<const Values<K, T>*>(row + at[0]);
      for (int k = 0; k < K; ++k) values[k] = side_by_side.at[k];
    } else {
      for (int k = 0; k < K; ++k) values[k] = row[at[k]];
    }
  }
  template <class T>
  __device__ void store(const T (&values)[K], T* row) const {
    if constexpr (Aligned) {
      Values<K, T> side_by_side;
      for (int k = 0; k < K; ++k) side_by_side.at[k] = values[k];
      *reinterpret_cast<Values<K, T>*>(row + at[0]) = side_by_side;
    } else {
      for (int k = 0; k < K; ++k)
        if (k < count) row[at[k]] = values[k];
    }
  }
};

// Lanes that take a row of many edges together: `ways` share the edges, and as many times `side` are at different
// columns; powers of two. The teams of a warp do everything at the same time: a shuffle of all lanes costs a fraction
// of one whose mask the compiler does not know.
struct Team {
  int log_ways, log_side;

  __host__ __device__ Team(int width, int units) : log_ways(width <= 16 ? 3 : 2), log_side(0) {
    while (side() < units && lanes() < warp_size) ++log_side;
  }
  __host__ __device__ int ways() const { return 1 << log_ways; }
  __host__ __device__ int side() const { return 1 << log_side; }
  __host__ __device__ int lanes() const { return 1 << (log_ways + log_side); }
  __device__ int in_block() const { return static_cast<int>(blockDim.x) >> (log_ways + log_side); }  // teams
  __device__ int first_of_warp() const {
    return static_cast<int>(threadIdx.x / warp_size * warp_size) >> (log_ways + log_side);
  }
  __device__ int of_warp() const { return static_cast<int>(threadIdx.x % warp_size) >> (log_ways + log_side); }
  __device__ int way() const { return static_cast<int>(threadIdx.x) >> log_side & (ways() - 1); }
  __device__ int column() const { return static_cast<int>(threadIdx.x) & (side() - 1); }

  // The sums of all ways; every lane has them.
  template <int K>
  __device__ void add_up(double (&sum)[K]) const {
    for (int step = side(); step < lanes(); step *= 2)
      for (int k = 0; k < K; ++k) sum[k] += __shfl_xor_sync(all_lanes, sum[k], step);
  }
};

using OneColumn = Columns<1, false>;

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
  int64_t row, begin, end;  // edges
  int64_t slot;             // in `partial`, or -1 where it is the whole row
};

struct LongRow {
  int64_t row, slot, pieces;
};

// What is to be done beside the light rows. In whatever order the pieces are listed, slots of a row follow its edges.
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
      if (end - begin <= light_edges) continue;
      const int64_t pieces = (end - begin + piece_edges - 1) / piece_edges;
      if (pieces == 1) {  // most are: of adding 1, the compiler makes one addition a warp
        heavy.pieces[atomicAdd(heavy.counts, Count{1})] = {v, begin, end, -1};
        continue;
      }
      const auto at = static_cast<int64_t>(atomicAdd(heavy.counts, static_cast<Count>(pieces)));
      const auto slot = static_cast<int64_t>(atomicAdd(heavy.counts + 1, static_cast<Count>(pieces)));
      heavy.long_rows[atomicAdd(heavy.counts + 2, Count{1})] = {v, slot, pieces};
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t from = begin + p * piece_edges;
        heavy.pieces[at + p] = {v, from, from + piece_edges < end ? from + piece_edges : end, slot + p};
      }
    }
  }
}

// ---- What is summed: `sum` adds every step-th edge of [begin, end), of row v; `store` takes the sums of its columns.

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

  bool aligned() const {
    const auto at = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
    using Group = Values<most_columns, V>;
    return width % most_columns == 0 && at(in, alignof(Group)) && at(add, alignof(Group)) && at(out, alignof(Group)) &&
           at(stored, alignof(Values<most_columns, S>));
  }

  template <int K, bool Aligned>
  __device__ void sum(int64_t v, int64_t begin, int64_t end, int step, const Columns<K, Aligned>& columns,
                      double (&sum)[K]) const {
    // Edges whose loads are on their way at once, as registers allow: compilers would wait for each.
    constexpr int together = sizeof(V) == 4 && (K == 1 || Aligned) ? 4 : 2;
    const double own = mixed ? left[v] : 1, plain = mixed ? 1 : 0;
    const int edges = static_cast<int>(end - begin);
    for (int i = 0; i < edges; i += together * step) {
      int64_t u[together] = {};
      double factor[together] = {};
      V times[together] = {}, values[together][K] = {};
      for (int j = 0; j < together; ++j)
        if (i + j * step < edges) u[j] = csr.neighbour(begin + i + j * step);
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
      for (int k = 0; k < K; ++k) rounded[k] = Narrowed<S>::of(power[k]);
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
  __device__ void place() {}
  __device__ void sum(int64_t, int64_t begin, int64_t end, int step, const OneColumn&, double (&sum)[1]) const {
    for (int64_t e = begin; e < end; e += step) sum[0] += static_cast<double>(weight[e]);
  }
  __device__ void store(int64_t v, const OneColumn&, const double (&sum)[1]) const { scale[v] = scale_of(op, sum[0]); }
};

// All rows, but of long ones the partial sums only. Registers for three blocks on a multiprocessor: more would leave
// few warps, fewer would not hold the loads that are on their way.
template <int K, bool Aligned, class Task>
__global__ void __launch_bounds__(256, 3) hop_kernel(Task task, Csr csr, Rows rows, Heavy heavy) {
  task.place();
  const int width = task.width, units = units_of<K>(width);
  const Team team(width, units);
  const int shares = (units + team.side() - 1) / team.side();  // of a piece: columns that a team takes at once
  const int64_t work = static_cast<int64_t>(heavy.counts[0]) * shares;
  const int64_t teams = team.in_block();
  for (int64_t first = blockIdx.x * teams + team.first_of_warp(); first < work; first += gridDim.x * teams) {
    const int64_t i = first + team.of_warp();
    HeavyPiece piece = {};
    int c = units;
    if (i < work) {
      piece = heavy.pieces[i / shares];
      c = static_cast<int>(i % shares) * team.side() + team.column();
    }
    const Columns<K, Aligned> columns(c, units, width);
    double sum[K] = {};
    if (c < units) task.sum(piece.row, piece.begin + team.way(), piece.end, team.ways(), columns, sum);
    team.add_up(sum);
    if (c >= units || team.way() != 0) continue;
    if (piece.slot < 0)
      task.store(piece.row, columns, sum);
    else
      columns.store(sum, heavy.partial + piece.slot * width);
  }
  const int64_t blocks = rows.blocks();
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Run run = rows.block(b);
    const int items = static_cast<int>(run.end - run.begin) * units;
    for (int i = threadIdx.x; i < items; i += blockDim.x) {
      const int row = i / units, c = i - row * units;
      const int64_t v = run.begin + row, begin = csr.begin(v), end = csr.begin(v + 1);
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
  task.place();
  const int64_t width = task.width, items = static_cast<int64_t>(heavy.counts[2]) * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < items; i += step) {
    const LongRow row = heavy.long_rows[i / width];
    const double* partial = heavy.partial + row.slot * width + i % width;
    double sum[1] = {};
#pragma unroll 8
    for (int64_t p = 0; p < row.pieces; ++p) sum[0] += partial[p * width];
    task.store(row.row, OneColumn(static_cast<int>(i % width), 1, task.width), sum);
  }
}

// The rows of x themselves; `plane` as `out` in Gather.
template <class S>
__global__ void __launch_bounds__(256)
    first_kernel(Rows rows, const int64_t* first, int64_t width, const S* __restrict__ x, Compute<S>* plane, S* out) {
  const int64_t skip = first ? *first * width : 0, blocks = rows.blocks();
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Run run = rows.block(b);
#pragma unroll 4
    for (int64_t i = run.begin * width + threadIdx.x; i < run.end * width; i += blockDim.x) {
      out[i - skip] = x[i];
      if constexpr (sizeof(S) == 2) plane[i - skip] = widened(x[i]);
    }
  }
}

}  // namespace
}  // namespace spin_fast

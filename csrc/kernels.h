// Storage types, operators and segments, which CUDA kernels take too, and the interface of the CPU kernels: raw
// pointers and plain structs, no torch header. Letters as in spin_fast/ops.
//
// cpu/{baseline,avx2,avx512}.cpp each compile cpu/*.inl for their instruction set. The structs have no member
// functions: of an inline function in all three the linker would keep one, for whatever instruction set.
#pragma once

#include <cstdint>

namespace spin_fast {

// Storage types of features, z and dz; everything else is in Compute<S>.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class S>
struct ComputeOf {
  using Type = float;
};
template <>
struct ComputeOf<double> {
  using Type = double;
};
template <class S>
using Compute = typename ComputeOf<S>::Type;

constexpr int64_t cache_line = 64;  // bytes

// One hop, out = Ā in (+ add), with Ā[v, u] = A[v, u] * (left[v] * right[u] + plain).
template <class T, class I>
struct Hop {
  const I* indptr;      // [N + 1]
  const I* indices;     // [E]
  const T* weight;      // [E], or null for ones
  const double* left;   // [N], or null (with right) where only `plain` counts
  const double* right;  // [N]
  double plain;
  int64_t width;  // d
  int64_t edges;  // E
};

// Ā[v, u] is A[v, u] times 1, 1 / degree_v, 1 / sqrt(degree_v degree_u), or the last one + 1.
enum class Operator { adj, rw, sym, sym_adj };

// All powers of some graphs.
template <class T, class I>
struct Powers {
  Hop<Compute<T>, I> hop;  // graphs in cache read left and right only if `by_edge`
  Operator op;
  bool by_edge;        // each edge has a factor of its own; else the factors follow from the degrees
  int64_t nodes;       // N
  int64_t hops;        // R
  const T* x;          // [N, d]
  T* out;              // [R + 1, N, d]
  int64_t full_width;  // columns of the whole rows, of which x may have some; sums are rounded as theirs
  bool with_x;         // write plane 0 of `out`, too
  bool stream;         // write `out` past the caches
  bool check;  // whether indices stay inside their graph; where one does not, the kernel stops and returns false
};

// Small graphs are one chunk while their sources and edges fit these.
constexpr int64_t power_chunk_bytes = 64 << 10;
constexpr int64_t power_chunk_edges = 32 << 10;

// A graph of one feature and no more nodes than this may be taken as a matrix of bits.
constexpr int64_t dense_nodes = 1024;

// Places of a row for its neighbours, at most.
constexpr int most_places = 4;

// Memory that a chunk of so many nodes and edges takes, at most.
constexpr int64_t scratch_bytes(int64_t nodes, int64_t edges, int64_t width) {
  const int64_t stride = width > 8 ? width + 15 : 2 * width;
  constexpr int64_t bits = (dense_nodes + 4) * (dense_nodes / 8), pieces = (dense_nodes + 64) * (dense_nodes / 6);
  const int64_t dense = width == 1 ? bits + pieces + 4 * (dense_nodes + 32) * 8 : 0;
  return nodes * ((2 * stride + width + 1) * 8 + 16 + 12 * most_places) + 2 * stride * 8 + (edges + 512) * 12 + dense +
         4096;
}

// Rows of patterns that are new in a hop r. A pattern decides a node's row there: in hop 0 it is a row of x and a
// degree, then how many neighbours the node has and, in the order in which they are stored, their patterns in hop
// r - 1. A node of each is known.
template <class A>
struct PatternRows {
  const int64_t* node;     // [size], counted from `first_node`
  int64_t first_node;      // of the chunk
  int64_t size;            // patterns
  const int32_t* pattern;  // [nodes of the chunk], the patterns in hop r - 1; null in hop 0
  const A* y;              // [patterns, stride], their sources
  A* next;                 // [patterns, stride], those of hop r, or null in the last hop
  int64_t first_new;       // the number of the first new pattern
};

// Neighbours of a node whose pattern is looked up: as many as fill the key. Nodes that have more are patterns apart.
constexpr int64_t pattern_degree = most_places;

// A cache line of the table of patterns. No key is all free_key.
struct alignas(64) PatternBucket {
  static constexpr int size = 3;
  uint32_t key[size][pattern_degree];
  int32_t number[size];
  int32_t used;
};
constexpr uint32_t free_key = 0xfffffffd;

// The patterns of a hop that have been met, numbered as they came, and what finds them again.
struct KnownPatterns {
  PatternBucket* buckets;  // [bucket_mask + 1], at most half of their places taken
  uint64_t bucket_mask;
  int64_t size;  // patterns
};

// The segments of a readout in branch-major order, s = branch * graphs + graph. The entries of segment s are
//   ptr[branch * ptr_stride + graph] + branch * entry_stride  up to  ptr[... + 1] + branch * entry_stride.
// Ragged form: ptr_stride = graphs, entry_stride = 0. Dense form: ptr_stride = 0, entry_stride = N.
struct Segments {
  const int64_t* ptr;
  const int32_t* narrow_index;  // entry -> row of z, in one of two types, or both null for the identity
  const int64_t* wide_index;
  const int32_t* count;  // entry -> how often, or null for ones
  int64_t graphs;
  int64_t branches;
  int64_t ptr_stride;
  int64_t entry_stride;
  int64_t width;    // h
  int64_t rows;     // of z
  int64_t entries;  // nnz
};

// The task of one thread: the segments [begin, end) of one branch or, if `split`, the entries [first, last) of the long
// segment `begin`. `partial` receives partial sums: forward, of a split segment only, the largest logit, the softmax
// denominator and [padded h] sums; backward, of every piece, [padded h] of dw.
struct Piece {
  int64_t begin, end;
  int64_t first, last;
  bool split;
  double* partial;
};

// Memory of one thread, with rows padded to whole registers.
template <class T>
struct Scratch {
  T* rows;      // [tile_entries, padded h]
  T* w;         // [padded h]
  T* grad;      // [tile_entries, padded h]
  double* sum;  // [padded h]
};

constexpr int64_t tile_entries = 64;  // entries whose sum is in T; sums of tiles are in float64

// The entries that refer to each row of z; `place` is an entry's row, graph * branches + branch, in the readout seen as
// [G * (R + 1), h].
struct EntriesOfRow {
  const int64_t* offsets;  // [rows + 1]
  const int32_t* entries;  // [nnz]
  const int32_t* place;    // [nnz]
  int64_t branches;
  int64_t width;  // h
};

// The gradients of one call. `alpha`, `dbeta` and `dw` are null for the sum readout.
template <class S, class T = Compute<S>>
struct Gradients {
  const T* grad;             // [G, (R + 1) * h]
  const T* grad_alpha;       // [nnz] or null
  const double* from_alpha;  // per segment sum_e alpha_e grad_alpha_e, or null
  const S* z;
  const T* w;
  const T* readout;
  const T* alpha;
  T* dbeta;     // [nnz], written where there is an index
  S* dz;        // written where there is none
  bool bypass;  // dz is larger than the caches of a core: write around them
};

// A linear layer and the LeakyReLU after it; with a slope of 1 there is none. Columns are padded with zeros to a
// multiple of `column_multiple`, so that they fill whole registers of every instruction set.
template <class T>
struct Layer {
  int64_t in, out;
  int64_t below, stride;  // in and out, padded
  const T* weight;        // [in, stride]
  const T* transposed;    // [out, below], or null if no gradient goes below
  const T* bias;          // [stride]
  T slope;
};

template <class T>
struct Mlp {
  int64_t depth;
  const Layer<T>* layers;
};

constexpr int64_t column_multiple = 16;
constexpr int64_t row_multiple = 4;    // rows of a matrix product are padded to a multiple of this
constexpr int64_t mlp_tile_rows = 96;  // rows that go through an MLP together
constexpr int64_t most_layers = 8;

constexpr int64_t padded_to(int64_t multiple, int64_t n) { return (n + multiple - 1) / multiple * multiple; }

// One branch of some graphs whose distinct rows are evaluated together, and the memory for it. Its entries are those of
// the graphs' segments, one after the other.
template <class T>
struct BranchChunk {
  Mlp<T> mlp;
  const T* w;                // [stride], or null for the sum readout
  const T* x;                // [U, d], the rows of all graphs; or their values [nnz], in compressed sparse rows:
  const int32_t* row_begin;  // [U + 1] values, or null
  const int32_t* column_of;  // [nnz], the column of each value, none of them twice in a row
  int64_t rows, graphs;
  int64_t known;           // rows, the first ones, that have been through the MLP before
  bool each_once;          // each row has one entry, and row is the identity
  int64_t parts;           // rows of x that an input of the MLP consists of, side by side
  const int64_t* source;   // [rows - known, parts] -> rows of x
  const int32_t* row;      // [entries] -> rows
  const int32_t* count;    // [entries], how often, or null for ones
  const int64_t* ptr;      // [graphs + 1] -> entries
  T* const* activations;   // per layer [rows, stride]; the last is z, the others are null where none is kept
  T* inputs;               // [rows, padded d] or null: of each tile the columns that are not all 0, without gaps
  int32_t* columns;        // [tiles, d + 1], the number of these columns, and which they are
  bool all_columns;        // those that are 0 in a tile are kept, too
  T* beta;                 // [rows], ReLU(<w, z>)
  T* mass;                 // [rows], exp(beta), which may be infinite
  T *top, *scale;          // [graphs]: alpha_e = count_e exp(beta_e - top) scale
  T* readout;              // [graphs, readout_stride], already at the columns of this branch
  int64_t readout_stride;  // of the gradient too
  const T* grad;           // of the readout, likewise
  T* dz;                   // [rows, stride], the gradient of z, but for what comes through beta; not with each_once
  T* shift;                // [rows], the sum of alpha <grad, readout> over the entries; likewise
  T* dx;                   // [rows, padded d], the gradient of each row, or null
};

// Scratch memory for a tile of rows.
template <class T>
struct TileScratch {
  T* inputs;  // as in BranchChunk, of one tile, if that has none
  int32_t* columns;
  T* weight;    // [padded d, stride] of the first layer, the rows of those columns
  T* gradient;  // the same of its gradient, and a row for the bias
  T* first;     // [mlp_tile_rows, widest stride]
  T* second;
  T* dz;     // the same, as in BranchChunk, of one tile, with each_once
  T* shift;  // [mlp_tile_rows], likewise
};

// The function offset + x slope.
template <class T>
struct Affine {
  T offset, slope;
};

// Units that are affine functions of a feature on intervals of it, before their LeakyReLU.
template <class T>
struct AffineUnits {
  int64_t width, stride;  // padded to column_multiple
  int64_t intervals;
  const T *left, *right;    // of each interval
  const T *offset, *slope;  // [intervals, stride]
};

// The same after it. Each interval is part of one of the units below.
template <class T>
struct BentUnits {
  int64_t stride, intervals;
  const int64_t* below;     // [intervals]
  const T *offset, *slope;  // [intervals padded to row_multiple, stride]
  const T* middle;          // the same: before the LeakyReLU, in the middles of the intervals
};

// Of the entries of a graph on an interval the sum of alpha, the mean of x weighted by alpha, and the sum of
// alpha (x - mean)^2, which is 0 unless the chunk is with_spread.
template <class T>
struct Moments {
  int32_t interval;
  T mass, mean, spread;
};

// One branch of some graphs with one feature x, and the memory for it: an affine function of x on each interval.
template <class T>
struct PiecewiseLinearChunk {
  Mlp<T> mlp;
  const T* w;                 // [stride], or null for the sum readout
  int64_t graphs, intervals;  // intervals are padded to row_multiple
  int64_t spans;              // of column_multiple intervals, padded to that
  const T* start;             // [intervals, padded to column_multiple], where each starts, ascending: from -infinity,
                              // infinity where it is padding
  const T* coarse;            // [spans], where these start
  const Affine<T>* beta;      // [intervals], ReLU(<w, z>)
  const T* gate;              // [intervals, stride], z in the middles
  const T* z;                 // [2 * intervals, stride], its offsets, then its slopes
  const int64_t* ptr;         // [graphs + 1] -> entries
  const T* count;             // [entries], how often, or null for ones
  const T* x;                 // [entries]
  bool with_spread;           // for gradients through the attention
  Moments<T>* moments;        // [entries]: those of graph g are the first used[g] from ptr[g] on
  int32_t* used;              // [graphs]
  T* readout;                 // [graphs, readout_stride], already at the columns of this branch
  int64_t readout_stride;     // of the gradient too
};

// A slot of a table of rows is 0, or holds the hash of a row and its number.
constexpr int slot_number_bits = 31;
constexpr uint64_t slot_tag(uint32_t hash) { return (uint64_t{1} << 63) | uint64_t{hash} << slot_number_bits; }
constexpr uint64_t slot_number(uint64_t slot) { return slot & ((uint64_t{1} << slot_number_bits) - 1); }

// The rows of a branch that have been met, numbered as they came, and what finds them again.
template <class W>
struct KnownRows {
  const uint32_t* keys;  // [2 d], of the hash
  uint64_t hash_mask;
  int64_t width;       // d
  W* rows;             // [*, d]; or the values of sparse rows
  int64_t* row_begin;  // [* + 1], of these values, or null
  int32_t* column_of;  // of each value
  uint32_t* hashes;    // [*], to make a larger table from, or null
  uint64_t* slots;     // [slot_mask + 1], at most half of them taken
  uint64_t slot_mask;
  int64_t size;            // rows
  int32_t* row_of_column;  // [d], of the rows with a 1 in this column and nothing but 0, or -1; or null
};

constexpr int64_t one_hot_columns = 1 << 11;  // rows of fewer may be found by their column

constexpr int64_t short_list = 128;  // of rows, that are sorted in registers

template <class T, class I>
struct PowerKernels {
  using A = Compute<T>;
  // Rows [begin, end) of one hop; `add` may be null.
  void (*hop)(const Hop<A, I>&, const A* in, const A* add, A* out, int64_t begin, int64_t end);
  // All powers of the graphs between ptr[0], .., ptr[graphs]; sums in A, or in double. False where a check failed.
  bool (*powers)(const Powers<T, I>&, const int64_t* ptr, int64_t graphs, char* scratch);
  bool (*float64_powers)(const Powers<T, I>&, const int64_t* ptr, int64_t graphs, char* scratch);
  // The rows [size, d] of new patterns, and their sources; null in half precision.
  void (*pattern_rows)(const Powers<T, I>&, const PatternRows<A>&, T* out, char* scratch);
  void (*float64_pattern_rows)(const Powers<T, I>&, const PatternRows<double>&, T* out, char* scratch);
  // In hop 0: the rows of new patterns, as they are, and their sources.
  void (*pattern_sources)(const Powers<T, I>&, const PatternRows<A>&, T* out);
  void (*float64_pattern_sources)(const Powers<T, I>&, const PatternRows<double>&, T* out);
  // For each of n nodes the neighbours, counted from the first node, that its key is made of, and n in place of those
  // that are missing; -1 first where there are too many.
  void (*near_nodes)(const Hop<A, I>&, int64_t first, int64_t n, int32_t* near);
  // n values, from storage to what is computed in, and back.
  void (*widen)(const T* from, A* to, int64_t n);
  void (*narrow)(const A* from, T* to, int64_t n);
};

template <class W, class I>
struct DistinctKernels {
  // The number of each of n rows; those that are new join the known ones. Returns how many, and which in `fresh`,
  // unless it is null.
  int64_t (*number)(const KnownRows<W>&, const W* rows, int64_t n, I* number, int64_t* fresh);
  // The rows of n nodes, at most short_list: each once, ascending, and how often. Returns how many. Up to short_list
  // places after those of the nodes are read, whatever is there.
  int64_t (*list_rows)(const I* of_node, int64_t n, I* row, int32_t* count);
  // How many values of a row are neither 0 nor -0.
  int64_t (*nonzeros)(const W* row, int64_t width);
};

struct PatternKernels {
  // The keys of n nodes, from the patterns of the hop before, which has -1 for the missing node; `unique`, which counts
  // up, makes those of nodes with too many neighbours.
  void (*keys)(const int32_t* near, int64_t n, const int32_t* pattern, int64_t unique, uint32_t* key);
  // The number of the pattern of each of n keys; those that are new get the next ones. Returns how many, and
  // which in `fresh`.
  int64_t (*number)(const KnownPatterns&, const uint32_t* key, int64_t n, int32_t* number, int64_t* fresh);
};

template <class S>
struct ReadoutKernels {
  using T = Compute<S>;
  // s = sum_v c_v z_v.
  void (*sum)(const Segments&, const Piece&, const Scratch<T>&, const S* z, T* readout);
  // s = sum_v alpha_v z_v; w is [R + 1, h]; writes alpha [nnz], in a split segment only beta = ReLU(<w, z_v>).
  void (*attention)(const Segments&, const Piece&, const Scratch<T>&, const S* z, const T* w, T* readout, T* alpha);
  // The alpha of a split segment's piece from its beta, and the largest logit and denominator of the whole segment.
  void (*weights)(const Segments&, const Piece&, T top, double total, T* alpha);
  // dz of the sum readout without an index.
  void (*sum_backward)(const Segments&, const Piece&, const Scratch<T>&, const Gradients<S>&);
  // dz or dbeta, and dw.
  void (*attention_backward)(const Segments&, const Piece&, const Scratch<T>&, const Gradients<S>&);
  // Rows [begin, end) of dz_u = sum_e (scale_e grad[place_e] + dbeta_e w[branch of e]); `count` or `alpha` is the scale
  // (both null: 1); dbeta and w may be null.
  void (*rows_backward)(const EntriesOfRow&, const T* grad, const int32_t* count, const T* alpha, const T* dbeta,
                        const T* w, S* dz, int64_t begin, int64_t end);
};

template <class T>
struct BranchKernels {
  // Activations of n rows, padded to a multiple of row_multiple.
  void (*mlp_forward)(const Mlp<T>&, const T* x, int64_t stride, int64_t n, T* const* activations);
  // From dz, the gradient of what goes into the last LeakyReLU: adds to the gradient of each layer, [padded in, stride]
  // and a row of biases; writes dx if not null. `first` and `second` take n rows each.
  void (*mlp_backward)(const Mlp<T>&, const T* x, int64_t stride, int64_t n, const T* const* activations, T* dz,
                       T* first, T* second, T* const* gradient, T* dx);
  // Of so many rows of x [*, width], those with the numbers `of_rows` or, if it is null, the first: lists the columns
  // that are not 0 in every one, and returns how many they are. used: [width], scratch.
  int64_t (*nonzero_columns)(const T* x, const int64_t* of_rows, int64_t rows, int64_t width, T* used,
                             int32_t* columns);
  // Copies so many of their columns to values [rows, number].
  void (*narrow_rows)(const T* x, const int64_t* of_rows, int64_t rows, int64_t width, const int32_t* columns,
                      int64_t number, T* values);
  // Rows [begin, begin + n) through the MLP, with their beta and mass.
  void (*forward)(const BranchChunk<T>&, const TileScratch<T>&, int64_t begin, int64_t n);
  // The readouts of graphs [begin, end).
  void (*readout)(const BranchChunk<T>&, double* sum, int64_t begin, int64_t end);
  // The dz and shift of all rows, not with each_once.
  void (*readout_backward)(const BranchChunk<T>&);
  // The gradients that rows [begin, begin + n) add, of w after those of the layers. Overwrites their dz.
  void (*backward)(const BranchChunk<T>&, const TileScratch<T>&, int64_t begin, int64_t n, T* const* gradient);
  // Adds partial sums [number, size] to the total [size]; size is a multiple of column_multiple.
  void (*add_partials)(const T* partial, int64_t number, int64_t size, double* total);
  // Where units change their sign inside an interval: kinks [intervals, width], of each interval the first `number`.
  void (*find_kinks)(const AffineUnits<T>&, T* kinks, int64_t* number);
  // The units after their LeakyReLU on n intervals, each inside `interval` of those before and around x: offsets and
  // slopes [n, stride], and in `middle` their values at x before it.
  void (*bend)(const AffineUnits<T>&, const T* x, const int64_t* interval, int64_t n, T negative_slope, T* offset,
               T* slope, T* middle);
  // The readouts of graphs [begin, end) with one feature, and their moments; sums: [7, intervals padded to
  // column_multiple]; interval, weight: [entries of these graphs].
  void (*piecewise_linear_readout)(const PiecewiseLinearChunk<T>&, double* sums, int32_t* interval, T* weight,
                                   int64_t begin, int64_t end);
  // The gradients of the offsets and slopes of what goes into the last LeakyReLU, dz [2, intervals, stride]; adds to
  // that of w; dlogit: as large as dz.
  void (*piecewise_linear_backward)(const PiecewiseLinearChunk<T>&, const T* grad, T* dz, T* dlogit, T* dw);
  // From that dz, on the intervals of the last of `units` (x, each layer, and maybe the logit), adds to the gradient of
  // each layer. dz and spare: [2, tile] each; a tile has all intervals of the widest layer.
  void (*bent_backward)(const Mlp<T>&, const BentUnits<T>* units, bool logit, T* dz, T* spare, int64_t tile,
                        T* const* gradient);
};

// The kernels compiled for each instruction set; `Kernels` is one of the tables above.
namespace baseline {
template <class Kernels>
Kernels table();
}  // namespace baseline
namespace avx2 {
template <class Kernels>
Kernels table();
}  // namespace avx2
namespace avx512 {
template <class Kernels>
Kernels table();
}  // namespace avx512

}  // namespace spin_fast

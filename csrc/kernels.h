// The CPU kernels as raw pointers and plain structs; no torch header. Letters as in spin_fast/ops.py.
//
// cpu/power.inl and cpu/readout.inl hold one implementation, which cpu/{baseline,avx2,avx512}.cpp each compile for
// their instruction set. The structs have no member functions: an inline function shared between those three would
// leave it to the linker which instruction set it uses.
#pragma once

#include <cstdint>
#include <type_traits>

namespace spin_fast {

// Storage types; sums over half-precision values run in float.
using Half = _Float16;
struct BFloat16 {
  uint16_t bits;
};
template <class T>
using accumulator = std::conditional_t<sizeof(T) == 2, float, T>;

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
  int64_t arcs;   // E
};

// What Ā[v, u] is on top of A[v, u]: 1, 1 / degree_v, 1 / sqrt(degree_v degree_u), or what `Hop` says arc by arc.
enum class Scaling { none, row, symmetric, factors };

// All powers of some graphs.
template <class T, class I>
struct Powers {
  Hop<accumulator<T>, I> hop;  // left and right are read under Scaling::factors only
  Scaling scaling;
  int64_t nodes;  // N
  int64_t hops;   // R
  const T* x;     // [N, d]
  T* out;         // [R + 1, N, d]
  bool stream;    // write `out` past the caches
};

// Several small graphs are taken together while their sources and arcs fit these.
constexpr int64_t block_bytes = 64 << 10;
constexpr int64_t block_arcs = 32 << 10;

// A graph of one feature and no more nodes than this may be taken as a matrix of bits.
constexpr int64_t dense_nodes = 1024;

// Memory that a block of so many nodes and arcs takes, at most.
constexpr int64_t scratch_bytes(int64_t nodes, int64_t arcs, int64_t width) {
  const int64_t stride = width > 8 ? width + 15 : 2 * width;
  const int64_t bits = width == 1 && nodes <= dense_nodes ? (nodes + 4) * (nodes + 64) / 8 + 64 * nodes : 0;
  return nodes * ((2 * stride + width) * 8 + 4) + (arcs + 256) * 12 + bits + 4096;
}

// The segments of a readout in branch-major order, s = branch * graphs + graph. The entries of segment s are
//   ptr[branch * ptr_stride + graph] + branch * entry_stride  up to  ptr[... + 1] + branch * entry_stride.
// Ragged form: ptr_stride = graphs, entry_stride = 0. Dense form: ptr_stride = 0, entry_stride = N.
template <class I>
struct Segments {
  const int64_t* ptr;
  const I* index;        // entry -> row of z, or null for the identity
  const int32_t* count;  // entry -> how often, or null for ones
  int64_t graphs;
  int64_t branches;
  int64_t ptr_stride;
  int64_t entry_stride;
  int64_t width;  // h
};

// For each row of z the entries that refer to it; `place` is where an entry's graph and branch stand in a readout seen
// as [G * (R + 1), h], which is graph * branches + branch.
struct EntriesOfRow {
  const int64_t* offsets;  // [rows + 1], or null: row u has the one entry u
  const int64_t* entries;  // [nnz]
  const int64_t* place;    // [nnz]
  int64_t branches;
  int64_t width;  // h
};

template <class T, class I>
struct PowerKernels {
  using A = accumulator<T>;
  // Rows [begin, end) of one hop; `add` may be null.
  void (*hop)(const Hop<A, I>&, const A* in, const A* add, A* out, int64_t begin, int64_t end);
  // All powers of the graphs between ptr[0], .., ptr[graphs]; sums in A, or in double.
  void (*powers)(const Powers<T, I>&, const int64_t* ptr, int64_t graphs, char* scratch);
  void (*canonical_powers)(const Powers<T, I>&, const int64_t* ptr, int64_t graphs, char* scratch);
  // n values.
  void (*widen)(const T* from, A* to, int64_t n);
  void (*narrow)(const A* from, T* to, int64_t n);
};

template <class T, class I>
struct Kernels {
  // Segments [begin, end) of s = sum_v c_v z_v.
  void (*sum_readout)(const Segments<I>&, const T* z, T* readout, int64_t begin, int64_t end);
  // Segments [begin, end) of s = sum_v alpha_v z_v; w is [R + 1, h]; writes alpha [nnz].
  void (*attention_readout)(const Segments<I>&, const T* z, const T* w, T* readout, T* alpha, int64_t begin,
                            int64_t end);
  // Segments [begin, end): writes dbeta [nnz], adds to dw [h]. grad_alpha may be null.
  void (*attention_backward)(const Segments<I>&, const T* grad, const T* grad_alpha, const T* z, const T* w,
                             const T* readout, const T* alpha, T* dbeta, double* dw, int64_t begin, int64_t end);
  // Rows [begin, end) of dz_u = sum_e (scale_e grad[place_e] + dbeta_e w[branch of e]); `count` or `alpha` is the scale
  // (both null: 1); dbeta and w may be null.
  void (*rows_backward)(const EntriesOfRow&, const T* grad, const int32_t* count, const T* alpha, const T* dbeta,
                        const T* w, T* dz, int64_t begin, int64_t end);
};

namespace baseline {
template <class T, class I>
PowerKernels<T, I> power_table();
template <class T, class I>
Kernels<T, I> table();
}  // namespace baseline
namespace avx2 {
template <class T, class I>
PowerKernels<T, I> power_table();
template <class T, class I>
Kernels<T, I> table();
}  // namespace avx2
namespace avx512 {
template <class T, class I>
PowerKernels<T, I> power_table();
template <class T, class I>
Kernels<T, I> table();
}  // namespace avx512

}  // namespace spin_fast

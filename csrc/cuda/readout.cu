// sum_readout, attention_readout and their gradients.
//
// The readouts are sums over segments (readout_sum.cu), and so are the gradients of rows that several entries refer to.
// The other gradients are one pass over the entries, which reads z once and writes dz once.
//
// Layout: z row-major [rows, h]; readouts [G, (R + 1) * h], the branches of a graph side by side. Parallel axis:
// entries, an equal range of each branch per warp, whose lane groups (see Tiling) take rows in turn. Accumulator:
// dots and the dw of some rows in Compute<S>, the dw of a block in float64, those of blocks added up in order.

#include <type_traits>

#include "readout_sum.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int threads = 128, warps = threads / warp_size;

// With t = sum_e alpha_e (<ds, z_e> + dalpha_e) = <ds, s> + sum_e alpha_e dalpha_e:
//   dbeta_e = alpha_e (<ds, z_e> + dalpha_e - t), 0 where the ReLU is 0;  dw = sum_e dbeta_e z_e;
//   dz_e = alpha_e ds + dbeta_e w.
template <class S, class T = Compute<S>>
struct AttentionGradient {
  Segments seg;
  const S* z;
  const S* w;           // [R + 1, h]
  const T* grad;        // [G * (R + 1), h]
  const T* grad_alpha;  // [nnz] or null
  const T* alpha;       // [nnz]
  const T* t;           // [G * (R + 1)]
  T* dbeta;             // [nnz] or null; read if `known`, else written
  S* dz;                // [nnz, h], or null with an index
  double* dw;           // [R + 1, blocks, h]
  int group;
  int64_t columns;  // of a tile
  bool known;
};

// The graphs of the entries of a range of a branch, asked for in ascending order.
struct GraphOfEntry {
  const int64_t* ptr;
  int64_t graphs, shift, graph, end;

  // By all lanes of a warp.
  __device__ GraphOfEntry(const Segments& seg, int64_t branch, const EntryRange& range)
      : ptr(seg.ptr + branch * seg.ptr_stride),
        graphs(seg.graphs),
        shift(branch * seg.entry_stride),
        graph(range.begin < range.end ? find_range_by_warp(ptr, graphs, range.begin - shift) : 0),
        end(range.begin) {}
  __device__ int64_t operator()(int64_t entry) {
    if (entry >= end) {
      graph = find_range_from(ptr, graphs, graph, entry - shift);
      end = ptr[graph + 1] + shift;
    }
    return graph;
  }
};

constexpr int rows_at_once(int values, int per_lane) {
  return per_lane == 1 ? std::min(16 / values, 4) : values == 1 ? 2 : 1;
}

template <class S, int V, int K>
__global__ void __launch_bounds__(threads, K == 1 && sizeof(S) <= 4 ? 5 : 1)
    attention_backward_kernel(AttentionGradient<S> of) {
  using T = Compute<S>;
  constexpr int U = rows_at_once(V, K);
  static_assert(U <= 4);
  const Segments& seg = of.seg;
  const int64_t width = seg.width, branch = blockIdx.y, first_column = blockIdx.z * of.columns;
  const int in_warp = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int lane = in_warp % of.group, group = in_warp / of.group, groups = warp_size / of.group;
  const auto column = [&](int k) { return first_column + (k * of.group + lane) * V; };
  const bool with_dz = of.dz != nullptr;

  T w[K][V] = {};
  for (int k = 0; k < K; ++k)
    for (int i = 0; i < V; ++i)
      if (column(k) < width) w[k][i] = widened(of.w[branch * width + column(k) + i]);
  double dw[K][V] = {};
  const EntryRange range = range_of_branch(seg, branch, int64_t{blockIdx.x} * warps + warp, int64_t{gridDim.x} * warps);
  GraphOfEntry graph_of(seg, branch, range);
  for (int64_t first = range.begin; first < range.end; first += U * groups) {
    const int64_t at = first + group;
    const int left = static_cast<int>(std::max(std::min(range.end - at, int64_t{U} * groups), int64_t{0}));
    const auto is_there = [&](int u) { return u * groups < left; };
    const S* from[U];
    find_rows(seg, of.z, at, groups, left, from);
    Pack<S, V> row[U][K];
    load_rows(from, is_there, column, width, row);
    // Each lane finds the graph of one of the next 32 entries, and of further ones if a round has more.
    int64_t graph[U], readout_at[U];
#pragma unroll
    for (int i = 0; i < U; ++i)
      if (i == 0 || i * of.group < U) graph[i] = graph_of(std::min(first + i * warp_size + in_warp, range.end - 1));
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t looked_for = of.group == 1 ? graph[u] : of.group == 2 ? graph[u / 2] : graph[0];
      readout_at[u] = __shfl_sync(all_lanes, looked_for, (u * groups + group) % warp_size) * seg.branches + branch;
    }
    const T* ds_from[U];
#pragma unroll
    for (int u = 0; u < U; ++u) ds_from[u] = of.grad + readout_at[u] * width;
    Pack<T, V> ds[U][K];
    load_rows(ds_from, is_there, column, width, ds);
    T alpha[U], dbeta[U];
#pragma unroll
    for (int u = 0; u < U; ++u) alpha[u] = is_there(u) ? of.alpha[at + u * groups] : T{0};
    if (of.known) {
#pragma unroll
      for (int u = 0; u < U; ++u) dbeta[u] = is_there(u) ? of.dbeta[at + u * groups] : T{0};
    } else {
      T minus[U], logit[U] = {}, dalpha[U] = {};
#pragma unroll
      for (int u = 0; u < U; ++u) minus[u] = is_there(u) ? of.t[readout_at[u]] : T{0};
      if (of.grad_alpha)
#pragma unroll
        for (int u = 0; u < U; ++u) minus[u] -= is_there(u) ? of.grad_alpha[at + u * groups] : T{0};
#pragma unroll
      for (int u = 0; u < U; ++u)
        for (int k = 0; k < K; ++k)
          for (int i = 0; i < V; ++i) {
            const T value = widened(row[u][k].at[i]);
            logit[u] += w[k][i] * value;
            dalpha[u] += ds[u][k].at[i] * value;
          }
      for (int step = of.group / 2; step > 0; step /= 2)
#pragma unroll
        for (int u = 0; u < U; ++u) {
          logit[u] += __shfl_xor_sync(all_lanes, logit[u], step);
          dalpha[u] += __shfl_xor_sync(all_lanes, dalpha[u], step);
        }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const T opened = alpha[u] * (dalpha[u] - minus[u]);
        dbeta[u] = logit[u] <= 0 || !is_there(u) ? T{0} : opened;
        if (of.dbeta && is_there(u) && lane == 0) of.dbeta[at + u * groups] = dbeta[u];
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      T part[V] = {};
#pragma unroll
      for (int u = 0; u < U; ++u)
        for (int i = 0; i < V; ++i) part[i] += dbeta[u] * widened(row[u][k].at[i]);
      for (int i = 0; i < V; ++i) dw[k][i] += static_cast<double>(part[i]);
      if (with_dz)
#pragma unroll
        for (int u = 0; u < U; ++u) {
          Pack<S, V> to;
          for (int i = 0; i < V; ++i) to.at[i] = narrowed<S>(alpha[u] * ds[u][k].at[i] + dbeta[u] * w[k][i]);
          if (is_there(u) && column(k) < width) store(of.dz + (at + u * groups) * width + column(k), to);
        }
    }
  }

  for (int step = of.group; step < warp_size; step *= 2)
    for (int k = 0; k < K; ++k)
      for (int i = 0; i < V; ++i) dw[k][i] += __shfl_xor_sync(all_lanes, dw[k][i], step);
  double* shared = shared_memory<double>();
  if (group == 0)
    for (int k = 0; k < K; ++k)
      for (int i = 0; i < V; ++i) shared[warp * of.columns + (k * of.group + lane) * V + i] = dw[k][i];
  __syncthreads();
  for (int64_t j = threadIdx.x; j < of.columns && first_column + j < width; j += threads) {
    double sum = 0;
    for (int i = 0; i < warps; ++i) sum += shared[i * of.columns + j];
    of.dw[(branch * gridDim.x + blockIdx.x) * width + first_column + j] = sum;
  }
}

// The dbeta of wide rows, one warp per entry.
template <class S>
__global__ void dbeta_kernel(AttentionGradient<S> of) {
  using T = Compute<S>;
  const Segments& seg = of.seg;
  const int64_t e = thread_index() / warp_size;
  if (e >= seg.entries) return;
  const int64_t s = find_segment<true>(seg, e), at = readout_row(seg, s);
  const S *z = of.z + row_of(seg, e) * seg.width, *w = of.w + s / seg.graphs * seg.width;
  T logit = 0, dalpha = 0;
#pragma unroll 8
  for (int64_t j = threadIdx.x % warp_size; j < seg.width; j += warp_size) {
    logit += widened(w[j]) * widened(z[j]);
    dalpha += of.grad[at * seg.width + j] * widened(z[j]);
  }
  logit = sum_over_lanes(logit);
  dalpha = sum_over_lanes(dalpha);
  if (of.grad_alpha) dalpha += of.grad_alpha[e];
  if (threadIdx.x % warp_size == 0) of.dbeta[e] = logit <= 0 ? T{0} : of.alpha[e] * (dalpha - of.t[at]);
}

// dw from the sums of all blocks; a block per 8 columns of a branch.
__global__ void dw_kernel(const double* sums, int64_t n, int64_t width, void* dw, ScalarType type) {
  const int64_t branch = blockIdx.y, j = blockIdx.x * columns_of_block + threadIdx.x % columns_of_block;
  const double sum = sum_of_column(n, shared_memory<double>(),
                                   [&](int64_t i) { return j < width ? sums[(branch * n + i) * width + j] : 0.0; });
  if (threadIdx.x < columns_of_block && j < width) store<1>(dw, type, branch * width + j, {sum});
}

// t, one warp per row of the readout.
template <class T>
__global__ void t_kernel(const T* grad, const T* readout, const double* from_alpha, int64_t n, int64_t width, T* t) {
  const int64_t at = thread_index() / warp_size;
  if (at >= n) return;
  double product = 0;
  for (int64_t j = threadIdx.x % warp_size; j < width; j += warp_size)
    product += static_cast<double>(grad[at * width + j]) * static_cast<double>(readout[at * width + j]);
  product = sum_over_lanes(product);
  if (threadIdx.x % warp_size == 0) t[at] = static_cast<T>(product + (from_alpha ? from_alpha[at] : 0));
}

// dz_e = count_e ds, without an index.
template <class S, int V>
__global__ void __launch_bounds__(threads) spread_kernel(Segments seg, const S* grad, S* dz, int group) {
  const int64_t branch = blockIdx.y;
  const EntryRange range = range_of_branch(seg, branch, blockIdx.x, gridDim.x);
  GraphOfEntry graph_of(seg, branch, range);
  for (int64_t e = range.begin + threadIdx.x / group; e < range.end; e += threads / group) {
    const S* ds = grad + (graph_of(e) * seg.branches + branch) * seg.width;
    const auto count = count_of<Compute<S>>(seg, e);
    for (int64_t j = threadIdx.x % group * V; j < seg.width; j += group * V) {
      const Pack<S, V> from = load<V>(ds + j);
      Pack<S, V> to;
      for (int i = 0; i < V; ++i) to.at[i] = narrowed<S>(count * widened(from.at[i]));
      store(dz + e * seg.width + j, to);
    }
  }
}

// The terms of rows_backward, in the order of `entries`.
template <class T, class I>
__global__ void terms_kernel(Segments seg, Integers entries, const T* alpha, const T* dbeta, I* readout_row_of_term,
                             T* scale, T* dbeta_of_term) {
  const int64_t i = thread_index();
  if (i >= seg.entries) return;
  const int64_t e = entries[i];
  readout_row_of_term[i] = static_cast<I>(readout_row(seg, find_segment(seg, e)));
  scale[i] = alpha ? alpha[e] : count_of<T>(seg, e);
  if (dbeta) dbeta_of_term[i] = dbeta[e];
}

template <class S>
__global__ void widen_kernel(const S* from, Compute<S>* to, int64_t n) {
  const int64_t i = thread_index();
  if (i < n) to[i] = widened(from[i]);
}

// dz_u = sum_e (scale_e grad[readout_row_e] + dbeta_e w[branch of e]) over the entries of row u; scale_e is alpha_e or
// count_e.
template <class S>
void rows_backward(const Device& device, const Segments& seg, const OptionalTensor& index, const S* grad,
                   const Compute<S>* alpha, const Compute<S>* dbeta, const Compute<S>* w, Tensor& dz) {
  using T = Compute<S>;
  const Transposed of_rows = transposed(device, index->scalar_type(), index->const_data_ptr(), seg.entries, seg.rows);
  const int64_t readout_rows = seg.graphs * seg.branches;
  Tensor readout_row_of_term = device.empty({seg.entries}, index_type_for(readout_rows));
  const Buffer<T> scale(device, seg.entries), dbeta_of_term(device, dbeta ? seg.entries : 0);
  dispatch_index(readout_row_of_term.scalar_type(), [&]<class I>(Tag<I>) {
    device.launch(&terms_kernel<T, I>, blocks_for("index", seg.entries, threads), threads, 0, seg,
                  integers_of(of_rows.entries), alpha, dbeta, readout_row_of_term.mutable_data_ptr<I>(), scale,
                  dbeta_of_term);
  });
  const Integers index_of_term = integers_of(readout_row_of_term);
  const Segments by_row = {.ptr = of_rows.offsets.const_data_ptr<int64_t>(),
                           .narrow_index = index_of_term.narrow,
                           .wide_index = index_of_term.wide,
                           .graphs = seg.rows,
                           .branches = 1,
                           .width = seg.width,
                           .rows = readout_rows,
                           .entries = seg.entries};
  readout_sum<S>(device, {.seg = by_row,
                          .z = grad,
                          .weight = scale,
                          .also = dbeta_of_term,
                          .vectors = w,
                          .num_vectors = seg.branches,
                          .out = dz.mutable_data_ptr(),
                          .type = dz.scalar_type()});
}

// Enough blocks per branch for some rounds of all their lane groups.
dim3 blocks_for_entries(const Segments& seg, int64_t rows_of_round, int64_t tiles) {
  constexpr int64_t most = 4096;
  const int64_t mean = (seg.entries + seg.branches - 1) / seg.branches;
  const int64_t blocks = std::clamp<int64_t>((mean + 2 * rows_of_round - 1) / (2 * rows_of_round), 1, most);
  return grid_of(seg.branches > UINT16_MAX ? "num_branches" : "z", blocks, seg.branches, tiles);
}

Tensor sum_readout(const Tensor& z, const Tensor& ptr, OptionalTensor index, OptionalTensor count, int64_t num_branches,
                   bool shared, bool) {
  const int64_t num_rows = rows_of(z);
  const ScalarType value = z.scalar_type();
  require(!shared || z.dim() == 2 || z.size(0) == num_branches, "z must have ", num_branches, " branches, got ",
          z.size(0));
  const Segments seg = checked_segments(num_rows, z.size(-1), ptr, index, count, num_branches, shared, false);
  const Device device(z, {{"ptr", ptr}, {"index", index}, {"count", count}});
  Tensor readout = device.empty({seg.graphs, seg.branches * seg.width}, value);
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    readout_sum<S>(device, {.seg = seg, .z = stored<S>(z), .out = readout.mutable_data_ptr(), .type = value});
  });
  return readout;
}

Tensor sum_readout_backward(const Tensor& grad, const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                            int64_t num_branches, int64_t num_rows, bool shared, bool) {
  const ScalarType value = expect("grad", grad, {any, any}, stored_types);
  check_num_branches(num_branches);
  require(num_rows >= 0, "num_rows must be at least 0, got ", num_rows);
  product_of("num_rows", sum_of("num_rows", num_rows, 2), sizeof(int64_t));  // bytes of the offsets of the rows
  const Segments seg =
      checked_segments(num_rows, grad.size(1) / num_branches, ptr, index, count, num_branches, shared, false);
  expect("grad", grad, {seg.graphs, seg.branches * seg.width}, {value});
  const Device device(grad, {{"ptr", ptr}, {"index", index}, {"count", count}});
  Tensor dz = device.empty({num_rows, seg.width}, value);
  if (dz.numel() == 0) return dz;
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    const S* ds = stored<S>(grad);
    if (index) return rows_backward<S>(device, seg, index, ds, nullptr, nullptr, nullptr, dz);
    const Tiling tiling = tiling_of<S>(seg.width, {ds, dz.data_ptr()});
    const auto kernel = tiling.packed ? &spread_kernel<S, values_per_pack<S>> : &spread_kernel<S, 1>;
    device.launch(kernel, blocks_for_entries(seg, 4 * threads / tiling.group, 1), threads, 0, seg, ds,
                  static_cast<S*>(dz.mutable_data_ptr()), tiling.group);
  });
  return dz;
}

std::tuple<Tensor, Tensor> attention_readout(const Tensor& z, const Tensor& w, const Tensor& ptr, OptionalTensor index,
                                             OptionalTensor count, bool shared, bool) {
  const int64_t num_rows = rows_of(z);
  const ScalarType value = z.scalar_type(), computed = compute_type(value);
  const Segments seg = checked_segments(num_rows, z.size(-1), ptr, index, count, branches_of(w, z), shared, false);
  const Device device(z, {{"w", w}, {"ptr", ptr}, {"index", index}, {"count", count}});
  Tensor readout = device.empty({seg.graphs, seg.branches * seg.width}, computed);
  Tensor alpha = device.empty({seg.entries}, computed);
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    readout_sum<S>(device, {.seg = seg,
                            .z = stored<S>(z),
                            .alpha = alpha.mutable_data_ptr<Compute<S>>(),
                            .w = stored<S>(w),
                            .out = readout.mutable_data_ptr(),
                            .type = computed});
  });
  return {readout, alpha};
}

std::tuple<Tensor, Tensor> attention_readout_backward(const Tensor& grad, OptionalTensor grad_alpha, const Tensor& z,
                                                      const Tensor& w, const Tensor& ptr, OptionalTensor index,
                                                      OptionalTensor count, const Tensor& readout, const Tensor& alpha,
                                                      bool shared, bool) {
  const int64_t num_rows = rows_of(z);
  const ScalarType value = z.scalar_type(), computed = compute_type(value);
  const Segments seg = checked_segments(num_rows, z.size(-1), ptr, index, count, branches_of(w, z), shared, false);
  expect("grad", grad, {seg.graphs, seg.branches * seg.width}, {computed});
  expect("readout", readout, {seg.graphs, seg.branches * seg.width}, {computed});
  expect("alpha", alpha, {seg.entries}, {computed});
  if (grad_alpha) expect("grad_alpha", *grad_alpha, {seg.entries}, {computed});
  const Device device(z, {{"w", w},
                          {"ptr", ptr},
                          {"index", index},
                          {"count", count},
                          {"grad", grad},
                          {"grad_alpha", grad_alpha},
                          {"readout", readout},
                          {"alpha", alpha}});
  const int64_t readout_rows = seg.graphs * seg.branches;
  Tensor dz = device.empty(z.sizes(), value), dw = device.empty(w.sizes(), value);
  if (seg.width == 0) return {dz, dw};
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    using T = Compute<S>;
    AttentionGradient<S> of = {};
    of.seg = seg;
    of.z = stored<S>(z);
    of.w = stored<S>(w);
    of.grad = grad.const_data_ptr<T>();
    of.grad_alpha = data<T>(grad_alpha);
    of.alpha = alpha.const_data_ptr<T>();
    of.dz = index ? nullptr : static_cast<S*>(dz.mutable_data_ptr());

    const Buffer<double> from_alpha(device, grad_alpha ? readout_rows : 0);
    const Buffer<T> t(device, readout_rows);
    if (grad_alpha) {
      Segments entries = seg;
      entries.narrow_index = nullptr;
      entries.wide_index = nullptr;
      entries.width = 1;
      entries.rows = seg.entries;
      double* const out = from_alpha;
      readout_sum<T>(device,
                     {.seg = entries, .z = of.grad_alpha, .weight = of.alpha, .out = out, .type = ScalarType::Double});
    }
    of.t = t;
    device.launch(&t_kernel<T>, blocks_for("ptr", readout_rows, warps), threads, 0, of.grad,
                  readout.const_data_ptr<T>(), from_alpha, readout_rows, seg.width, t);

    const Tiling tiling = tiling_of<S>(seg.width, {of.z, of.grad, of.dz});
    of.group = tiling.group;
    of.columns = tiling.columns;
    of.known = tiling.tiles > 1;
    const Buffer<T> dbeta(device, index || of.known ? seg.entries : 0);
    of.dbeta = dbeta;
    if (of.known) device.launch(&dbeta_kernel<S>, blocks_for("index", seg.entries, warps), threads, 0, of);
    dispatch_tiling<S>(tiling, [&](auto v, auto k) {
      const dim3 grid = blocks_for_entries(seg, rows_at_once(v, k) * threads / tiling.group, tiling.tiles);
      const Buffer<double> sums(device, int64_t{grid.x} * dw.numel());
      of.dw = sums;
      device.launch(&attention_backward_kernel<S, v, k>, grid, threads,
                    warps * tiling.columns * static_cast<int64_t>(sizeof(double)), of);
      const dim3 of_columns(blocks_for("z", seg.width, columns_of_block).x, grid.y);
      device.launch(&dw_kernel, of_columns, threads_of_columns,
                    threads_of_columns * static_cast<int64_t>(sizeof(double)), of.dw, grid.x, seg.width,
                    dw.mutable_data_ptr(), dw.scalar_type());
    });
    if (!index) return;
    if constexpr (std::is_same_v<S, T>) {
      rows_backward<T>(device, seg, index, of.grad, of.alpha, of.dbeta, of.w, dz);
    } else {
      const Buffer<T> wide(device, w.numel());
      device.launch(&widen_kernel<S>, blocks_for("w", w.numel(), threads), threads, 0, of.w, wide, w.numel());
      rows_backward<T>(device, seg, index, of.grad, of.alpha, of.dbeta, wide, dz);
    }
  });
  return {dz, dw};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) {
  m.impl("sum_readout", TORCH_BOX(&sum_readout));
  m.impl("sum_readout_backward", TORCH_BOX(&sum_readout_backward));
  m.impl("attention_readout", TORCH_BOX(&attention_readout));
  m.impl("attention_readout_backward", TORCH_BOX(&attention_readout_backward));
}

}  // namespace spin_fast

// Weighted sums of the rows of segments, in one pass over the rows.
//
// Layout: rows row-major [rows, h]; sums [G, (R + 1) * h]. Parallel axis: segments, each taken by a team of lanes, of
// part of a warp up to a block by the mean size; the team's lane groups (see Tiling) take rows in turn, several at once
// so that their loads are under way together. Long segments are cut in chunks of the axis of entries, a block each,
// whose partial sums are added up in order. Accumulator: a few rows in Compute<S>, their sums in float64. With the
// softmax every warp keeps a running maximum of the segment; a higher one scales down what it has. The logits stand in
// alpha until the denominator is known. Rows wider than the registers of a warp are taken in tiles of columns, and
// their logits are computed beforehand.

#include <type_traits>

#include "readout_sum.h"

namespace spin_fast {
namespace {

constexpr int threads = 128, warps = threads / warp_size;

// How the work is cut.
template <class T>
struct Plan {
  int group, team;  // lanes of a row, of a segment
  int64_t columns;  // of a tile
  const T* beta;    // [nnz], with the softmax
  Chunks chunks;
  int every;        // a power of two: so far apart are the blocks that take a chunk, as long as there are chunks
  double* partial;  // [chunks, 2 slots, 2 + h]: the highest logit, the denominator, the sums
  int64_t* parts;   // [chunks, 2], the long segment in each slot, or -1
  double* final;    // [chunks, 2], the logit and denominator of a long segment, at the chunk where it begins
};

constexpr int rows_at_once(int values, int per_lane) {
  return per_lane == 1 ? 8 : values == 1 ? 4 : values == 8 ? 1 : 2;
}

// What takes a sum of exp(beta - from) to one of exp(beta - to); where both are infinite, nothing changes.
__device__ inline double scale_down(double from, double to) { return from == to ? 1 : std::exp(from - to); }

// Some blocks take the parts of long segments in a chunk, which may be none; the others whole segments. They alternate,
// as the former wait for their search while there is something to load for the latter. Dots: logits are computed here.
template <class S, int V, int K, bool Dots>
__global__ void __launch_bounds__(threads, K == 1 && V == 8 ? 4 : 1)
    sums_kernel(SegmentSums<S> of, Plan<Compute<S>> plan) {
  using T = Compute<S>;
  constexpr int U = rows_at_once(V, K);
  const Segments& seg = of.seg;
  const int64_t width = seg.width;
  const int64_t block = blockIdx.x, chunk = block >> log2_of(plan.every);
  const bool softmax = plan.beta != nullptr;
  const bool chunked = chunk < plan.chunks.number && (block & (plan.every - 1)) == 0;
  const int team = chunked ? threads : plan.team, in_team = threadIdx.x & (team - 1);
  const int lane = in_team & (plan.group - 1), group = in_team >> log2_of(plan.group);
  const int groups = team >> log2_of(plan.group), in_warp = team < warp_size ? team : warp_size;
  const int64_t first_column = blockIdx.y * plan.columns;
  const auto column = [&](int k) { return first_column + (k * plan.group + lane) * V; };

  for (int slot = 0; slot < (chunked ? 2 : 1); ++slot) {
    Stretch stretch = {-1, 0, 0, 0};
    if (chunked) {
      stretch = part_of(seg, plan.chunks, chunk, slot);
      if (threadIdx.x == 0 && blockIdx.y == 0) plan.parts[2 * chunk + slot] = stretch.segment;
      if (stretch.segment < 0) continue;
    } else {
      const int64_t of_chunks = std::min(chunk + 1, plan.chunks.number);  // blocks before this one
      const int64_t s = ((block - of_chunks) * threads + threadIdx.x) >> log2_of(team);
      if (s < seg.graphs * seg.branches) stretch = stretch_of(seg, s);
      if (is_long(plan.chunks, stretch)) stretch = {-1, 0, 0, 0};
    }

    T top = 0;  // beta is never below 0
    double total = 0, sum[K][V] = {};
    T w[K][V] = {};
    if constexpr (Dots) {
      const S* from = of.w + stretch.branch * width;
      for (int k = 0; k < K; ++k)
        for (int i = 0; i < V; ++i)
          if (column(k) < width) w[k][i] = widened(from[column(k) + i]);
    }
    // As many rounds as the longest segment of the warp needs: all its lanes take part in the shuffles.
    for (int64_t at = stretch.first + group; __any_sync(all_lanes, at < stretch.last); at += U * groups) {
      const int left = static_cast<int>(std::min(stretch.last - at, int64_t{U} * groups));
      const auto is_there = [&](int u) { return u * groups < left; };
      const S* from[U];
      find_rows(seg, of.z, at, groups, left, from);
      Pack<S, V> row[U][K];
      load_rows(from, is_there, column, width, row);

      T weight[U] = {};
      if constexpr (Dots) {
#pragma unroll
        for (int u = 0; u < U; ++u)
          for (int k = 0; k < K; ++k)
            for (int i = 0; i < V; ++i) weight[u] += w[k][i] * widened(row[u][k].of[i]);
        for (int step = plan.group / 2; step > 0; step /= 2)
#pragma unroll
          for (int u = 0; u < U; ++u) weight[u] += __shfl_xor_sync(all_lanes, weight[u], step);
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = weight[u] < 0 ? T{0} : weight[u];
        // Every lane of a group stores the logit of another row: those of a warp stand side by side.
        for (int u = lane; u - lane < U; u += plan.group) {
          T beta = 0;
#pragma unroll
          for (int i = 0; i < U; ++i) beta = i == u ? weight[i] : beta;
          if (u < U && is_there(u)) of.alpha[at + u * groups] = beta;
        }
      } else if (softmax) {
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = is_there(u) ? plan.beta[at + u * groups] : T{0};
      }
      double factor = 1;
      if (softmax) {
        T high = top;  // rows that are not there have 0 here
#pragma unroll
        for (int u = 0; u < U; ++u) high = weight[u] > high ? weight[u] : high;
        for (int step = plan.group; step < in_warp; step *= 2) {
          const T other = __shfl_xor_sync(all_lanes, high, step);
          high = other > high ? other : high;
        }
        if (high > top && total > 0) factor = scale_down(top, high);
        top = high;
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const T mass = std::exp(weight[u] - top);
          weight[u] = is_there(u) ? mass : T{0};
        }
        if (seg.count)
#pragma unroll
          for (int u = 0; u < U; ++u) weight[u] *= is_there(u) ? static_cast<T>(seg.count[at + u * groups]) : T{1};
        T mass = 0;
#pragma unroll
        for (int u = 0; u < U; ++u) mass += weight[u];
        total = total * factor + static_cast<double>(mass);
      } else if (of.weight) {
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = is_there(u) ? of.weight[at + u * groups] : T{0};
      } else if (seg.count) {
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = is_there(u) ? static_cast<T>(seg.count[at + u * groups]) : T{0};
      } else {
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = is_there(u) ? T{1} : T{0};
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        T part[V] = {};
#pragma unroll
        for (int u = 0; u < U; ++u)
          for (int i = 0; i < V; ++i) part[i] += weight[u] * widened(row[u][k].of[i]);
        if constexpr (!Dots)
          if (of.also && column(k) < width)
#pragma unroll
            for (int u = 0; u < U; ++u)
              if (is_there(u)) {
                const int64_t entry = at + u * groups;
                const T also = of.also[entry];
                const T* vectors = of.vectors + row_of(seg, entry) % of.num_vectors * width;
                const Pack<T, V> vector = load<V>(vectors + column(k));
                for (int i = 0; i < V; ++i) part[i] += also * vector.of[i];
              }
        for (int i = 0; i < V; ++i) sum[k][i] = sum[k][i] * factor + static_cast<double>(part[i]);
      }
    }

    // The lane groups of a warp, then the warps of a block.
    for (int step = plan.group; step < in_warp; step *= 2) {
      total += __shfl_xor_sync(all_lanes, total, step);
      for (int k = 0; k < K; ++k)
        for (int i = 0; i < V; ++i) sum[k][i] += __shfl_xor_sync(all_lanes, sum[k][i], step);
    }
    const int64_t place = place_of(seg, stretch.segment, stretch.branch);  // not used where there is no segment
    double scale = softmax && stretch.last > stretch.first ? 1 / total : 1;
    if (team <= warp_size) {
      if (stretch.segment >= 0 && group == 0)
        for (int k = 0; k < K; ++k)
          if (column(k) < width) {
            for (int i = 0; i < V; ++i) sum[k][i] *= scale;
            store(of.out, of.type, place * width + column(k), sum[k]);
          }
      __syncwarp();
    } else {
      double* shared = shared_memory<double>();
      const int64_t stride = 2 + plan.columns;
      double* mine = shared + threadIdx.x / warp_size * stride;
      if (threadIdx.x % warp_size == 0) {
        mine[0] = static_cast<double>(top);
        mine[1] = total;
      }
      if (threadIdx.x % warp_size < plan.group)
        for (int k = 0; k < K; ++k)
          for (int i = 0; i < V; ++i) mine[2 + (k * plan.group + lane) * V + i] = sum[k][i];
      __syncthreads();
      double factor[warps];
      for (int i = 0; i < warps; ++i) top = static_cast<T>(shared[i * stride]) > top ? shared[i * stride] : top;
      total = 0;
      for (int i = 0; i < warps; ++i) {
        factor[i] = scale_down(shared[i * stride], top);
        total += factor[i] * shared[i * stride + 1];
      }
      if (softmax && stretch.last > stretch.first) scale = 1 / total;
      double* partial = chunked ? plan.partial + (2 * chunk + slot) * (2 + width) : nullptr;
      if (chunked && threadIdx.x == 0 && blockIdx.y == 0) {
        partial[0] = static_cast<double>(top);
        partial[1] = total;
      }
      for (int64_t j = threadIdx.x; j < plan.columns && first_column + j < width && stretch.segment >= 0;
           j += threads) {
        double value[1] = {0};
        for (int i = 0; i < warps; ++i) value[0] += factor[i] * shared[i * stride + 2 + j];
        if (chunked) {
          partial[2 + first_column + j] = value[0];
        } else {
          value[0] *= scale;
          store(of.out, of.type, place * width + first_column + j, value);
        }
      }
      __syncthreads();  // `shared` is free again, and the logits of other threads are there
    }
    if (softmax && !chunked && blockIdx.y == 0) {
      const T denominator = static_cast<T>(scale);
      for (int64_t e = stretch.first + in_team; e < stretch.last; e += team)
        of.alpha[e] = std::exp(plan.beta[e] - top) * denominator * count_of<T>(seg, e);
    }
  }
}

// The logits of wide rows, a warp for each entry.
template <class S>
__global__ void beta_kernel(Segments seg, const S* z, const S* w, Compute<S>* beta) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / warp_size;
  if (e >= seg.entries) return;
  const int64_t row = row_of(seg, e) * seg.width, branch = segment_of<true>(seg, e) / seg.graphs;
  Compute<S> logit = 0;
#pragma unroll 8
  for (int64_t j = threadIdx.x % warp_size; j < seg.width; j += warp_size)
    logit += widened(w[branch * seg.width + j]) * widened(z[row + j]);
  logit = sum_over_lanes(logit);
  if (threadIdx.x % warp_size == 0) beta[e] = logit < 0 ? Compute<S>{0} : logit;
}

// The readouts of long segments from the partial sums of their chunks, each by the blocks of the chunk it begins in.
template <class T>
__global__ void combine_kernel(Segments seg, Plan<T> plan, void* out, ScalarType type) {
  double* shared = shared_memory<double>();
  double* factor = shared + threads_of_columns;  // [chunks]
  const int64_t stride = 2 * (2 + seg.width), j = blockIdx.x * columns_of_block + threadIdx.x % columns_of_block;
  for (int64_t k = blockIdx.y; k < plan.chunks.number; k += gridDim.y) {
    const int64_t in_slot[2] = {plan.parts[2 * k], plan.parts[2 * k + 1]};
    const int slot = in_slot[1] >= 0;
    const int64_t s = slot ? in_slot[1] : in_slot[0];
    if (s < 0) continue;
    const Stretch stretch = stretch_of(seg, s);
    if (stretch.first < k * plan.chunks.size) continue;
    const int64_t n = (stretch.last - 1) / plan.chunks.size + 1 - k;
    const double* partial = plan.partial + k * stride;
    const auto part = [&](int64_t i) { return partial + i * stride + (i == 0 ? slot * (2 + seg.width) : 0); };
    double top = 0, total = 1;
    if (plan.beta) {
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) top = part(i)[0] > top ? part(i)[0] : top;
      top = max_over_lanes(top);
      __syncthreads();
      if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = top;
      __syncthreads();
      for (int i = 0; i < threads_of_columns / warp_size; ++i) top = shared[i] > top ? shared[i] : top;
    }
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) factor[i] = scale_down(part(i)[0], top);
    __syncthreads();
    if (plan.beta) {
      total = sum_of_column(n, shared, [&](int64_t i) { return factor[i] * part(i)[1]; });
      if (threadIdx.x == 0 && blockIdx.x == 0) {
        plan.final[2 * k] = top;
        plan.final[2 * k + 1] = total;
      }
    }
    const double sum =
        sum_of_column(n, shared, [&](int64_t i) { return j < seg.width ? factor[i] * part(i)[2 + j] : 0; });
    const double value[1] = {plan.beta ? sum / total : sum};
    if (threadIdx.x < columns_of_block && j < seg.width) store(out, type, place_of(seg, s) * seg.width + j, value);
    __syncthreads();
  }
}

// The weights of long segments from their logits.
template <class T>
__global__ void alpha_kernel(Segments seg, Plan<T> plan, T* alpha) {
  for (int64_t k = blockIdx.x; k < plan.chunks.number; k += gridDim.x)
    for (int slot = 0; slot < 2; ++slot) {
      if (plan.parts[2 * k + slot] < 0) continue;
      const Stretch all = stretch_of(seg, plan.parts[2 * k + slot]);
      const double* final = plan.final + all.first / plan.chunks.size * 2;
      const T top = static_cast<T>(final[0]), scale = static_cast<T>(1 / final[1]);
      const int64_t first = std::max(all.first, k * plan.chunks.size);
      const int64_t last = std::min(all.last, (k + 1) * plan.chunks.size);
      for (int64_t e = first + threadIdx.x; e < last; e += blockDim.x)
        alpha[e] = std::exp(plan.beta[e] - top) * scale * count_of<T>(seg, e);
    }
}

}  // namespace

template <class S>
void segment_sums(const Device& device, const SegmentSums<S>& of) {
  using T = Compute<S>;
  const Segments& seg = of.seg;
  const int64_t segments = seg.graphs * seg.branches;
  if (segments == 0) return;
  const Tiling tiling = tiling_of<S>(seg.width, {of.z, of.vectors, of.out});
  Plan<T> plan = {tiling.group, tiling.group, tiling.columns, of.alpha, chunks_of(seg.entries), 1};
  const bool computed_before = of.alpha && tiling.tiles > 1;
  Tensor beta = device.bytes_for<T>(computed_before ? seg.entries : 0);
  if (computed_before) {
    plan.beta = static_cast<T*>(beta.mutable_data_ptr());
    device.launch(&beta_kernel<S>, blocks_for("index", seg.entries, warps), threads, 0, seg, of.z, of.w,
                  static_cast<T*>(beta.mutable_data_ptr()));
  }
  const int64_t chunks = plan.chunks.number, slots = 2 * chunks;
  Tensor memory = device.bytes_for<double>(slots * (4 + seg.width));
  plan.partial = static_cast<double*>(memory.mutable_data_ptr());
  plan.final = plan.partial + slots * (2 + seg.width);
  plan.parts = reinterpret_cast<int64_t*>(plan.final + slots);

  dispatch_tiling<S>(tiling, [&](auto v, auto k) {
    // The mean segment in one round, or, where a warp would need several, by a block.
    const int64_t at_once = rows_at_once(v, k), mean = (seg.entries + segments - 1) / segments;
    while (plan.team < warp_size && at_once * (plan.team / plan.group) < mean) plan.team *= 2;
    if (at_once * (warp_size / plan.group) * 4 < mean) plan.team = threads;
    const int64_t blocks = chunks + (segments + threads / plan.team - 1) / (threads / plan.team);
    while (chunks > 0 && 2 * plan.every * chunks <= blocks) plan.every *= 2;
    const bool shares = chunks > 0 || plan.team > warp_size;
    const int64_t shared = shares ? warps * (2 + tiling.columns) * static_cast<int64_t>(sizeof(double)) : 0;
    const auto kernel = of.alpha && !computed_before ? &sums_kernel<S, v, k, true> : &sums_kernel<S, v, k, false>;
    device.launch(kernel, grid_of(tiling.tiles > UINT16_MAX ? "z" : "ptr", blocks, tiling.tiles), threads, shared, of,
                  plan);
  });
  if (chunks == 0) return;
  const int64_t shared = (threads_of_columns + chunks) * static_cast<int64_t>(sizeof(double));
  const int64_t resident = device.resident_blocks(&combine_kernel<T>, threads_of_columns, shared);
  const int64_t blocks = std::min(chunks, resident);
  const int64_t tiles = std::max<int64_t>((seg.width + columns_of_block - 1) / columns_of_block, 1);
  device.launch(&combine_kernel<T>, grid_of("z", tiles, blocks), threads_of_columns, shared, seg, plan, of.out,
                of.type);
  if (plan.beta) device.launch(&alpha_kernel<T>, grid_of("index", chunks), threads, 0, seg, plan, of.alpha);
}

template void segment_sums(const Device&, const SegmentSums<float>&);
template void segment_sums(const Device&, const SegmentSums<double>&);
template void segment_sums(const Device&, const SegmentSums<BFloat16>&);
template void segment_sums(const Device&, const SegmentSums<Half>&);

}  // namespace spin_fast

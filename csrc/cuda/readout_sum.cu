// Weighted sums of the rows of segments, in one pass over the rows.
//
// Layout: rows row-major [rows, h]; sums [G, (R + 1) * h]. Parallel axis: segments, each taken by a team of lanes, from
// part of a warp up to a block by the mean size; the team's lane groups (see Tiling) take rows in turn, several at once
// so that their loads are in flight together. Long segments are cut into pieces where ranges of entries begin, a block
// per range; their partial sums are added up in order. Accumulator: a few rows in Compute<S>, their sums in float64.
// With the softmax every warp keeps a running maximum of the segment; a higher one scales down the sums so far. The
// logits are kept in alpha until the denominator is known. Rows wider than the registers of a warp are taken in tiles
// of columns, and their logits are computed beforehand.

#include <type_traits>

#include "readout_sum.h"

namespace spin_fast {
namespace {

constexpr int threads = 128, warps = threads / warp_size;

// How the work is divided.
template <class T>
struct Partition {
  int group, team;  // lanes of a row, of a segment
  int64_t columns;  // of a tile
  const T* beta;    // [nnz], with the softmax
  Ranges ranges;
  int every;        // a power of two: every so many blocks one takes a range, as long as there are ranges
  double* partial;  // [ranges, 2 pieces, 2 + h]: the highest logit, the denominator, the sums
  int64_t* pieces;  // [ranges, 2], the long segment of each piece, or -1
  double* final;    // [ranges, 2], the logit and denominator of a long segment, at the range where it begins
};

constexpr int rows_at_once(int values, int per_lane) {
  return per_lane == 1 ? 8 : values == 1 ? 4 : values == 8 ? 1 : 2;
}

// The factor from a sum of exp(beta - from) to one of exp(beta - to); 1 if both are infinite.
__device__ inline double scale_down(double from, double to) { return from == to ? 1 : std::exp(from - to); }

// Some blocks take the pieces of long segments in a range, which may be none; the others whole segments. They
// alternate, since the former wait for a search while the latter have rows to load. Dots: logits are computed here.
template <class S, int V, int K, bool Dots>
__global__ void __launch_bounds__(threads, K == 1 && V == 8 ? 4 : 1)
    sums_kernel(ReadoutSum<S> of, Partition<Compute<S>> partition) {
  using T = Compute<S>;
  constexpr int U = rows_at_once(V, K);
  const Segments& seg = of.seg;
  const int64_t width = seg.width;
  const int64_t block = blockIdx.x, range = block >> log2_of(partition.every);
  const bool softmax = partition.beta != nullptr;
  const bool by_range = range < partition.ranges.number && (block & (partition.every - 1)) == 0;
  const int team = by_range ? threads : partition.team, in_team = threadIdx.x & (team - 1);
  const int lane = in_team & (partition.group - 1), group = in_team >> log2_of(partition.group);
  const int groups = team >> log2_of(partition.group), in_warp = team < warp_size ? team : warp_size;
  const int64_t first_column = blockIdx.y * partition.columns;
  const auto column = [&](int k) { return first_column + (k * partition.group + lane) * V; };

  for (int piece = 0; piece < (by_range ? 2 : 1); ++piece) {
    EntryRange entries = {-1, 0, 0, 0};
    if (by_range) {
      entries = piece_of(seg, partition.ranges, range, piece);
      if (threadIdx.x == 0 && blockIdx.y == 0) partition.pieces[2 * range + piece] = entries.segment;
      if (entries.segment < 0) continue;
    } else {
      const int64_t before = std::min(range + 1, partition.ranges.number);  // blocks before this one
      const int64_t s = ((block - before) * threads + threadIdx.x) >> log2_of(team);
      if (s < seg.graphs * seg.branches) entries = entries_of(seg, s);
      if (is_long(partition.ranges, entries)) entries = {-1, 0, 0, 0};
    }

    T top = 0;  // beta is never below 0
    double total = 0, sum[K][V] = {};
    T w[K][V] = {};
    if constexpr (Dots) {
      const S* from = of.w + entries.branch * width;
      for (int k = 0; k < K; ++k)
        for (int i = 0; i < V; ++i)
          if (column(k) < width) w[k][i] = widened(from[column(k) + i]);
    }
    // As many rounds as the longest segment of the warp needs, since all its lanes take part in the shuffles.
    for (int64_t at = entries.begin + group; __any_sync(all_lanes, at < entries.end); at += U * groups) {
      const int left = static_cast<int>(std::min(entries.end - at, int64_t{U} * groups));
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
            for (int i = 0; i < V; ++i) weight[u] += w[k][i] * widened(row[u][k].at[i]);
        for (int step = partition.group / 2; step > 0; step /= 2)
#pragma unroll
          for (int u = 0; u < U; ++u) weight[u] += __shfl_xor_sync(all_lanes, weight[u], step);
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = weight[u] < 0 ? T{0} : weight[u];
        // Each lane of a group stores the logit of another row, so that a warp stores adjacent logits.
        for (int u = lane; u - lane < U; u += partition.group) {
          T beta = 0;
#pragma unroll
          for (int i = 0; i < U; ++i) beta = i == u ? weight[i] : beta;
          if (u < U && is_there(u)) of.alpha[at + u * groups] = beta;
        }
      } else if (softmax) {
#pragma unroll
        for (int u = 0; u < U; ++u) weight[u] = is_there(u) ? partition.beta[at + u * groups] : T{0};
      }
      double factor = 1;
      if (softmax) {
        T high = top;  // missing rows have logit 0
#pragma unroll
        for (int u = 0; u < U; ++u) high = weight[u] > high ? weight[u] : high;
        for (int step = partition.group; step < in_warp; step *= 2) {
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
          for (int i = 0; i < V; ++i) part[i] += weight[u] * widened(row[u][k].at[i]);
        if constexpr (!Dots)
          if (of.also && column(k) < width)
#pragma unroll
            for (int u = 0; u < U; ++u)
              if (is_there(u)) {
                const int64_t entry = at + u * groups;
                const T also = of.also[entry];
                const T* vectors = of.vectors + row_of(seg, entry) % of.num_vectors * width;
                const Pack<T, V> vector = load<V>(vectors + column(k));
                for (int i = 0; i < V; ++i) part[i] += also * vector.at[i];
              }
        for (int i = 0; i < V; ++i) sum[k][i] = sum[k][i] * factor + static_cast<double>(part[i]);
      }
    }

    // Add up the lane groups of a warp, then the warps of a block.
    for (int step = partition.group; step < in_warp; step *= 2) {
      total += __shfl_xor_sync(all_lanes, total, step);
      for (int k = 0; k < K; ++k)
        for (int i = 0; i < V; ++i) sum[k][i] += __shfl_xor_sync(all_lanes, sum[k][i], step);
    }
    const int64_t at_readout = readout_row(seg, entries.segment, entries.branch);  // unused without a segment
    double scale = softmax && entries.end > entries.begin ? 1 / total : 1;
    if (team <= warp_size) {
      if (entries.segment >= 0 && group == 0)
        for (int k = 0; k < K; ++k)
          if (column(k) < width) {
            for (int i = 0; i < V; ++i) sum[k][i] *= scale;
            store(of.out, of.type, at_readout * width + column(k), sum[k]);
          }
      __syncwarp();
    } else {
      double* shared = shared_memory<double>();
      const int64_t stride = 2 + partition.columns;
      double* mine = shared + threadIdx.x / warp_size * stride;
      if (threadIdx.x % warp_size == 0) {
        mine[0] = static_cast<double>(top);
        mine[1] = total;
      }
      if (threadIdx.x % warp_size < partition.group)
        for (int k = 0; k < K; ++k)
          for (int i = 0; i < V; ++i) mine[2 + (k * partition.group + lane) * V + i] = sum[k][i];
      __syncthreads();
      double factor[warps];
      for (int i = 0; i < warps; ++i) top = static_cast<T>(shared[i * stride]) > top ? shared[i * stride] : top;
      total = 0;
      for (int i = 0; i < warps; ++i) {
        factor[i] = scale_down(shared[i * stride], top);
        total += factor[i] * shared[i * stride + 1];
      }
      if (softmax && entries.end > entries.begin) scale = 1 / total;
      double* partial = by_range ? partition.partial + (2 * range + piece) * (2 + width) : nullptr;
      if (by_range && threadIdx.x == 0 && blockIdx.y == 0) {
        partial[0] = static_cast<double>(top);
        partial[1] = total;
      }
      for (int64_t j = threadIdx.x; j < partition.columns && first_column + j < width && entries.segment >= 0;
           j += threads) {
        double value[1] = {0};
        for (int i = 0; i < warps; ++i) value[0] += factor[i] * shared[i * stride + 2 + j];
        if (by_range) {
          partial[2 + first_column + j] = value[0];
        } else {
          value[0] *= scale;
          store(of.out, of.type, at_readout * width + first_column + j, value);
        }
      }
      __syncthreads();  // `shared` is no longer read; the logits are visible
    }
    if (softmax && !by_range && blockIdx.y == 0) {
      const T denominator = static_cast<T>(scale);
      for (int64_t e = entries.begin + in_team; e < entries.end; e += team)
        of.alpha[e] = std::exp(partition.beta[e] - top) * denominator * count_of<T>(seg, e);
    }
  }
}

// The logits of wide rows, one warp per entry.
template <class S>
__global__ void beta_kernel(Segments seg, const S* z, const S* w, Compute<S>* beta) {
  const int64_t e = thread_index() / warp_size;
  if (e >= seg.entries) return;
  const int64_t row = row_of(seg, e) * seg.width, branch = find_segment<true>(seg, e) / seg.graphs;
  Compute<S> logit = 0;
#pragma unroll 8
  for (int64_t j = threadIdx.x % warp_size; j < seg.width; j += warp_size)
    logit += widened(w[branch * seg.width + j]) * widened(z[row + j]);
  logit = sum_over_lanes(logit);
  if (threadIdx.x % warp_size == 0) beta[e] = logit < 0 ? Compute<S>{0} : logit;
}

// The readouts of long segments from the partial sums of their pieces, by the blocks of the range where each begins.
template <class T>
__global__ void combine_kernel(Segments seg, Partition<T> partition, void* out, ScalarType type) {
  double* shared = shared_memory<double>();
  double* factor = shared + threads_of_columns;  // [ranges]
  const int64_t stride = 2 * (2 + seg.width), j = blockIdx.x * columns_of_block + threadIdx.x % columns_of_block;
  for (int64_t k = blockIdx.y; k < partition.ranges.number; k += gridDim.y) {
    const int64_t segments[2] = {partition.pieces[2 * k], partition.pieces[2 * k + 1]};
    const int piece = segments[1] >= 0;
    const int64_t s = piece ? segments[1] : segments[0];
    if (s < 0) continue;
    const EntryRange entries = entries_of(seg, s);
    if (entries.begin < k * partition.ranges.size) continue;
    const int64_t n = (entries.end - 1) / partition.ranges.size + 1 - k;
    const double* partial = partition.partial + k * stride;
    const auto part = [&](int64_t i) { return partial + i * stride + (i == 0 ? piece * (2 + seg.width) : 0); };
    double top = 0, total = 1;
    if (partition.beta) {
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) top = part(i)[0] > top ? part(i)[0] : top;
      top = max_over_lanes(top);
      __syncthreads();
      if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = top;
      __syncthreads();
      for (int i = 0; i < threads_of_columns / warp_size; ++i) top = shared[i] > top ? shared[i] : top;
    }
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) factor[i] = scale_down(part(i)[0], top);
    __syncthreads();
    if (partition.beta) {
      total = sum_of_column(n, shared, [&](int64_t i) { return factor[i] * part(i)[1]; });
      if (threadIdx.x == 0 && blockIdx.x == 0) {
        partition.final[2 * k] = top;
        partition.final[2 * k + 1] = total;
      }
    }
    const double sum =
        sum_of_column(n, shared, [&](int64_t i) { return j < seg.width ? factor[i] * part(i)[2 + j] : 0; });
    const double value[1] = {partition.beta ? sum / total : sum};
    if (threadIdx.x < columns_of_block && j < seg.width) store(out, type, readout_row(seg, s) * seg.width + j, value);
    __syncthreads();
  }
}

// The weights of long segments from their logits.
template <class T>
__global__ void alpha_kernel(Segments seg, Partition<T> partition, T* alpha) {
  for (int64_t k = blockIdx.x; k < partition.ranges.number; k += gridDim.x)
    for (int piece = 0; piece < 2; ++piece) {
      if (partition.pieces[2 * k + piece] < 0) continue;
      const EntryRange entries = entries_of(seg, partition.pieces[2 * k + piece]);
      const double* final = partition.final + entries.begin / partition.ranges.size * 2;
      const T top = static_cast<T>(final[0]), scale = static_cast<T>(1 / final[1]);
      const int64_t begin = std::max(entries.begin, k * partition.ranges.size);
      const int64_t end = std::min(entries.end, (k + 1) * partition.ranges.size);
      for (int64_t e = begin + threadIdx.x; e < end; e += blockDim.x)
        alpha[e] = std::exp(partition.beta[e] - top) * scale * count_of<T>(seg, e);
    }
}

}  // namespace

template <class S>
void readout_sum(const Device& device, const ReadoutSum<S>& of) {
  using T = Compute<S>;
  const Segments& seg = of.seg;
  const int64_t segments = seg.graphs * seg.branches;
  if (segments == 0) return;
  const Tiling tiling = tiling_of<S>(seg.width, {of.z, of.vectors, of.out});
  Partition<T> partition = {tiling.group, tiling.group, tiling.columns, of.alpha, ranges_of(seg.entries), 1};
  const bool computed_before = of.alpha && tiling.tiles > 1;
  const Buffer<T> beta(device, computed_before ? seg.entries : 0);
  if (computed_before) {
    partition.beta = beta;
    device.launch(&beta_kernel<S>, blocks_for("index", seg.entries, warps), threads, 0, seg, of.z, of.w, beta);
  }
  const int64_t ranges = partition.ranges.number, pieces = 2 * ranges;
  const Buffer<double> partial(device, pieces * (2 + seg.width)), final(device, pieces);
  const Buffer<int64_t> segment_of_piece(device, pieces);
  partition.partial = partial;
  partition.final = final;
  partition.pieces = segment_of_piece;

  dispatch_tiling<S>(tiling, [&](auto v, auto k) {
    // A team takes the mean segment in one round; if a warp would need several rounds, a block takes it.
    const int64_t at_once = rows_at_once(v, k), mean = (seg.entries + segments - 1) / segments;
    while (partition.team < warp_size && at_once * (partition.team / partition.group) < mean) partition.team *= 2;
    if (at_once * (warp_size / partition.group) * 4 < mean) partition.team = threads;
    const int64_t blocks = ranges + (segments + threads / partition.team - 1) / (threads / partition.team);
    while (ranges > 0 && 2 * partition.every * ranges <= blocks) partition.every *= 2;
    const bool by_block = ranges > 0 || partition.team > warp_size;
    const int64_t shared = by_block ? warps * (2 + tiling.columns) * static_cast<int64_t>(sizeof(double)) : 0;
    const auto kernel = of.alpha && !computed_before ? &sums_kernel<S, v, k, true> : &sums_kernel<S, v, k, false>;
    device.launch(kernel, grid_of(tiling.tiles > UINT16_MAX ? "z" : "ptr", blocks, tiling.tiles), threads, shared, of,
                  partition);
  });
  if (ranges == 0) return;
  const int64_t shared = (threads_of_columns + ranges) * static_cast<int64_t>(sizeof(double));
  const int64_t resident = device.resident_blocks(&combine_kernel<T>, threads_of_columns, shared);
  const int64_t blocks = std::min(ranges, resident);
  const int64_t tiles = std::max<int64_t>((seg.width + columns_of_block - 1) / columns_of_block, 1);
  device.launch(&combine_kernel<T>, grid_of("z", tiles, blocks), threads_of_columns, shared, seg, partition, of.out,
                of.type);
  if (partition.beta) device.launch(&alpha_kernel<T>, grid_of("index", ranges), threads, 0, seg, partition, of.alpha);
}

template void readout_sum(const Device&, const ReadoutSum<float>&);
template void readout_sum(const Device&, const ReadoutSum<double>&);
template void readout_sum(const Device&, const ReadoutSum<BFloat16>&);
template void readout_sum(const Device&, const ReadoutSum<Half>&);

}  // namespace spin_fast

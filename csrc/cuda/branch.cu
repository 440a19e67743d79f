// branch_readout and its gradient on CUDA.
//
// Layout: the rows of a graph in a branch are taken in tiles, which go through the MLP in shared memory (mlp.h) and
// into the readout by an online softmax; z is never stored, the backward pass evaluates the MLP again. A tile of joint
// rows has their parts side by side. Parallel axis: blocks of branches (grid.y) x tiles (grid.x); a segment's tiles are
// dealt out in turn to up to `pieces` blocks, whose readouts a second kernel combines. Accumulator: T within a piece,
// float64 over the pieces of a segment, over blocks, and over what refers to a row.
//
// Every entry is evaluated, even if several refer to the same row: the host would have to wait for the device to know
// which do. The entries of one segment are different rows already if they have counts.

#include <tuple>
#include <type_traits>

#include "branch.h"
#include "entries.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t combine_threads = 128, gather_threads = 256;

struct Tile {
  int64_t first;  // entry
  int rows;
};

__host__ __device__ inline int64_t tiles_of(int64_t entries, int tile) { return (entries + tile - 1) / tile; }

// Piece `piece` of a segment: every `pieces`-th tile from tile `piece` on. The first pieces of all graphs come before
// the second ones: many graphs have only one, and these are to be spread over the blocks.
template <class T>
struct Task {
  int64_t position, piece, begin, entries, tiles;

  __device__ Task(const BranchCall<T>& call, int64_t branch, int64_t number)
      : position(number % call.graphs), piece(number / call.graphs) {
    const int64_t graph = call.ids ? call.ids[position] : position;
    begin = first_entry(call.seg, branch, graph);
    entries = first_entry(call.seg, branch, graph + 1) - begin;
    tiles = tiles_of(entries, call.mlp.layout.tile);
  }
  __device__ Tile tile(int64_t number, int size) const {
    const int64_t left = entries - number * size;
    return {begin + number * size, static_cast<int>(left < size ? left : size)};
  }
};

// f(task) for the tasks of a block, every gridDim.x-th of a branch, that have tiles. Most have none where graphs are
// small, so each lane looks at another one: their sizes are on the way together.
template <class T, class F>
__device__ void for_each_task(const BranchCall<T>& call, int64_t branch, F f) {
  const int64_t tasks = call.graphs * call.pieces, step = gridDim.x;
  for (int64_t first = blockIdx.x; first < tasks; first += warp_size * step) {
    const int64_t own = first + threadIdx.x % warp_size * step;
    const Task<T> mine(call, branch, own < tasks ? own : first);
    for (unsigned found = __ballot_sync(all_lanes, own < tasks && mine.piece < mine.tiles); found; found &= found - 1)
      f(Task<T>(call, branch, first + (__ffs(found) - 1) * step));
  }
}

// Sends the rows of a tile through the MLP; returns their number, padded with rows of zeros to a multiple of 4. The
// block is synchronised before and after.
template <Math math, class T>
__device__ int evaluate(const BranchCall<T>& call, const Memory<T>& memory, const Tile& tile) {
  const int rows = padded_to_side(tile.rows), width = call.mlp.layout.in(), ld = call.mlp.layout.ld;
  T* input = memory.tile + call.mlp.layout.input;
  const auto load = [&](auto place_of) {  // in x, of a column of an entry
    copy<T>(
        rows, width,
        [&](int row, int column) { return call.x[place_of(tile.first + min(row, tile.rows - 1), column)]; },
        [&](int row, int column, T value) { input[column * ld + row] = row < tile.rows ? value : T(0); });
  };
  __syncthreads();  // the previous tile is no longer read
  if (call.num_parts > 0)
    load([&](int64_t e, int column) {
      const int part = column / call.part_width;
      return (call.parts[row_of(call.seg, e) * call.num_parts + part] - part) * call.part_width + column;
    });
  else if (call.seg.narrow_index)
    load([&](int64_t e, int column) { return static_cast<int64_t>(call.seg.narrow_index[e]) * width + column; });
  else if (call.seg.wide_index)
    load([&](int64_t e, int column) { return call.seg.wide_index[e] * width + column; });
  else
    load([&](int64_t e, int column) { return e * width + column; });
  __syncthreads();
  forward<math>(call.mlp.layout, memory, rows);
  return rows;
}

// <w, z> of one row.
template <class T>
__device__ T logit_of(const MlpLayout& mlp, const T* w, const T* z, int row) {
  T sum = 0;
  for (int j = 0; j < mlp.out(); ++j) sum += w[j] * z[j * mlp.ld + row];
  return sum;
}

// ReLU; NaN stays NaN.
template <class T>
__device__ T rectified(T value) {
  return value < 0 ? T(0) : value;
}

template <Math math, bool Shared, class T>
__global__ void forward_kernel(BranchCall<T> call) {
  const MlpLayout& mlp = call.mlp.layout;
  const int64_t branch = blockIdx.y;
  const Memory<T> memory = prepare_memory<Shared>(call.mlp);
  T* weight = memory.tile + mlp.per_row;
  T* beta = weight + mlp.ld;
  T* sum = memory.tile + mlp.per_column;
  const T* w = memory.weights + mlp.packed_w;
  const T* z = memory.tile + mlp.layers[mlp.depth - 1].activation;
  const int width = mlp.out();
  for_each_task(call, branch, [&](const Task<T>& task) {
    T top = 0, total = 0;
    for (int j = threadIdx.x; j < width; j += blockDim.x) sum[j] = 0;
    for (int64_t number = task.piece; number < task.tiles; number += call.pieces) {
      const Tile tile = task.tile(number, mlp.tile);
      evaluate<math>(call, memory, tile);
      T factor = 1;
      if (mlp.w >= 0) {
        for (int row = threadIdx.x; row < tile.rows; row += blockDim.x) beta[row] = rectified(logit_of(mlp, w, z, row));
        __syncthreads();
        T highest = top;
        for (int row = 0; row < tile.rows; ++row) highest = beta[row] > highest ? beta[row] : highest;
        factor = exp(top - highest);
        top = highest;
      }
      for (int row = threadIdx.x; row < tile.rows; row += blockDim.x)
        weight[row] = count_of<T>(call.seg, tile.first + row) * (mlp.w >= 0 ? exp(beta[row] - top) : T(1));
      __syncthreads();
      T added = 0;
      for (int row = 0; row < tile.rows; ++row) added += weight[row];
      total = total * factor + added;
      for (int j = threadIdx.x; j < width; j += blockDim.x)
        sum[j] = sum[j] * factor + dot_of_columns(weight, z + j * mlp.ld, tile.rows);
    }
    const int64_t at = (branch * call.graphs + task.position) * call.pieces + task.piece;
    if (threadIdx.x == 0) call.top[at] = top, call.total[at] = total;
    for (int j = threadIdx.x; j < width; j += blockDim.x) call.sum[at * width + j] = sum[j];
    __syncthreads();  // shared memory is no longer read
  });
}

// Combines the pieces of a segment, one warp each, lanes over pieces, then over columns; top[s, 0] and scale are those
// of the whole segment afterwards.
template <class T>
__global__ void combine_kernel(BranchCall<T> call) {
  const int64_t s = thread_index() / warp_size;
  const int lane = threadIdx.x % warp_size;
  if (s >= call.seg.branches * call.graphs) return;
  const int64_t branch = s / call.graphs, width = call.mlp.layout.out();
  const Task<T> task(call, branch, s % call.graphs);
  const int64_t pieces = task.tiles < call.pieces ? task.tiles : call.pieces;
  const T* tops = call.top + s * call.pieces;
  T top = 0;
  for (int64_t p = lane; p < pieces; p += warp_size) top = tops[p] > top ? tops[p] : top;
  top = max_over_lanes(top);
  double total = 0;
  for (int64_t p = lane; p < pieces; p += warp_size)
    total += static_cast<double>(call.total[s * call.pieces + p]) * exp(static_cast<double>(tops[p]) - top);
  total = sum_over_lanes(total);
  const double scale = call.mlp.layout.w < 0 ? 1.0 : pieces > 0 ? 1 / total : 0.0;
  for (int64_t first = 0; first < width; first += warp_size) {
    const int64_t j = first + lane;
    double sum = 0;
    for (int64_t p = 0; p < pieces; p += warp_size) {
      const double factor = p + lane < pieces ? exp(static_cast<double>(tops[p + lane]) - top) : 0.0;
      const int here = static_cast<int>(pieces - p < warp_size ? pieces - p : warp_size);
#pragma unroll 4
      for (int i = 0; i < here; ++i) {
        const double of_piece = __shfl_sync(all_lanes, factor, i);
        if (j < width) sum += call.sum[(s * call.pieces + p + i) * width + j] * of_piece;
      }
    }
    if (j < width) call.readout[task.position * call.stride + branch * width + j] = static_cast<T>(sum * scale);
  }
  __syncwarp();  // every lane has read the tops
  if (lane == 0) {
    call.top[s * call.pieces] = top;
    call.scale[s] = static_cast<T>(scale);
  }
}

template <Math math, bool Shared, class T>
__global__ void backward_kernel(BranchCall<T> call) {
  const MlpLayout& mlp = call.mlp.layout;
  const int64_t branch = blockIdx.y;
  const Memory<T> memory = prepare_memory<Shared>(call.mlp);
  T* alpha = memory.tile + mlp.per_row;
  T* dbeta = alpha + mlp.ld;
  T* ds = memory.tile + mlp.per_column;
  const T* w = memory.weights + mlp.packed_w;
  const LayerLayout& last = mlp.layers[mlp.depth - 1];
  const T* z = memory.tile + last.activation;
  const T slope = static_cast<T>(last.slope);
  const int width = mlp.out();
  for_each_task(call, branch, [&](const Task<T>& task) {
    const int64_t s = branch * call.graphs + task.position;
    const int64_t at = task.position * call.stride + branch * width;
    __syncthreads();  // the previous ds is no longer read
    for (int j = threadIdx.x; j < width; j += blockDim.x) ds[j] = call.grad[at + j];
    T t = 0, top = 0, scale = 1;
    if (mlp.w >= 0) {
      for (int j = 0; j < width; ++j) t += call.grad[at + j] * call.readout[at + j];
      top = call.top[s * call.pieces];
      scale = call.scale[s];
    }
    for (int64_t number = task.piece; number < task.tiles; number += call.pieces) {
      const Tile tile = task.tile(number, mlp.tile);
      const int rows = evaluate<math>(call, memory, tile);
      for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        T a = 0, b = 0;
        if (row < tile.rows) {
          a = count_of<T>(call.seg, tile.first + row);
          if (mlp.w >= 0) {
            const T logit = logit_of(mlp, w, z, row);
            T dot = 0;
            for (int j = 0; j < width; ++j) dot += ds[j] * z[j * mlp.ld + row];
            a *= exp(rectified(logit) - top) * scale;
            b = logit <= 0 ? T(0) : a * (dot - t);
          }
        }
        alpha[row] = a;
        dbeta[row] = b;
      }
      __syncthreads();
      T* dz = memory.tile + mlp.spare[0];
      for (Walk walk(rows); walk.major < width; walk.next()) {
        const int j = walk.major, row = walk.minor;
        T value = alpha[row] * ds[j];
        if (mlp.w >= 0) value += dbeta[row] * w[j];
        const T factor = gate(z[j * mlp.ld + row], slope);
        dz[j * mlp.ld + row] = row < tile.rows ? value * factor : T(0);
      }
      for (int j = threadIdx.x; mlp.w >= 0 && j < width; j += blockDim.x)
        memory.gradient[mlp.w_gradient + j] += dot_of_columns(dbeta, z + j * mlp.ld, tile.rows);
      __syncthreads();
      backward<math>(mlp, memory, rows, [&](int row, int column, T value) {
        if (row < tile.rows && column < mlp.in()) call.dx[(tile.first + row) * mlp.in() + column] = value;
      });
    }
  });
  store_gradient(call.mlp, memory);
}

// Row u is the sum of the rows entries[offsets[u]] to entries[offsets[u + 1]] of `from`, in their order.
template <class T>
__global__ void gather_kernel(const int64_t* offsets, Integers entries, const T* from, int64_t rows, int64_t width,
                              T* to) {
  const int64_t i = thread_index();
  if (i >= rows * width) return;
  const int64_t row = i / width, column = i % width;
  double sum = 0;
  for (int64_t e = offsets[row]; e < offsets[row + 1]; ++e) sum += from[entries[e] * width + column];
  to[i] = static_cast<T>(sum);
}

}  // namespace

template <class T>
FusedBranches<T>::FusedBranches(const Device& device, const Arguments& arguments, const Tensor& rows,
                                const Tensor& parameters, int64_t first, bool tf32)
    : device_(device),
      model_(arguments.model),
      parameters_(parameters.const_data_ptr<T>()),
      first_(first),
      tf32_(false) {
  require(model_.branches <= UINT16_MAX, "num_branches must be at most ", UINT16_MAX, ", got ", model_.branches);
  require(!arguments.rows.row_begin, "rows must be dense on a GPU");
  if constexpr (std::is_same_v<T, float>) tf32_ = tf32 && device.has_tf32(&forward_kernel<Math::tf32, true, T>);
  call_.seg = arguments.seg;
  call_.ids = arguments.ids;
  call_.graphs = arguments.graphs;
  call_.x = rows.const_data_ptr<T>();
  call_.parts = {arguments.parts.narrow, arguments.parts.wide};
  call_.num_parts = arguments.parts.given ? static_cast<int>(arguments.parts.number) : 0;
  call_.part_width = static_cast<int>(arguments.rows.width);
}

template <class T>
void FusedBranches<T>::forward(T* readout, int64_t stride) {
  prepare(false, false);
  // Several blocks take the tiles of a segment if there are few segments.
  const int64_t segments = call_.graphs * model_.branches;
  const int64_t most = tiles_of(std::max<int64_t>(call_.seg.entries, 1), mlp_->layout.tile);
  call_.pieces = std::clamp<int64_t>(4096 / std::max<int64_t>(segments, 1), 1, std::min<int64_t>(most, 1024));
  call_.top = top_ = Buffer<T>(device_, segments * call_.pieces);
  call_.total = total_ = Buffer<T>(device_, segments * call_.pieces);
  call_.sum = sum_ = Buffer<T>(device_, segments * call_.pieces * model_.width());
  call_.scale = scale_ = Buffer<T>(device_, segments);
  call_.readout = readout;
  call_.stride = stride;
  launch([](auto math, auto shared) { return &forward_kernel<math, shared, T>; });
  device_.launch(&combine_kernel<T>, blocks_for("ptr", segments, combine_threads / warp_size), combine_threads, 0,
                 call_);
}

template <class T>
const MlpCall<T>& FusedBranches<T>::backward(const T* grad, T* dx) {
  prepare(true, dx != nullptr);
  call_.grad = grad;
  call_.dx = dx;
  launch([](auto math, auto shared) { return &backward_kernel<math, shared, T>; });
  return call_.mlp;
}

template <class T>
void FusedBranches<T>::prepare(bool with_gradient, bool with_input_gradient) {
  MlpLayout mlp = layers_of("widths", model_.features, model_.widths, model_.slope, model_.branches,
                            first_ + (model_.attention ? model_.readout_width() : 0), false);
  mlp.with_gradient = with_gradient;
  mlp.with_input_gradient = with_input_gradient;
  mlp.tf32 = tf32_;
  mlp.w_gradient = mlp.gradient_size;
  if (model_.attention) {
    mlp.w = first_;
    mlp.w_branch = model_.width();
    mlp.gradient_size += static_cast<int>(model_.width());
  }
  // Joint rows are wide: small tiles for small graphs, most of which should fill theirs.
  const int64_t mean = call_.seg.entries / std::max<int64_t>(call_.seg.graphs * model_.branches, 1);
  mlp_.emplace(device_, "widths", mlp, model_.branches, parameters_, call_.num_parts > 0 && mean <= 40 ? 32 : 64);
}

// Launches kernel(constant Math, constant of whether tile and weights are shared memory) on as many blocks as are
// resident on the device at once, or fewer.
template <class T>
template <class F>
void FusedBranches<T>::launch(F kernel) {
  const MlpLayout& mlp = mlp_->layout;
  const auto with = [&](auto math) {
    return mlp.shared_weights ? kernel(math, std::true_type{}) : kernel(math, std::false_type{});
  };
  auto chosen = with(std::integral_constant<Math, Math::exact>{});
  if constexpr (std::is_same_v<T, float>)
    if (tf32_ && mlp.tile % 16 == 0) chosen = with(std::integral_constant<Math, Math::tf32>{});
  const int64_t resident =
      mlp.shared_tile ? device_.resident_blocks(chosen, mlp.threads, mlp.shared_bytes) : device_.multiprocessors();
  const int64_t blocks = std::min(std::max<int64_t>(resident / model_.branches, 1), call_.graphs * call_.pieces);
  call_.mlp = mlp_->call(blocks);
  device_.launch(chosen, grid_of("num_branches", blocks, model_.branches), mlp.threads, mlp.shared_bytes, call_);
}

template class FusedBranches<float>;
template class FusedBranches<double>;

namespace {

Tensor branch_readout(const Tensor& rows, OptionalTensor crow_indices, OptionalTensor col_indices, int64_t num_features,
                      const Tensor& parameters, OptionalTensor parts, const Tensor& ptr, OptionalTensor index,
                      OptionalTensor count, OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                      bool attention, double negative_slope, bool tf32, bool shared, bool) {
  const Arguments of = model_arguments(rows, crow_indices, col_indices, num_features, parts, ptr, index, count, ids,
                                       num_branches, widths, attention, negative_slope, shared, false);
  expect("parameters", parameters, {of.model.parameters()}, {rows.scalar_type()});
  const Device device(
      rows,
      {{"parameters", parameters}, {"parts", parts}, {"ptr", ptr}, {"index", index}, {"count", count}, {"ids", ids}});
  Tensor readout = device.empty({of.graphs, of.model.readout_width()}, rows.scalar_type());
  dispatch_compute(rows.scalar_type(), [&]<class T>(Tag<T>) {
    FusedBranches<T>(device, of, rows, parameters, 0, tf32)
        .forward(readout.mutable_data_ptr<T>(), of.model.readout_width());
  });
  return readout;
}

std::tuple<Tensor, Tensor> branch_readout_backward(const Tensor& grad, const Tensor& rows, OptionalTensor crow_indices,
                                                   OptionalTensor col_indices, int64_t num_features,
                                                   const Tensor& parameters, OptionalTensor parts, const Tensor& ptr,
                                                   OptionalTensor index, OptionalTensor count, OptionalTensor ids,
                                                   int64_t num_branches, std::vector<int64_t> widths, bool attention,
                                                   double negative_slope, bool tf32, bool shared, bool,
                                                   bool with_rows) {
  Arguments of = model_arguments(rows, crow_indices, col_indices, num_features, parts, ptr, index, count, ids,
                                 num_branches, widths, attention, negative_slope, shared, false);
  const ScalarType value = rows.scalar_type();
  expect("parameters", parameters, {of.model.parameters()}, {value});
  const int64_t width = of.model.readout_width(), features = of.model.features;
  expect("grad", grad, {of.graphs, width}, {value});
  const Device device(rows, {{"grad", grad},
                             {"parameters", parameters},
                             {"parts", parts},
                             {"ptr", ptr},
                             {"index", index},
                             {"count", count},
                             {"ids", ids}});
  Tensor gradient = device.empty({parameters.numel()}, value);
  Tensor drows = device.empty({with_rows ? of.rows.number : 0, num_features}, value);
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    const auto gather = [&](const Transposed& by, const T* from, int64_t to_rows, int64_t columns, T* to) {
      device.launch(&gather_kernel<T>, blocks_for("rows", to_rows * columns, gather_threads), gather_threads, 0,
                    by.offsets.const_data_ptr<int64_t>(), integers_of(by.entries), from, to_rows, columns, to);
    };
    // The gradients of the entries need memory, and how many entries the chosen graphs have is not known here. So all
    // graphs are taken: gradients are linear in `grad`, which is summed for a graph chosen twice and 0 for one left
    // out.
    const T* grads = grad.const_data_ptr<T>();
    Buffer<T> grads_of_all;
    if (with_rows && ids) {
      grads_of_all = Buffer<T>(device, of.seg.graphs * width);
      gather(transposed(device, ScalarType::Long, of.ids, of.graphs, of.seg.graphs), grads, of.seg.graphs, width,
             grads_of_all);
      grads = grads_of_all;
      of.ids = nullptr;
      of.graphs = of.seg.graphs;
    }
    const bool by_entry = with_rows && index, by_part = with_rows && parts;
    const Buffer<T> readout(device, of.graphs * width), dentries(device, by_entry ? of.seg.entries * features : 0),
        djoint(device, by_part ? of.seg.rows * features : 0);
    T* const to_rows = with_rows ? drows.mutable_data_ptr<T>() : nullptr;
    T* const to_inputs = by_part ? djoint : to_rows;
    FusedBranches<T> branches(device, of, rows, parameters, 0, tf32);
    branches.forward(readout, width);
    const MlpCall<T>& call = branches.backward(grads, by_entry ? dentries : to_inputs);
    T* const no_loss = nullptr;
    reduce_gradients(device, {call}, parameters.numel(), gradient.mutable_data_ptr<T>(), nullptr, no_loss);
    if (by_entry)
      gather(transposed(device, index->scalar_type(), index->const_data_ptr(), of.seg.entries, of.seg.rows), dentries,
             of.seg.rows, features, to_inputs);
    if (by_part)
      gather(transposed(device, parts->scalar_type(), parts->const_data_ptr(), parts->numel(), of.rows.number), djoint,
             of.rows.number, num_features, to_rows);
  });
  return {gradient, drows};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) {
  m.impl("branch_readout", TORCH_BOX(&branch_readout));
  m.impl("branch_readout_backward", TORCH_BOX(&branch_readout_backward));
}

}  // namespace spin_fast

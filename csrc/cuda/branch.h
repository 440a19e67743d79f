// branch_readout, its gradients and the training step on CUDA.
//
// Layout: the rows of a graph in a branch are taken in tiles, which go through the MLP in shared memory (mlp.h) and
// into the readout by an online softmax; z is never stored, the backward pass evaluates the MLP again. Parallel axis:
// blocks of branches (grid.y) x tiles (grid.x); a graph's tiles are dealt out to `parts` blocks in turn, whose readouts
// a second kernel puts together. Accumulator: T within a part, float64 over the parts of a graph and over blocks.
//
// Every entry is evaluated by itself: which rows several graphs share is not known without reading it back, and a graph
// refers to a row of its own once already.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "../model.h"
#include "entries.h"
#include "mlp.h"

namespace spin_fast {
namespace {

constexpr int64_t combine_threads = 128;
constexpr int pack_threads = 1024;
constexpr int64_t most_weights = INT32_MAX / 16;  // of a layer
constexpr int summands = 4;  // of a gradient, side by side: there are as many as blocks, and few parameters

// What of a block's memory is shared memory (the gradient only with the weights, these only with the tile), how much
// that is, and how many threads a block has.
struct Fit {
  bool tile, weights, gradient;
  int64_t shared_bytes, threads;
};

// What the kernels of one call share. Segment s = branch * graphs + position of the graph in `ids`.
template <class T>
struct Call {
  Segments seg;
  const int64_t* ids;
  int64_t graphs;
  int64_t parts;
  Stack stack;
  Fit fit;
  T* tiles;    // the memory of the blocks where it is not shared: [blocks, tile_size]
  T* weights;  // the packed weights where they are not shared: [R + 1, weights_size]
  const T* x;
  const T* parameters;
  T* top;      // [S, parts], the largest logit
  T* total;    // [S, parts], the softmax denominator
  T* sum;      // [S, parts, h]
  T* readout;  // [graphs, (R + 1) * h]
  T* scale;    // [S]: alpha_e = count_e exp(beta_e - top[s, 0]) scale
  const T* grad;
  T* partial;  // [R + 1, grid.x, gradient_size]
  T* dx;       // [entries, d] or null
};

struct Tile {
  int64_t first;  // entry
  int rows;
};

__host__ __device__ inline int64_t tiles_of(int64_t entries, int tile) { return (entries + tile - 1) / tile; }

// Tile `number` of a segment of so many entries from `begin` on.
__host__ __device__ inline Tile tile_of(int64_t begin, int64_t entries, int64_t number, int tile) {
  const int64_t left = entries - number * tile;
  return {begin + number * tile, static_cast<int>(left < tile ? left : tile)};
}

// The memory of a block, its gradient (at `kept`, if that is not shared) zero, its weights packed. `Shared`: the tile
// and the weights are shared memory; kernels are compiled for that by itself, as loads that may be of any memory take
// longer.
template <bool Shared, class T>
__device__ Memory<T> memory_of_block(const Stack& stack, const Fit& fit, const T* parameters, int64_t branch, T* tiles,
                                     T* weights, T* kept) {
  T* const shared = shared_memory<T>();
  Memory<T> memory;
  if constexpr (Shared) {
    memory = {shared, shared + stack.tile_size, kept};
    if (fit.gradient) memory.gradient = memory.weights + stack.weights_size;
    pack(stack, parameters, branch, memory.weights);
  } else {
    const int64_t block = blockIdx.y * static_cast<int64_t>(gridDim.x) + blockIdx.x;
    memory = {fit.tile ? shared : tiles + block * stack.tile_size, weights + branch * stack.weights_size, kept};
  }
  for (int i = threadIdx.x; stack.with_gradient && i < stack.gradient_size; i += blockDim.x) memory.gradient[i] = T(0);
  return memory;
}

// What the blocks of a branch share.
template <class T>
__global__ void __launch_bounds__(pack_threads) pack_kernel(Stack stack, const T* parameters, T* weights) {
  pack(stack, parameters, blockIdx.x, weights + blockIdx.x * stack.weights_size);
}

// The rows of a tile, column by column; missing ones are zeros up to a multiple of 4. Returns that multiple.
template <class T>
__device__ int load_tile(const Call<T>& call, const Tile& tile, T* input) {
  const int rows = padded_to_side(tile.rows), width = call.stack.in(), ld = call.stack.ld;
  const auto load = [&](auto row_of) {
    copy<T>(
        rows, width,
        [&](int row, int column) { return call.x[row_of(tile.first + min(row, tile.rows - 1)) * width + column]; },
        [&](int row, int column, T value) { input[column * ld + row] = row < tile.rows ? value : T(0); });
  };
  if (call.seg.narrow_index)
    load([&](int64_t e) { return static_cast<int64_t>(call.seg.narrow_index[e]); });
  else if (call.seg.wide_index)
    load([&](int64_t e) { return call.seg.wide_index[e]; });
  else
    load([](int64_t e) { return e; });
  return rows;
}

// <w, z> of one row.
template <class T>
__device__ T logit_of(const Stack& stack, const T* w, const T* z, int row) {
  T sum = 0;
  for (int j = 0; j < stack.out(); ++j) sum += w[j] * z[j * stack.ld + row];
  return sum;
}

// ReLU; NaN stays NaN.
template <class T>
__device__ T rectified(T value) {
  return value < 0 ? T(0) : value;
}

template <Math math, bool Shared, class T>
__global__ void forward_kernel(Call<T> call) {
  const Stack& stack = call.stack;
  const int64_t branch = blockIdx.y;
  T* none = nullptr;
  const Memory<T> memory =
      memory_of_block<Shared>(stack, call.fit, call.parameters, branch, call.tiles, call.weights, none);
  T* weight = memory.tile + stack.per_row;
  T* beta = weight + stack.ld;
  T* sum = memory.tile + stack.per_column;
  const T* w = memory.weights + stack.packed_w;
  const T* z = memory.tile + stack.layers[stack.depth - 1].activation;
  const int width = stack.out();
  // Part by part: many graphs have only the first, and those are to be spread over the blocks.
  for (int64_t item = blockIdx.x; item < call.graphs * call.parts; item += gridDim.x) {
    const int64_t position = item % call.graphs, part = item / call.graphs;
    const int64_t graph = call.ids ? call.ids[position] : position;
    const int64_t begin = first_entry(call.seg, branch, graph),
                  entries = first_entry(call.seg, branch, graph + 1) - begin;
    if (part >= tiles_of(entries, stack.tile)) continue;
    T top = 0, total = 0;
    for (int j = threadIdx.x; j < width; j += blockDim.x) sum[j] = 0;
    for (int64_t number = part; number < tiles_of(entries, stack.tile); number += call.parts) {
      const Tile tile = tile_of(begin, entries, number, stack.tile);
      __syncthreads();  // the tile before is done with
      const int rows = load_tile(call, tile, memory.tile + stack.input);
      __syncthreads();
      forward<math>(stack, memory, rows);
      T factor = 1;
      if (stack.w >= 0) {
        for (int row = threadIdx.x; row < tile.rows; row += blockDim.x)
          beta[row] = rectified(logit_of(stack, w, z, row));
        __syncthreads();
        T highest = top;
        for (int row = 0; row < tile.rows; ++row) highest = beta[row] > highest ? beta[row] : highest;
        factor = exp(top - highest);
        top = highest;
      }
      for (int row = threadIdx.x; row < tile.rows; row += blockDim.x)
        weight[row] = count_of<T>(call.seg, tile.first + row) * (stack.w >= 0 ? exp(beta[row] - top) : T(1));
      __syncthreads();
      T added = 0;
      for (int row = 0; row < tile.rows; ++row) added += weight[row];
      total = total * factor + added;
      for (int j = threadIdx.x; j < width; j += blockDim.x)
        sum[j] = sum[j] * factor + dot_of_columns(weight, z + j * stack.ld, tile.rows);
    }
    const int64_t place = (branch * call.graphs + position) * call.parts + part;
    if (threadIdx.x == 0) call.top[place] = top, call.total[place] = total;
    for (int j = threadIdx.x; j < width; j += blockDim.x) call.sum[place * width + j] = sum[j];
    __syncthreads();  // of shared memory, only now may the next item write
  }
}

// Puts the parts of a segment together, one warp each, lanes over parts, then over columns; top[s, 0] and scale are of
// the whole then.
template <class T>
__global__ void combine_kernel(Call<T> call) {
  const int64_t s = static_cast<int64_t>(blockIdx.x) * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  const int lane = threadIdx.x % warp_size;
  if (s >= call.seg.branches * call.graphs) return;
  const int64_t branch = s / call.graphs, position = s % call.graphs, width = call.stack.out();
  const int64_t graph = call.ids ? call.ids[position] : position;
  const int64_t entries = first_entry(call.seg, branch, graph + 1) - first_entry(call.seg, branch, graph);
  const int64_t tiles = tiles_of(entries, call.stack.tile), parts = tiles < call.parts ? tiles : call.parts;
  const T* tops = call.top + s * call.parts;
  T top = 0;
  for (int64_t p = lane; p < parts; p += warp_size) top = tops[p] > top ? tops[p] : top;
  top = max_over_lanes(top);
  double total = 0;
  for (int64_t p = lane; p < parts; p += warp_size)
    total += static_cast<double>(call.total[s * call.parts + p]) * exp(static_cast<double>(tops[p]) - top);
  total = sum_over_lanes(total);
  const double scale = call.stack.w < 0 ? 1.0 : parts > 0 ? 1 / total : 0.0;
  for (int64_t first = 0; first < width; first += warp_size) {
    const int64_t j = first + lane;
    double sum = 0;
    for (int64_t p = 0; p < parts; p += warp_size) {
      const double factor = p + lane < parts ? exp(static_cast<double>(tops[p + lane]) - top) : 0.0;
      const int here = static_cast<int>(parts - p < warp_size ? parts - p : warp_size);
#pragma unroll 4
      for (int i = 0; i < here; ++i) {
        const double of_part = __shfl_sync(all_lanes, factor, i);
        if (j < width) sum += call.sum[(s * call.parts + p + i) * width + j] * of_part;
      }
    }
    if (j < width) call.readout[(position * call.seg.branches + branch) * width + j] = static_cast<T>(sum * scale);
  }
  __syncwarp();  // every lane has read the tops
  if (lane == 0) {
    call.top[s * call.parts] = top;
    call.scale[s] = static_cast<T>(scale);
  }
}

template <Math math, bool Shared, class T>
__global__ void backward_kernel(Call<T> call) {
  const Stack& stack = call.stack;
  const int64_t branch = blockIdx.y;
  T* kept = call.partial + (branch * gridDim.x + blockIdx.x) * stack.gradient_size;
  const Memory<T> memory =
      memory_of_block<Shared>(stack, call.fit, call.parameters, branch, call.tiles, call.weights, kept);
  T* alpha = memory.tile + stack.per_row;
  T* dbeta = alpha + stack.ld;
  T* ds = memory.tile + stack.per_column;
  const T* w = memory.weights + stack.packed_w;
  const Linear& last = stack.layers[stack.depth - 1];
  const T* z = memory.tile + last.activation;
  const T slope = static_cast<T>(last.slope);
  const int width = stack.out();
  for (int64_t item = blockIdx.x; item < call.graphs * call.parts; item += gridDim.x) {
    const int64_t position = item % call.graphs, part = item / call.graphs;
    const int64_t graph = call.ids ? call.ids[position] : position;
    const int64_t begin = first_entry(call.seg, branch, graph),
                  entries = first_entry(call.seg, branch, graph + 1) - begin;
    if (part >= tiles_of(entries, stack.tile)) continue;
    const int64_t s = branch * call.graphs + position, at = (position * call.seg.branches + branch) * width;
    __syncthreads();  // the item before is done with
    for (int j = threadIdx.x; j < width; j += blockDim.x) ds[j] = call.grad[at + j];
    T t = 0, top = 0, scale = 1;
    if (stack.w >= 0) {
      for (int j = 0; j < width; ++j) t += call.grad[at + j] * call.readout[at + j];
      top = call.top[s * call.parts];
      scale = call.scale[s];
    }
    for (int64_t number = part; number < tiles_of(entries, stack.tile); number += call.parts) {
      const Tile tile = tile_of(begin, entries, number, stack.tile);
      __syncthreads();  // the tile before is done with
      const int rows = load_tile(call, tile, memory.tile + stack.input);
      __syncthreads();
      forward<math>(stack, memory, rows);
      for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        T a = 0, b = 0;
        if (row < tile.rows) {
          a = count_of<T>(call.seg, tile.first + row);
          if (stack.w >= 0) {
            const T logit = logit_of(stack, w, z, row);
            T dot = 0;
            for (int j = 0; j < width; ++j) dot += ds[j] * z[j * stack.ld + row];
            a *= exp(rectified(logit) - top) * scale;
            b = logit <= 0 ? T(0) : a * (dot - t);
          }
        }
        alpha[row] = a;
        dbeta[row] = b;
      }
      __syncthreads();
      T* dz = memory.tile + stack.spare[0];
      for (Walk at(rows); at.major < width; at.next()) {
        const int j = at.major, row = at.minor;
        T value = alpha[row] * ds[j];
        if (stack.w >= 0) value += dbeta[row] * w[j];
        const T factor = gate(z[j * stack.ld + row], slope);
        dz[j * stack.ld + row] = row < tile.rows ? value * factor : T(0);
      }
      for (int j = threadIdx.x; stack.w >= 0 && j < width; j += blockDim.x)
        memory.gradient[stack.w_gradient + j] += dot_of_columns(dbeta, z + j * stack.ld, tile.rows);
      __syncthreads();
      backward<math>(stack, memory, rows, [&](int row, int column, T value) {
        if (row < tile.rows && column < stack.in()) call.dx[(tile.first + row) * stack.in() + column] = value;
      });
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; call.fit.gradient && i < stack.gradient_size; i += blockDim.x) kept[i] = memory.gradient[i];
}

// Where a block keeps the gradient of flat parameter p: its branch and its place there; none: the stack has it not.
struct Kept {
  int64_t branch;
  int place;
};

__host__ __device__ inline Kept kept_at(const Stack& stack, int64_t branches, int64_t p) {
  if (stack.w >= 0 && p >= stack.w && p < stack.w + branches * stack.out()) {
    const int64_t i = p - stack.w;
    return {i / stack.out(), stack.w_gradient + static_cast<int>(i % stack.out())};
  }
  for (int l = 0; l < stack.depth; ++l) {
    const Linear& layer = stack.layers[l];
    const int64_t size = static_cast<int64_t>(layer.in) * layer.out;
    int64_t i = p - layer.weight;
    if (i >= 0 && i < branches * size) {
      const int64_t branch = i / size, at = i % size;
      const int64_t k = at / layer.in_step % layer.in, j = at / layer.out_step % layer.out;
      return {branch, layer.gradient + static_cast<int>(k * layer.out + j)};
    }
    i = p - layer.bias;
    if (i >= 0 && i < branches * layer.out)
      return {i / layer.out, layer.gradient + static_cast<int>(size + i % layer.out)};
  }
  return {-1, 0};
}

// Adds up what the blocks kept, `summands` lanes per parameter; those from `classified` on are the classifier's.
template <class T>
__global__ void reduce_kernel(Stack stack, int64_t branches, const T* partial, int64_t blocks, Stack classifier,
                              int64_t classified, const T* classifier_partial, int64_t classifier_blocks,
                              int64_t parameters, T* gradient, const double* losses, T* loss) {
  const int64_t p = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / summands;
  const int lane = threadIdx.x % summands;
  if (loss != nullptr && blockIdx.x == 0 && threadIdx.x < warp_size) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < classifier_blocks; i += warp_size) sum += losses[i];
    sum = sum_over_lanes(sum);
    if (threadIdx.x == 0) *loss = static_cast<T>(sum);
  }
  double sum = 0;
  if (p < parameters) {
    const bool in_branch = p < classified;
    const Stack& of = in_branch ? stack : classifier;
    const Kept kept = kept_at(of, in_branch ? branches : 1, p);
    const int64_t number = in_branch ? blocks : classifier_blocks;
    const T* from = (in_branch ? partial + kept.branch * blocks * of.gradient_size : classifier_partial) + kept.place;
#pragma unroll 8
    for (int64_t b = lane; b < number; b += summands) sum += from[b * of.gradient_size];
  }
  sum = sum_over_lanes(sum, summands);
  if (p < parameters && lane == 0) gradient[p] = static_cast<T>(sum);
}

Stack stack_of(const Model& model, bool with_gradient, bool with_input_gradient) {
  Stack stack = {};
  stack.depth = static_cast<int>(model.widths.size());
  stack.with_gradient = with_gradient;
  stack.with_input_gradient = with_input_gradient;
  stack.w = model.attention ? 0 : -1;
  stack.w_branch = model.width();
  int64_t at = model.attention ? model.readout_width() : 0;
  for (int l = 0; l < stack.depth; ++l) {
    const int64_t in = model.below(l), out = model.widths[l];
    require(in * out <= most_weights, "widths must make layers of at most ", most_weights, " weights, got ", in * out);
    Linear& layer = stack.layers[l];
    layer.in = static_cast<int>(in);
    layer.out = static_cast<int>(out);
    layer.slope = model.slope;
    layer.weight = at;
    layer.weight_branch = in * out;
    layer.bias = at + model.branches * in * out;
    layer.bias_branch = out;
    layer.in_step = out;
    layer.out_step = 1;
    layer.gradient = stack.gradient_size;
    stack.gradient_size += static_cast<int>((in + 1) * out);
    at += model.branches * (in + 1) * out;
  }
  stack.w_gradient = stack.gradient_size;
  if (model.attention) stack.gradient_size += static_cast<int>(model.width());
  return stack;
}

// Lays out a stack for tiles of `rows`, or fewer if only they fit, and finds what its blocks have room for in shared
// memory: room for a second block comes before that for the gradient, and any before smaller tiles.
template <class T>
Fit fit_of(const char* name, Stack& stack, const Device& device, int rows) {
  const int64_t most = device.most_shared_bytes(), half = device.most_shared_bytes(2);
  Fit fit = {};
  for (int tile = rows; tile >= side && !fit.tile; tile /= 2) {
    lay_out(stack, tile);
    for (const auto& [weights, gradient, room] : {std::tuple{true, true, half},
                                                  {true, false, half},
                                                  {true, true, most},
                                                  {true, false, most},
                                                  {false, false, most}}) {
      int64_t values = stack.tile_size;
      values += weights ? stack.weights_size : 0;
      values += gradient && stack.with_gradient ? stack.gradient_size : 0;
      if (fit.tile || values * static_cast<int64_t>(sizeof(T)) > room) continue;
      fit = {true, weights, gradient && stack.with_gradient, values * static_cast<int64_t>(sizeof(T)), 0};
    }
  }
  if (!fit.tile) lay_out(stack, rows);
  const int64_t largest = std::max<int64_t>(stack.tile_size, stack.weights_size);
  require(largest <= INT32_MAX, name, " must make tiles and weights of at most ", INT32_MAX, " values, got ", largest);
  int widest = 0;
  for (int l = 0; l < stack.depth; ++l) widest = std::max(widest, stack.layers[l].out);
  const int64_t squares = static_cast<int64_t>(stack.tile / side) * (padded_to_side(widest) / side);
  fit.threads = std::clamp<int64_t>((squares + warp_size - 1) / warp_size * warp_size, 64, 256);
  return fit;
}

// The readouts of the chosen graphs and, later, the gradients; keeps the tensors of the call.
template <class T>
class Pass {
 public:
  Pass(const Device& device, const Arguments& of, const Tensor& rows, const Tensor& parameters, bool tf32)
      : device_(device), model_(of.model), tf32_(tf32 && has_tf32()) {
    require(model_.branches <= UINT16_MAX, "num_branches must be at most ", UINT16_MAX, ", got ", model_.branches);
    call_.seg = of.seg;
    call_.ids = of.ids;
    call_.graphs = of.graphs;
    call_.x = rows.const_data_ptr<T>();
    call_.parameters = parameters.const_data_ptr<T>();
  }

  void forward(T* readout) {
    prepare(stack_of(model_, false, false));
    // The tiles of a few large graphs should not be one block's alone.
    const int64_t chosen = call_.graphs * model_.branches;
    const int64_t most = tiles_of(std::max<int64_t>(call_.seg.entries, 1), call_.stack.tile);
    call_.parts = std::clamp<int64_t>(4096 / std::max<int64_t>(chosen, 1), 1, std::min<int64_t>(most, 1024));
    top_ = device_.bytes_for<T>(chosen * call_.parts);
    total_ = device_.bytes_for<T>(chosen * call_.parts);
    sum_ = device_.bytes_for<T>(chosen * call_.parts * model_.width());
    scale_ = device_.bytes_for<T>(chosen);
    call_.top = memory(top_);
    call_.total = memory(total_);
    call_.sum = memory(sum_);
    call_.scale = memory(scale_);
    call_.readout = readout;
    dispatch([&](auto math, auto shared) { run(&forward_kernel<math, shared, T>); });
    device_.launch(&combine_kernel<T>, blocks_for("ptr", chosen, combine_threads / warp_size), combine_threads, 0,
                   call_);
  }

  // After forward: leaves the gradients of the parameters by block, and of the entries at `dx` if that is not null.
  void backward(const T* grad, T* dx) {
    prepare(stack_of(model_, true, dx != nullptr));
    call_.grad = grad;
    call_.dx = dx;
    dispatch([&](auto math, auto shared) { run(&backward_kernel<math, shared, T>); });
  }

  int64_t blocks() const { return blocks_; }
  const Stack& stack() const { return call_.stack; }
  const T* partial() const { return call_.partial; }

  static T* memory(Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

 private:
  // Most graphs should fill their tiles.
  void prepare(const Stack& stack) {
    const int64_t segments = std::max<int64_t>(call_.seg.graphs * model_.branches, 1);
    call_.stack = stack;
    call_.stack.tf32 = tf32_;
    call_.fit = fit_of<T>("widths", call_.stack, device_, call_.seg.entries / segments <= 40 ? 32 : 64);
    if (call_.fit.weights) return;
    weights_ = device_.bytes_for<T>(model_.branches * call_.stack.weights_size);
    call_.weights = memory(weights_);
    device_.launch(&pack_kernel<T>, grid_of("num_branches", model_.branches), pack_threads, 0, call_.stack,
                   call_.parameters, call_.weights);
  }

  bool has_tf32() const {
    if constexpr (std::is_same_v<T, float>)
      return device_.has_tf32(&forward_kernel<Math::tf32, true, T>);
    else
      return false;
  }

  // Calls f(constant Math, constant of whether tile and weights are shared memory).
  template <class F>
  void dispatch(F f) const {
    const auto with = [&](auto math) {
      if (call_.fit.weights) return f(math, std::true_type{});
      f(math, std::false_type{});
    };
    if constexpr (std::is_same_v<T, float>)
      if (tf32_ && call_.stack.tile % 16 == 0) return with(std::integral_constant<Math, Math::tf32>{});
    with(std::integral_constant<Math, Math::exact>{});
  }

  // On as many blocks as the device holds at once, or fewer.
  void run(void (*kernel)(Call<T>)) {
    const Fit& fit = call_.fit;
    const int64_t resident =
        fit.tile ? device_.resident_blocks(kernel, fit.threads, fit.shared_bytes) : device_.multiprocessors();
    blocks_ = std::min(std::max<int64_t>(resident / model_.branches, 1), call_.graphs * call_.parts);
    const int64_t all = model_.branches * blocks_;
    partial_ = device_.bytes_for<T>(call_.stack.with_gradient ? all * call_.stack.gradient_size : 0);
    tiles_ = device_.bytes_for<T>(fit.tile ? 0 : all * call_.stack.tile_size);
    call_.partial = memory(partial_);
    call_.tiles = memory(tiles_);
    device_.launch(kernel, grid_of("num_branches", blocks_, model_.branches), fit.threads, fit.shared_bytes, call_);
  }

  const Device& device_;
  const Model model_;
  bool tf32_;
  int64_t blocks_ = 0;
  Call<T> call_ = {};
  Tensor weights_, top_, total_, sum_, scale_, partial_, tiles_;
};

constexpr int64_t threads = 256;

}  // namespace
}  // namespace spin_fast

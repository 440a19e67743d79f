// branch_readout, its gradients and the training step on CUDA.
//
// Layout: the rows of a graph in a branch are taken in tiles, which go through the MLP in shared memory (mlp.h) and
// into the readout by an online softmax; z is never stored, the backward pass evaluates the MLP again. Parallel axis:
// blocks of branches (grid.y) x tiles (grid.x); a graph's tiles are dealt out to `parts` blocks in turn, whose readouts
// a second kernel puts together. Accumulator: T within a part, float64 over the parts of a graph and over blocks.
//
// Every entry is evaluated by itself: which rows several graphs share is not known without reading it back, and a graph
// refers to a row of its own once already.

#include <tuple>
#include <type_traits>
#include <utility>

#include "../model.h"
#include "mlp.h"
#include "ops.h"
#include "transpose.h"

namespace spin_fast {
namespace {

constexpr int64_t combine_threads = 128;
constexpr int classifier_tile = 16;

// What the kernels of one call share. Segment s = branch * graphs + position of the graph in `ids`.
template <class T>
struct Call {
  Segments seg;
  const int64_t* ids;
  int64_t graphs;
  int64_t parts;
  Stack stack;
  T* spill;  // the memory of the blocks where it is not shared
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

__host__ __device__ inline int64_t begin_of(const Segments& seg, int64_t branch, int64_t graph) {
  return seg.ptr[branch * seg.ptr_stride + graph] + branch * seg.entry_stride;
}

template <class T>
__device__ T* block_memory(const Call<T>& call) {
  if (call.spill == nullptr) return shared_memory<T>();
  return call.spill + (blockIdx.y * static_cast<int64_t>(gridDim.x) + blockIdx.x) * call.stack.size;
}

// The rows of a tile, column by column; missing ones are zeros up to a multiple of 4. Returns that multiple.
template <class T>
__device__ int load_tile(const Call<T>& call, const Tile& tile, T* memory) {
  const Stack& stack = call.stack;
  const int rows = padded_to_side(tile.rows), width = stack.in();
  for (Walk at(width); width > 0 && at.major < rows; at.next()) {
    T value = 0;
    if (at.major < tile.rows) {
      const int64_t e = tile.first + at.major;
      const int64_t u = call.seg.narrow_index ? call.seg.narrow_index[e]
                        : call.seg.wide_index ? call.seg.wide_index[e]
                                              : e;
      value = call.x[u * width + at.minor];
    }
    memory[stack.input + at.minor * stack.ld + at.major] = value;
  }
  return rows;
}

template <class T>
__device__ T count_of(const Call<T>& call, int64_t entry) {
  return call.seg.count ? static_cast<T>(call.seg.count[entry]) : T(1);
}

// <w, z> of one row.
template <class T>
__device__ T logit_of(const Stack& stack, const T* memory, const T* z, int row) {
  T sum = 0;
  for (int j = 0; j < stack.out(); ++j) sum += memory[stack.packed_w + j] * z[j * stack.ld + row];
  return sum;
}

// ReLU; NaN stays NaN.
template <class T>
__device__ T rectified(T value) {
  return value < 0 ? T(0) : value;
}

template <Math math, class T>
__global__ void forward_kernel(Call<T> call) {
  const Stack& stack = call.stack;
  T* memory = block_memory(call);
  T* weight = memory + stack.per_row;
  T* beta = weight + stack.ld;
  T* sum = memory + stack.per_column;
  const int64_t branch = blockIdx.y;
  const int width = stack.out();
  const T* z = memory + stack.layers[stack.depth - 1].activation;
  pack(stack, call.parameters, branch, memory);
  for (int64_t item = blockIdx.x; item < call.graphs * call.parts; item += gridDim.x) {
    const int64_t position = item / call.parts, part = item % call.parts;
    const int64_t graph = call.ids ? call.ids[position] : position;
    const int64_t begin = begin_of(call.seg, branch, graph), entries = begin_of(call.seg, branch, graph + 1) - begin;
    if (part >= tiles_of(entries, stack.tile)) continue;
    T top = 0, total = 0;
    for (int j = threadIdx.x; j < width; j += blockDim.x) sum[j] = 0;
    for (int64_t number = part; number < tiles_of(entries, stack.tile); number += call.parts) {
      const Tile tile = tile_of(begin, entries, number, stack.tile);
      __syncthreads();  // the tile before is done with
      const int rows = load_tile(call, tile, memory);
      __syncthreads();
      forward<math>(stack, memory, rows);
      T factor = 1;
      if (stack.w >= 0) {
        for (int row = threadIdx.x; row < tile.rows; row += blockDim.x)
          beta[row] = rectified(logit_of(stack, memory, z, row));
        __syncthreads();
        T highest = top;
        for (int row = 0; row < tile.rows; ++row) highest = beta[row] > highest ? beta[row] : highest;
        factor = exp(top - highest);
        top = highest;
      }
      for (int row = threadIdx.x; row < tile.rows; row += blockDim.x)
        weight[row] = count_of(call, tile.first + row) * (stack.w >= 0 ? exp(beta[row] - top) : T(1));
      __syncthreads();
      T added = 0;
      for (int row = 0; row < tile.rows; ++row) added += weight[row];
      total = total * factor + added;
      for (int j = threadIdx.x; j < width; j += blockDim.x) {
        T more = 0;
        for (int row = 0; row < tile.rows; ++row) more += weight[row] * z[j * stack.ld + row];
        sum[j] = sum[j] * factor + more;
      }
    }
    const int64_t place = (branch * call.graphs + position) * call.parts + part;
    if (threadIdx.x == 0) call.top[place] = top, call.total[place] = total;
    for (int j = threadIdx.x; j < width; j += blockDim.x) call.sum[place * width + j] = sum[j];
    __syncthreads();  // of shared memory, only now may the next item write
  }
}

// Puts the parts of a segment together, one warp each, lanes over columns; top[s, 0] and scale are of the whole then.
template <class T>
__global__ void combine_kernel(Call<T> call) {
  const int64_t s = static_cast<int64_t>(blockIdx.x) * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  const int lane = threadIdx.x % warp_size;
  if (s >= call.seg.branches * call.graphs) return;
  const int64_t branch = s / call.graphs, position = s % call.graphs, width = call.stack.out();
  const int64_t graph = call.ids ? call.ids[position] : position;
  const int64_t entries = begin_of(call.seg, branch, graph + 1) - begin_of(call.seg, branch, graph);
  const int64_t tiles = tiles_of(entries, call.stack.tile), parts = tiles < call.parts ? tiles : call.parts;
  const T* tops = call.top + s * call.parts;
  T top = 0;
  double total = 0;
  for (int64_t p = 0; p < parts; ++p) top = tops[p] > top ? tops[p] : top;
  for (int64_t p = 0; p < parts; ++p)
    total += static_cast<double>(call.total[s * call.parts + p]) * exp(static_cast<double>(tops[p]) - top);
  const double scale = call.stack.w < 0 ? 1.0 : parts > 0 ? 1 / total : 0.0;
  for (int64_t j = lane; j < width; j += warp_size) {
    double sum = 0;
    for (int64_t p = 0; p < parts; ++p)
      sum += call.sum[(s * call.parts + p) * width + j] * exp(static_cast<double>(tops[p]) - top);
    call.readout[(position * call.seg.branches + branch) * width + j] = static_cast<T>(sum * scale);
  }
  __syncwarp();  // every lane has read the tops
  if (lane == 0) {
    call.top[s * call.parts] = top;
    call.scale[s] = static_cast<T>(scale);
  }
}

template <Math math, class T>
__global__ void backward_kernel(Call<T> call) {
  const Stack& stack = call.stack;
  T* memory = block_memory(call);
  T* alpha = memory + stack.per_row;
  T* dbeta = alpha + stack.ld;
  T* ds = memory + stack.per_column;
  const int64_t branch = blockIdx.y;
  const int width = stack.out();
  const Linear& last = stack.layers[stack.depth - 1];
  const T* z = memory + last.activation;
  const T slope = static_cast<T>(last.slope);
  pack(stack, call.parameters, branch, memory);
  for (int64_t item = blockIdx.x; item < call.graphs * call.parts; item += gridDim.x) {
    const int64_t position = item / call.parts, part = item % call.parts;
    const int64_t graph = call.ids ? call.ids[position] : position;
    const int64_t begin = begin_of(call.seg, branch, graph), entries = begin_of(call.seg, branch, graph + 1) - begin;
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
      const int rows = load_tile(call, tile, memory);
      __syncthreads();
      forward<math>(stack, memory, rows);
      for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        T a = 0, b = 0;
        if (row < tile.rows) {
          a = count_of(call, tile.first + row);
          if (stack.w >= 0) {
            const T logit = logit_of(stack, memory, z, row);
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
      T* dz = memory + stack.spare[0];
      for (Walk at(rows); at.major < width; at.next()) {
        const int j = at.major, row = at.minor;
        T value = alpha[row] * ds[j];
        if (stack.w >= 0) value += dbeta[row] * memory[stack.packed_w + j];
        const T factor = gate(z[j * stack.ld + row], slope);
        dz[j * stack.ld + row] = row < tile.rows ? value * factor : T(0);
      }
      for (int j = threadIdx.x; stack.w >= 0 && j < width; j += blockDim.x) {
        T more = 0;
        for (int row = 0; row < tile.rows; ++row) more += dbeta[row] * z[j * stack.ld + row];
        memory[stack.gradient + stack.w_gradient + j] += more;
      }
      __syncthreads();
      backward<math>(stack, memory, rows, [&](int row, int column, T value) {
        if (row < tile.rows && column < stack.in()) call.dx[(tile.first + row) * stack.in() + column] = value;
      });
    }
  }
  __syncthreads();
  T* partial = call.partial + (branch * gridDim.x + blockIdx.x) * stack.gradient_size;
  for (int i = threadIdx.x; i < stack.gradient_size; i += blockDim.x) partial[i] = memory[stack.gradient + i];
}

// The classifier on tiles of readouts, with the loss and its gradients; one block per tile.
template <class T>
__global__ void classifier_kernel(Stack stack, T* spill, const T* parameters, const T* readout, const int64_t* y,
                                  const int64_t* ids, int64_t graphs, T* grad, T* partial, double* loss) {
  T* memory = spill ? spill + blockIdx.x * static_cast<int64_t>(stack.size) : shared_memory<T>();
  const int width = stack.in(), classes = stack.out();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * stack.tile, left = graphs - first;
  const int count = static_cast<int>(left < stack.tile ? left : stack.tile), rows = padded_to_side(count);
  pack(stack, parameters, 0, memory);
  for (Walk at(width); at.major < rows; at.next())
    memory[stack.input + at.minor * stack.ld + at.major] =
        at.major < count ? readout[(first + at.major) * width + at.minor] : T(0);
  __syncthreads();
  forward<Math::exact>(stack, memory, rows);
  const T* scores = memory + stack.layers[stack.depth - 1].activation;
  T* dscores = memory + stack.spare[0];
  T* losses = memory + stack.per_row;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    if (row >= count) {
      for (int c = 0; c < classes; ++c) dscores[c * stack.ld + row] = 0;
      continue;
    }
    const int64_t graph = first + row, label = y[ids ? ids[graph] : graph];
    double top = scores[row], total = 0;
    for (int c = 1; c < classes; ++c) top = scores[c * stack.ld + row] > top ? scores[c * stack.ld + row] : top;
    for (int c = 0; c < classes; ++c) total += exp(scores[c * stack.ld + row] - top);
    for (int c = 0; c < classes; ++c)
      dscores[c * stack.ld + row] =
          static_cast<T>((exp(scores[c * stack.ld + row] - top) / total - (c == label)) / graphs);
    const bool known = label >= 0 && label < classes;  // no contents are checked on a GPU: show it
    losses[row] = known ? static_cast<T>(log(total) + top - scores[label * stack.ld + row]) : static_cast<T>(NAN);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int row = 0; row < count; ++row) sum += losses[row];
    loss[blockIdx.x] = sum;
  }
  backward<Math::exact>(stack, memory, rows, [&](int row, int column, T value) {
    if (row < count && column < width) grad[(first + row) * width + column] = value;
  });
  __syncthreads();
  for (int i = threadIdx.x; i < stack.gradient_size; i += blockDim.x)
    partial[blockIdx.x * static_cast<int64_t>(stack.gradient_size) + i] = memory[stack.gradient + i];
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

// Adds up what the blocks kept, one thread per parameter; those from `classified` on are the classifier's.
template <class T>
__global__ void reduce_kernel(Stack stack, int64_t branches, const T* partial, int64_t blocks, Stack classifier,
                              int64_t classified, const T* classifier_partial, int64_t classifier_blocks,
                              int64_t parameters, T* gradient, const double* losses, int64_t graphs, T* loss) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (p == 0 && loss != nullptr) {
    double sum = 0;
    for (int64_t i = 0; i < classifier_blocks; ++i) sum += losses[i];
    *loss = static_cast<T>(sum / (graphs > 0 ? graphs : 1));
  }
  if (p >= parameters) return;
  const bool in_branch = p < classified;
  const Stack& of = in_branch ? stack : classifier;
  const Kept kept = kept_at(of, in_branch ? branches : 1, p);
  const int64_t number = in_branch ? blocks : classifier_blocks;
  const T* from = (in_branch ? partial + kept.branch * blocks * of.gradient_size : classifier_partial) + kept.place;
  double sum = 0;
  for (int64_t b = 0; b < number; ++b) sum += from[b * of.gradient_size];
  gradient[p] = static_cast<T>(sum);
}

// Rows of the gradient, each the sum of those of its entries (or of the positions of a graph in ids), in their order.
template <class T>
__global__ void gather_kernel(const int64_t* offsets, const int64_t* entries, const T* from, int64_t rows,
                              int64_t width, T* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * width) return;
  const int64_t row = i / width, column = i % width;
  double sum = 0;
  for (int64_t e = offsets[row]; e < offsets[row + 1]; ++e) sum += from[entries[e] * width + column];
  to[i] = static_cast<T>(sum);
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
    STD_TORCH_CHECK(in * out <= INT32_MAX / 16, "widths must not be so large");
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

// torch.nn.Linear keeps [out, in].
Stack stack_of_classifier(const Model& model, const std::vector<int64_t>& widths) {
  Stack stack = {};
  stack.depth = static_cast<int>(widths.size());
  stack.with_gradient = stack.with_input_gradient = true;
  stack.w = -1;
  int64_t at = model.parameters(), in = model.readout_width();
  for (int l = 0; l < stack.depth; ++l) {
    const int64_t out = widths[l];
    STD_TORCH_CHECK(in * out <= INT32_MAX / 16, "classifier_widths must not be so large");
    Linear& layer = stack.layers[l];
    layer.in = static_cast<int>(in);
    layer.out = static_cast<int>(out);
    layer.slope = l + 1 < stack.depth ? model.slope : 1.0;
    layer.weight = at;
    layer.bias = at + in * out;
    layer.in_step = 1;
    layer.out_step = in;
    layer.gradient = stack.gradient_size;
    stack.gradient_size += static_cast<int>((in + 1) * out);
    at += (in + 1) * out;
    in = out;
  }
  return stack;
}

// How a stack runs: the tile, the threads of a block, and its shared memory, 0 where it lies in global memory.
struct Fit {
  int64_t threads, shared_bytes;
};

// Tiles of `rows` if the block's memory then leaves room for a second block, smaller ones if that makes it fit at all.
template <class T>
Fit fit(Stack& stack, const Device& device, int rows) {
  const int64_t most = device.most_shared_bytes();
  int tile = rows;
  const auto bytes = [&](int size) {
    lay_out(stack, size);
    return static_cast<int64_t>(stack.size) * static_cast<int64_t>(sizeof(T));
  };
  while (tile > side && bytes(tile) > most / 2) tile /= 2;
  if (bytes(tile) > most) tile = rows;
  int widest = 0;
  for (int l = 0; l < stack.depth; ++l) widest = std::max(widest, stack.layers[l].out);
  const int64_t squares = static_cast<int64_t>(tile / side) * (padded_to_side(widest) / side);
  const int64_t shared_bytes = bytes(tile) > most ? 0 : bytes(tile);
  return {std::clamp<int64_t>((squares + warp_size - 1) / warp_size * warp_size, 64, 256), shared_bytes};
}

// The readouts of the chosen graphs and, later, the gradients; keeps the tensors of the call.
template <class T>
class Pass {
 public:
  Pass(const Device& device, const Arguments& of, const Tensor& rows, const Tensor& parameters, bool with_gradient,
       bool with_rows, bool tf32)
      : device_(device), value_(rows.scalar_type()), branches_(of.model.branches) {
    call_.seg = of.seg;
    call_.ids = of.ids;
    call_.graphs = of.graphs;
    call_.stack = stack_of(of.model, with_gradient, with_rows);
    call_.x = rows.const_data_ptr<T>();
    call_.parameters = parameters.const_data_ptr<T>();
    // Most graphs should fill their tiles, and the few large ones should not be one block's alone.
    const int64_t segments = std::max<int64_t>(of.seg.graphs * branches_, 1), chosen = of.graphs * branches_;
    fit_ = fit<T>(call_.stack, device, of.seg.entries / segments <= 40 ? 32 : 64);
    tf32_ = tf32 && call_.stack.tile % 16 == 0 && device.has_tf32();
    const int64_t most = tiles_of(std::max<int64_t>(of.seg.entries, 1), call_.stack.tile);
    call_.parts = std::clamp<int64_t>(4096 / std::max<int64_t>(chosen, 1), 1, std::min<int64_t>(most, 1024));
  }

  void forward(T* readout) {
    const int64_t chosen = call_.graphs * branches_, width = call_.stack.out();
    top_ = device_.bytes_for<T>(chosen * call_.parts);
    total_ = device_.bytes_for<T>(chosen * call_.parts);
    sum_ = device_.bytes_for<T>(chosen * call_.parts * width);
    scale_ = device_.bytes_for<T>(chosen);
    call_.top = memory(top_);
    call_.total = memory(total_);
    call_.sum = memory(sum_);
    call_.scale = memory(scale_);
    call_.readout = readout;
    auto* kernel = &forward_kernel<Math::exact, T>;
    if constexpr (std::is_same_v<T, float>)
      if (tf32_) kernel = &forward_kernel<Math::tf32, T>;
    run(kernel);
    device_.launch(&combine_kernel<T>, blocks_for(chosen, combine_threads / warp_size), combine_threads, 0, call_);
  }

  // Leaves the gradients of the parameters by block, and of the entries at `dx`.
  void backward(const T* grad, T* dx) {
    call_.grad = grad;
    call_.dx = dx;
    auto* kernel = &backward_kernel<Math::exact, T>;
    if constexpr (std::is_same_v<T, float>)
      if (tf32_) kernel = &backward_kernel<Math::tf32, T>;
    blocks_ = run(kernel, true);
  }

  int64_t blocks() const { return blocks_; }
  const Stack& stack() const { return call_.stack; }
  const T* partial() const { return call_.partial; }

  static T* memory(Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

 private:
  // On as many blocks as the device holds at once, or fewer; returns how many for each branch.
  int64_t run(void (*kernel)(Call<T>), bool with_partial = false) {
    const int64_t resident = device_.resident_blocks(kernel, fit_.threads, fit_.shared_bytes);
    const int64_t items = call_.graphs * call_.parts;
    const int64_t blocks = std::min(std::max<int64_t>(resident / branches_, 1), items);
    STD_TORCH_CHECK(branches_ <= 65535, "there are too many branches");
    if (with_partial) {
      partial_ = device_.bytes_for<T>(branches_ * blocks * call_.stack.gradient_size);
      call_.partial = memory(partial_);
    }
    if (fit_.shared_bytes == 0) {
      spill_ = device_.bytes_for<T>(branches_ * blocks * call_.stack.size);
      call_.spill = memory(spill_);
    }
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(branches_));
    device_.launch(kernel, grid, fit_.threads, fit_.shared_bytes, call_);
    return blocks;
  }

  const Device& device_;
  ScalarType value_;
  int64_t branches_, blocks_ = 0;
  Call<T> call_ = {};
  Fit fit_;
  bool tf32_;
  Tensor top_, total_, sum_, scale_, partial_, spill_;
};

constexpr int64_t threads = 256;

Tensor branch_readout(const Tensor& rows, const Tensor& parameters, const Tensor& ptr, OptionalTensor index,
                      OptionalTensor count, OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                      bool attention, double negative_slope, bool tf32, bool shared, bool) {
  const Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                       negative_slope, shared, true, 0);
  const Device device(rows);
  Tensor readout = device.empty({of.graphs, of.model.readout_width()}, rows.scalar_type());
  dispatch_compute(rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Pass<T>(device, of, rows, parameters, false, false, tf32).forward(readout.mutable_data_ptr<T>());
  });
  return readout;
}

std::tuple<Tensor, Tensor> branch_readout_backward(const Tensor& grad, const Tensor& rows, const Tensor& parameters,
                                                   const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                                                   OptionalTensor ids, int64_t num_branches,
                                                   std::vector<int64_t> widths, bool attention, double negative_slope,
                                                   bool tf32, bool shared, bool, bool with_rows) {
  Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                 negative_slope, shared, true, 0);
  const ScalarType value = rows.scalar_type();
  const int64_t width = of.model.readout_width(), features = rows.size(1);
  expect("grad", grad, {of.graphs, width}, value);
  const Device device(rows);
  Tensor gradient = device.empty({parameters.numel()}, value);
  Tensor drows = device.empty({with_rows ? rows.size(0) : 0, features}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto gather = [&](const Transposed& by, const T* from, int64_t to_rows, int64_t columns, T* to) {
      device.launch(&gather_kernel<T>, blocks_for(to_rows * columns, threads), threads, 0,
                    by.offsets.template const_data_ptr<int64_t>(), by.entries.template const_data_ptr<int64_t>(), from,
                    to_rows, columns, to);
    };
    // How many entries the chosen graphs have is not known here. Where each needs a place for its gradient, take all
    // graphs: gradients are linear in `grad`, so that of a graph chosen twice is the sum, and of one left out 0.
    Tensor grads = grad;
    if (with_rows && ids) {
      grads = device.empty({of.seg.graphs, width}, value);
      const Transposed positions = transposed(device, ScalarType::Long, of.ids, of.graphs, of.seg.graphs);
      gather(positions, grad.const_data_ptr<T>(), of.seg.graphs, width, grads.mutable_data_ptr<T>());
      of.ids = nullptr;
      of.graphs = of.seg.graphs;
    }
    Tensor readout = device.bytes_for<T>(of.graphs * width), dentries;
    T* to_rows = with_rows ? drows.mutable_data_ptr<T>() : nullptr;
    if (with_rows && index) dentries = device.empty({of.seg.entries, features}, value);
    Pass<T> pass(device, of, rows, parameters, true, with_rows, tf32);
    pass.forward(Pass<T>::memory(readout));
    pass.backward(grads.const_data_ptr<T>(), with_rows && index ? dentries.mutable_data_ptr<T>() : to_rows);
    const double* no_losses = nullptr;
    T* no_loss = nullptr;
    device.launch(&reduce_kernel<T>, blocks_for(parameters.numel(), threads), threads, 0, pass.stack(), num_branches,
                  pass.partial(), pass.blocks(), pass.stack(), parameters.numel(), pass.partial(), int64_t{0},
                  parameters.numel(), gradient.mutable_data_ptr<T>(), no_losses, of.graphs, no_loss);
    if (with_rows && index) {
      const Transposed entries =
          transposed(device, index->scalar_type(), index->const_data_ptr(), of.seg.entries, rows.size(0));
      gather(entries, dentries.const_data_ptr<T>(), rows.size(0), features, to_rows);
    }
  });
  return {gradient, drows};
}

std::tuple<Tensor, Tensor> training_step(const Tensor& rows, const Tensor& parameters, const Tensor& y,
                                         const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                                         OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                                         std::vector<int64_t> classifier_widths, bool attention, double negative_slope,
                                         bool tf32, bool) {
  const int64_t more = classifier_parameters(num_branches, widths, classifier_widths);
  const Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                       negative_slope, false, true, more);
  const ScalarType value = rows.scalar_type();
  expect("y", y, {of.seg.graphs}, ScalarType::Long);
  const Device device(rows);
  Tensor loss = device.empty({}, value), gradient = device.empty({parameters.numel()}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t width = of.model.readout_width();
    Tensor readout = device.bytes_for<T>(of.graphs * width), grad = device.bytes_for<T>(of.graphs * width);
    Pass<T> pass(device, of, rows, parameters, true, false, tf32);
    pass.forward(Pass<T>::memory(readout));

    Stack stack = stack_of_classifier(of.model, classifier_widths);
    const Fit fitted = fit<T>(stack, device, classifier_tile);
    const dim3 grid = blocks_for(of.graphs, stack.tile);
    const int64_t blocks = grid.x;
    Tensor partial = device.bytes_for<T>(blocks * stack.gradient_size), losses = device.bytes_for<double>(blocks);
    Tensor spill;
    T* spilled = nullptr;
    if (fitted.shared_bytes == 0) {
      spill = device.bytes_for<T>(blocks * stack.size);
      spilled = Pass<T>::memory(spill);
    }
    double* loss_of_block = static_cast<double*>(losses.mutable_data_ptr());
    device.launch(&classifier_kernel<T>, grid, fitted.threads, fitted.shared_bytes, stack, spilled,
                  parameters.const_data_ptr<T>(), Pass<T>::memory(readout), y.const_data_ptr<int64_t>(), of.ids,
                  of.graphs, Pass<T>::memory(grad), Pass<T>::memory(partial), loss_of_block);

    pass.backward(Pass<T>::memory(grad), nullptr);
    device.launch(&reduce_kernel<T>, blocks_for(parameters.numel(), threads), threads, 0, pass.stack(), num_branches,
                  pass.partial(), pass.blocks(), stack, of.model.parameters(), Pass<T>::memory(partial), blocks,
                  parameters.numel(), gradient.mutable_data_ptr<T>(), loss_of_block, of.graphs,
                  loss.mutable_data_ptr<T>());
  });
  return {loss, gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) {
  m.impl("branch_readout", TORCH_BOX(&branch_readout));
  m.impl("branch_readout_backward", TORCH_BOX(&branch_readout_backward));
  m.impl("training_step", TORCH_BOX(&training_step));
}

}  // namespace spin_fast

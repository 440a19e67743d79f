// An MLP on a tile of rows, forward and backward, by one thread block.
//
// Layout: activations column by column, [columns, ld], so that a thread loads four rows of a column at once; ld is the
// tile and four more, which keeps the columns of a product over rows on different banks. Weights [in, padded out], and
// transposed for the gradient. Parallel axis: squares of 4 rows x 4 columns (of a weight's gradient: 4 x 4 weights),
// one thread each. Accumulator: T within a tile and over the tiles of a block, float64 over blocks.
//
// A block has three regions of memory: the tile, the weights and the gradient. Each is shared memory if it fits, else
// global.
#pragma once

#include <cmath>
#include <vector>

#include "device.h"
#include "ops.h"

namespace spin_fast {

constexpr int side = 4;  // of the squares

constexpr int padded_to_side(int n) { return (n + side - 1) / side * side; }

template <class T>
using Four = Pack<T, side>;

// i / width and i % width for i = threadIdx.x, threadIdx.x + blockDim.x, ..., with a single division.
struct Walk {
  int width, major_step, minor_step, major, minor;

  __device__ explicit Walk(int minor_size)
      : width(minor_size > 0 ? minor_size : 1),
        major_step(static_cast<int>(blockDim.x) / width),
        minor_step(static_cast<int>(blockDim.x) % width),
        major(static_cast<int>(threadIdx.x) / width),
        minor(static_cast<int>(threadIdx.x) % width) {}
  __device__ void next() {
    major += major_step;
    minor += minor_step;
    if (minor < width) return;
    minor -= width;
    ++major;
  }
};

// store(i, j, load(i, j)) for i < length and j < width, by the whole block. Several loads are in flight at once; the
// last ones may repeat i = length - 1.
template <class T, class Load, class Store>
__device__ void copy(int length, int width, Load load, Store store) {
  constexpr int loads = 4;
  for (Walk at(width), ahead = at; width > 0 && at.major < length;) {
    T value[loads];
    for (int i = 0; i < loads; ++i, ahead.next()) value[i] = load(min(ahead.major, length - 1), ahead.minor);
    for (int i = 0; i < loads && at.major < length; ++i, at.next()) store(at.major, at.minor, value[i]);
    at = ahead;
  }
}

// A linear layer with the LeakyReLU after it (slope 1: none): where its parameters are in the flat vector, and where
// its data are in the three regions of a block.
struct LayerLayout {
  int in, out;
  double slope;
  int64_t weight, bias;                // of branch 0
  int64_t weight_branch, bias_branch;  // strides between branches
  int64_t in_step, out_step;           // strides of the weight
  int gradient;                        // gradient region: [in, out] weights and [out] biases
  int packed, packed_bias;             // weight region: [in, weight_ld(out)], [padded out]
  int transposed;                      // weight region: [out, weight_ld(in)]; -1 if the layer passes no gradient down
  int activation;                      // tile region: [padded out, ld]
};

// The memory of a block.
template <class T>
struct Memory {
  T* tile;
  T* weights;
  T* gradient;
};

// An MLP, the attention vector w of its readout if it has one, and the layout of a block's memory, in values of T. Of
// its regions the weights are shared memory only with the tile, the gradient only with the weights.
struct MlpLayout {
  int depth;
  LayerLayout layers[most_layers];
  bool with_gradient, with_input_gradient;
  bool tf32;            // products may use tensor cores
  int64_t w, w_branch;  // in the flat vector, stride between branches; w < 0: no attention
  int64_t end;          // of its parameters in the flat vector
  int w_gradient, gradient_size;
  int packed_w;  // [padded out]
  int64_t weights_size;
  int tile, ld;
  int input;       // [padded in, ld]
  int spare[2];    // [padded widest, ld]: gradients of activations
  int per_row;     // [2, ld]
  int per_column;  // [padded out]
  int64_t tile_size;
  bool shared_tile, shared_weights, shared_gradient;
  int64_t shared_bytes, threads;  // of a block

  __host__ __device__ int in() const { return layers[0].in; }
  __host__ __device__ int out() const { return layers[depth - 1].out; }
  // The stride between rows of weights. Tensor cores read 4 x 8 weights at once, which 8 mod 16 keeps on 32 banks.
  __host__ __device__ int weight_ld(int columns) const {
    return tf32 ? (columns + 7) / 16 * 16 + 8 : padded_to_side(columns);
  }
};

// Copies a branch's parameters to its weight region, padded with zeros.
template <class T>
__device__ void pack(const MlpLayout& mlp, const T* parameters, int64_t branch, T* weights) {
  for (int l = 0; l < mlp.depth; ++l) {
    const LayerLayout& layer = mlp.layers[l];
    const T* weight = parameters + layer.weight + branch * layer.weight_branch;
    const T* bias = parameters + layer.bias + branch * layer.bias_branch;
    const auto at = [&](int k, int j) {
      return weight[min(k, layer.in - 1) * layer.in_step + min(j, layer.out - 1) * layer.out_step];
    };
    const int wide = padded_to_side(layer.out), ld = mlp.weight_ld(layer.out);
    T* packed = weights + layer.packed;
    copy<T>(layer.in, wide, at, [&](int k, int j, T value) { packed[k * ld + j] = j < layer.out ? value : T(0); });
    for (int j = threadIdx.x; j < wide; j += blockDim.x)
      weights[layer.packed_bias + j] = j < layer.out ? bias[j] : T(0);
    if (layer.transposed < 0) continue;
    const int transposed_ld = mlp.weight_ld(layer.in);
    T* transposed = weights + layer.transposed;
    copy<T>(
        layer.out, padded_to_side(layer.in), [&](int j, int k) { return at(k, j); },
        [&](int j, int k, T value) { transposed[j * transposed_ld + k] = k < layer.in ? value : T(0); });
  }
  for (int j = threadIdx.x; mlp.w >= 0 && j < mlp.out(); j += blockDim.x)
    weights[mlp.packed_w + j] = parameters[mlp.w + branch * mlp.w_branch + j];
}

// The arithmetic of a product: in T, or on tensor cores with factors rounded to TF32 (T is float).
enum class Math { exact, tf32 };

// to[column, row] = finish(row, column, sum of a w + bias), for `rows` rows (a multiple of 4) and the padded columns;
// `to` may be null. Further rows of the tile may be computed too.
template <Math math, class T, class F>
__device__ void product(const T* a, int ld, int depth, const T* w, int w_ld, int columns, const T* bias, int rows,
                        T* to, F finish) {
  if constexpr (math == Math::tf32) {
    // A warp computes 16 rows x 32 columns: four adjacent products of the tensor cores.
    constexpr int squares = 4;
    const int lane = threadIdx.x % warp_size, warps = blockDim.x / warp_size, group = lane / 4, member = lane % 4;
    const int row_blocks = (rows + 15) / 16, column_blocks = (columns + 8 * squares - 1) / (8 * squares);
    for (int m = threadIdx.x / warp_size; m < row_blocks * column_blocks; m += warps) {
      __syncwarp();  // mma needs converged lanes
      const int row = m % row_blocks * 16 + group, first = m / row_blocks * 8 * squares;
      float sum[squares][4] = {};
      for (int k = 0; k < depth; k += 8) {
        const float* column = a + (k + member) * ld + row;
        const bool near = k + member < depth, far = k + member + 4 < depth;
        const unsigned x[4] = {near ? tf32(column[0]) : 0, near ? tf32(column[8]) : 0, far ? tf32(column[4 * ld]) : 0,
                               far ? tf32(column[4 * ld + 8]) : 0};
        for (int n = 0; n < squares; ++n) {
          const int j = first + 8 * n + group;
          const float* weight = w + (k + member) * w_ld + j;
          const unsigned y[2] = {near && j < columns ? tf32(weight[0]) : 0,
                                 far && j < columns ? tf32(weight[4 * w_ld]) : 0};
          multiply_add(sum[n], x, y);
        }
      }
      for (int n = 0; n < squares; ++n)
        for (int i = 0; i < 4; ++i) {
          const int j = first + 8 * n + 2 * member + i % 2, at = row + i / 2 * 8;
          if (j >= columns) continue;
          const T value = finish(at, j, sum[n][i] + (bias ? bias[j] : T(0)));
          if (to) to[j * ld + at] = value;
        }
    }
  } else {
    const int groups = rows / side;
    for (int m = threadIdx.x; m < groups * (columns / side); m += blockDim.x) {
      const int row = m % groups * side, column = m / groups * side;
      Four<T> sum[side];
      for (int j = 0; j < side; ++j)
        for (int i = 0; i < side; ++i) sum[j].at[i] = bias ? bias[column + j] : T(0);
      for (int k = 0; k < depth; ++k) {
        const Four<T> x = load<side>(a + k * ld + row), y = load<side>(w + k * w_ld + column);
        for (int j = 0; j < side; ++j)
          for (int i = 0; i < side; ++i) sum[j].at[i] += x.at[i] * y.at[j];
      }
      for (int j = 0; j < side; ++j) {
        for (int i = 0; i < side; ++i) sum[j].at[i] = finish(row + i, column + j, sum[j].at[i]);
        if (to) store(to + (column + j) * ld + row, sum[j]);
      }
    }
  }
}

// sum[k, j] += sum_rows a[k, row] g[j, row]; the weights of a thread are strided, so that neighbouring threads read
// different banks.
template <Math math, class T>
__device__ void add_outer(const T* a, int in, const T* g, int out, int ld, int rows, T* sum) {
  if constexpr (math == Math::tf32) {
    const int lane = threadIdx.x % warp_size, warps = blockDim.x / warp_size, group = lane / 4, member = lane % 4;
    const int k_blocks = (in + 15) / 16, j_blocks = (out + 7) / 8;
    for (int m = threadIdx.x / warp_size; m < k_blocks * j_blocks; m += warps) {
      __syncwarp();
      const int k = m / j_blocks * 16 + group, j = m % j_blocks * 8 + group;
      float part[4] = {};
      for (int row = 0; row < rows; row += 8) {
        const bool near = row + member < rows, far = row + member + 4 < rows;
        const float* x0 = a + k * ld + row + member;
        const float* x8 = x0 + 8 * ld;
        const float* y0 = g + j * ld + row + member;
        const unsigned x[4] = {near && k < in ? tf32(x0[0]) : 0, near && k + 8 < in ? tf32(x8[0]) : 0,
                               far && k < in ? tf32(x0[4]) : 0, far && k + 8 < in ? tf32(x8[4]) : 0};
        const unsigned y[2] = {near && j < out ? tf32(y0[0]) : 0, far && j < out ? tf32(y0[4]) : 0};
        multiply_add(part, x, y);
      }
      for (int i = 0; i < 4; ++i) {
        const int to_k = k + i / 2 * 8, to_j = m % j_blocks * 8 + 2 * member + i % 2;
        if (to_k < in && to_j < out) sum[to_k * out + to_j] += part[i];
      }
    }
  } else {
    const int k_groups = (in + side - 1) / side, j_groups = (out + side - 1) / side;
    for (int m = threadIdx.x; m < k_groups * j_groups; m += blockDim.x) {
      const int first_k = m / j_groups, first_j = m % j_groups;
      T part[side][side] = {};
      for (int row = 0; row < rows; row += side) {
        Four<T> x[side], y[side];
        for (int i = 0; i < side; ++i) {  // clamped: loaded but not used
          x[i] = load<side>(a + min(first_k + i * k_groups, in - 1) * ld + row);
          y[i] = load<side>(g + min(first_j + i * j_groups, out - 1) * ld + row);
        }
        for (int i = 0; i < side; ++i)
          for (int j = 0; j < side; ++j)
            for (int r = 0; r < side; ++r) part[i][j] += x[i].at[r] * y[j].at[r];
      }
      for (int i = 0; i < side; ++i)
        for (int j = 0; j < side; ++j) {
          const int to_k = first_k + i * k_groups, to_j = first_j + j * j_groups;
          if (to_k < in && to_j < out) sum[to_k * out + to_j] += part[i][j];
        }
    }
  }
}

// The dot product of two columns.
template <class T>
__device__ T dot_of_columns(const T* a, const T* b, int rows) {
  T sum = 0;
  int row = 0;
  for (; row + side <= rows; row += side) {
    const Four<T> x = load<side>(a + row), y = load<side>(b + row);
    for (int i = 0; i < side; ++i) sum += x.at[i] * y.at[i];
  }
  for (; row < rows; ++row) sum += a[row] * b[row];
  return sum;
}

template <class T>
__device__ T gate(T activation, T slope) {
  return activation > 0 ? T(1) : slope;
}

// Evaluates all layers on the rows at `input`, a multiple of 4. The block is synchronised before and after.
template <Math math, class T>
__device__ void forward(const MlpLayout& mlp, const Memory<T>& memory, int rows) {
  const T* from = memory.tile + mlp.input;
  for (int l = 0; l < mlp.depth; ++l) {
    const LayerLayout& layer = mlp.layers[l];
    const T slope = static_cast<T>(layer.slope);
    product<math>(from, mlp.ld, layer.in, memory.weights + layer.packed, mlp.weight_ld(layer.out),
                  padded_to_side(layer.out), memory.weights + layer.packed_bias, rows, memory.tile + layer.activation,
                  [&](int, int, T value) { return value > 0 ? value : slope * value; });
    __syncthreads();
    from = memory.tile + layer.activation;
  }
}

// From the gradient of the input of the last LeakyReLU, at spare[0]: adds to the gradients of all layers, and passes
// that of the MLP's input to finish(row, column, value) if the layout has it.
template <Math math, class T, class F>
__device__ void backward(const MlpLayout& mlp, const Memory<T>& memory, int rows, F finish) {
  T* g = memory.tile + mlp.spare[0];
  T* next = memory.tile + mlp.spare[1];
  for (int l = mlp.depth - 1; l >= 0; --l) {
    const LayerLayout& layer = mlp.layers[l];
    const T* below = memory.tile + (l > 0 ? mlp.layers[l - 1].activation : mlp.input);
    T* sum = memory.gradient + layer.gradient;
    add_outer<math>(below, layer.in, g, layer.out, mlp.ld, rows, sum);
    for (int j = threadIdx.x; j < layer.out; j += blockDim.x) {
      T total = 0;
      for (int row = 0; row < rows; row += side) {
        const Four<T> four = load<side>(g + j * mlp.ld + row);
        for (int i = 0; i < side; ++i) total += four.at[i];
      }
      sum[layer.in * layer.out + j] += total;
    }
    const T* w = memory.weights + layer.transposed;
    const int ld = mlp.weight_ld(layer.in);
    const T* no_bias = nullptr;
    T* nowhere = nullptr;
    if (l > 0) {
      const T slope = static_cast<T>(mlp.layers[l - 1].slope);
      product<math>(g, mlp.ld, layer.out, w, ld, padded_to_side(layer.in), no_bias, rows, next,
                    [&](int row, int column, T value) { return value * gate(below[column * mlp.ld + row], slope); });
    } else if (layer.transposed >= 0) {
      product<math>(g, mlp.ld, layer.out, w, ld, padded_to_side(layer.in), no_bias, rows, nowhere,
                    [&](int row, int column, T value) {
                      finish(row, column, value);
                      return value;
                    });
    }
    __syncthreads();
    T* const used = g;
    g = next;
    next = used;
  }
}

// What a kernel needs for an MLP, of each of grid.y branches, that grid.x blocks evaluate.
template <class T>
struct MlpCall {
  MlpLayout layout;
  int64_t branches, blocks;
  const T* parameters;
  T* tiles;      // the tile regions if not shared: [branches, blocks, tile_size]
  T* weights;    // the weight regions if not shared: [branches, weights_size]
  T* gradients;  // what the blocks leave: [branches, blocks, gradient_size]

  __device__ int64_t block() const { return blockIdx.y * static_cast<int64_t>(gridDim.x) + blockIdx.x; }
  __device__ T* gradient() const { return gradients + block() * layout.gradient_size; }
};

// The memory of a block, with the weights packed and the gradient 0. Shared: tile and weights are shared memory;
// kernels are compiled for both cases, as loads from an unknown address space are slower.
template <bool Shared, class T>
__device__ Memory<T> prepare_memory(const MlpCall<T>& call) {
  const MlpLayout& mlp = call.layout;
  T* const shared = shared_memory<T>();
  Memory<T> memory;
  if constexpr (Shared) {
    memory = {shared, shared + mlp.tile_size, call.gradient()};
    if (mlp.shared_gradient) memory.gradient = memory.weights + mlp.weights_size;
    pack(mlp, call.parameters, blockIdx.y, memory.weights);
  } else {
    memory = {mlp.shared_tile ? shared : call.tiles + call.block() * mlp.tile_size,
              call.weights + blockIdx.y * mlp.weights_size, call.gradient()};
  }
  for (int i = threadIdx.x; mlp.with_gradient && i < mlp.gradient_size; i += blockDim.x) memory.gradient[i] = T(0);
  return memory;
}

// Copies a shared gradient to global memory, at the end of a kernel.
template <class T>
__device__ void store_gradient(const MlpCall<T>& call, const Memory<T>& memory) {
  __syncthreads();
  for (int i = threadIdx.x; call.layout.shared_gradient && i < call.layout.gradient_size; i += blockDim.x)
    call.gradient()[i] = memory.gradient[i];
}

// ---- The host's part (mlp.cu), for float and double

// The layers of an MLP whose parameters begin at `first` in the flat vector: weight and bias of each layer, all
// branches of each. Weights are [in, out], or [out, in] if `transposed`. `name` is the argument that holds `widths`.
MlpLayout layers_of(const char* name, int64_t in, const std::vector<int64_t>& widths, double slope, int64_t branches,
                    int64_t first, bool transposed);

// An MLP laid out for tiles of `rows`, or fewer if only these fit into shared memory, with the memory that is not
// shared. A second resident block takes precedence over a shared gradient, and both over larger tiles.
template <class T>
class MlpLaunch {
 public:
  MlpLaunch(const Device& device, const char* name, const MlpLayout& layers, int64_t branches, const T* parameters,
            int rows);

  // For a kernel on so many blocks per branch. The memory is that of the last call.
  MlpCall<T> call(int64_t blocks);

  const MlpLayout layout;

 private:
  const Device& device_;
  const T* parameters_;
  int64_t branches_;
  Buffer<T> weights_, tiles_, gradients_;
};

// MLPs whose parameters follow each other in the flat vector: of the hops, of the joint branch, of the classifier.
// Those that a model does not have are empty.
template <class T>
struct MlpCalls {
  MlpCall<T> hops, joint, classifier;
};

// The gradient of the flat vector; `loss`, unless it is null, is the sum of `losses`, one of each of the classifier's
// blocks.
template <class T>
void reduce_gradients(const Device& device, const MlpCalls<T>& calls, int64_t parameters, T* gradient,
                      const double* losses, T* loss);

}  // namespace spin_fast

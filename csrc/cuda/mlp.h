// An MLP on a tile of rows, forward and backward, by one thread block.
//
// Layout: activations column by column, [columns, ld], so that a thread loads four rows of a column at once; ld is the
// tile and four more, which keeps the columns of a product over rows on different banks. Weights [in, padded out], and
// transposed for the gradient. Parallel axis: squares of 4 rows x 4 columns (of a weight's gradient: 4 x 4 weights),
// one thread each. Accumulator: T within a tile and over the tiles of a block, float64 over blocks.
//
// What a block works on lies in three stretches of memory: what belongs to the tile, the weights, and the gradient.
// Each is shared memory where it fits, else global.
#pragma once

#include <cmath>

#include "device.h"

namespace spin_fast {

constexpr int side = 4;  // of the squares

constexpr int padded_to_side(int n) { return (n + side - 1) / side * side; }

template <class T>
struct alignas(16) Four {
  T at[side];
};

template <class T>
__device__ Four<T> load_four(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}

template <class T>
__device__ void store_four(T* to, const Four<T>& value) {
  *reinterpret_cast<Four<T>*>(to) = value;
}

// i / width and i % width for i = threadIdx.x, threadIdx.x + blockDim.x, ...: one division instead of one at every
// step.
struct Walk {
  int width, major_step, minor_step, major, minor;

  __device__ explicit Walk(int of)
      : width(of > 0 ? of : 1),
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

// store(i, j, load(i, j)) for i < length and j < width, by the whole block. Without waiting for every load, several are
// on their way at once; the last may be of i = length - 1 once more.
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

// A linear layer and the LeakyReLU after it (none with a slope of 1), where its parameters stand in the flat vector of
// all, and where it keeps things in the block's memory.
struct Linear {
  int in, out;
  double slope;
  int64_t weight, bias;                // of branch 0
  int64_t weight_branch, bias_branch;  // from one branch to the next
  int64_t in_step, out_step;           // from one weight to the next
  int gradient;                        // of a branch: [in, out] weights and [out] biases
  int packed, packed_bias;             // of the weights: [in, weight_ld(out)], [padded out]
  int transposed;                      // of the weights: [out, weight_ld(in)]; -1 where no gradient goes further down
  int activation;                      // of the tile: [padded out, ld]
};

// Where a block keeps things.
template <class T>
struct Memory {
  T* tile;
  T* weights;
  T* gradient;
};

// An MLP, the attention vector of its readout if it has one, and how the memory of a block is divided, in values of T.
struct Stack {
  int depth;
  Linear layers[most_layers];
  bool with_gradient, with_input_gradient;
  bool tf32;            // may be multiplied on tensor cores
  int64_t w, w_branch;  // in the parameters; w < 0: none
  int w_gradient, gradient_size;
  int packed_w;  // [padded out]
  int64_t weights_size;
  int tile, ld;
  int input;       // [padded in, ld]
  int spare[2];    // [padded widest, ld]: gradients of activations
  int per_row;     // [2, ld]
  int per_column;  // [padded out]
  int64_t tile_size;

  __host__ __device__ int in() const { return layers[0].in; }
  __host__ __device__ int out() const { return layers[depth - 1].out; }
  // From one row of weights to the next. Tensor cores read 4 x 8 weights at once, which 8 mod 16 keeps on 32 banks.
  __host__ __device__ int weight_ld(int columns) const {
    return tf32 ? (columns + 7) / 16 * 16 + 8 : padded_to_side(columns);
  }
};

// Divides the memory of a block for tiles of so many rows. Places are valid where both sizes fit an int.
inline void lay_out(Stack& stack, int tile) {
  const auto take = [](int64_t& at, int64_t rows, int64_t columns) {
    const int64_t here = at;
    at += (rows * columns + side - 1) / side * side;
    return static_cast<int>(here);
  };
  int64_t weights = 0, at = 0;
  int widest = 0;
  for (int l = 0; l < stack.depth; ++l) {
    Linear& layer = stack.layers[l];
    const int wide = padded_to_side(layer.out);
    const bool passes_on = stack.with_gradient && (l > 0 || stack.with_input_gradient);
    layer.packed = take(weights, layer.in, stack.weight_ld(layer.out));
    layer.packed_bias = take(weights, 1, wide);
    layer.transposed = passes_on ? take(weights, layer.out, stack.weight_ld(layer.in)) : -1;
    widest = std::max(widest, wide);
  }
  stack.packed_w = take(weights, 1, stack.out());
  stack.weights_size = weights;
  stack.tile = tile;
  stack.ld = tile + side;
  stack.input = take(at, padded_to_side(stack.in()), stack.ld);
  for (int l = 0; l < stack.depth; ++l)  // without gradients two of them take turns
    stack.layers[l].activation =
        stack.with_gradient || l < 2 ? take(at, widest, stack.ld) : stack.layers[l - 2].activation;
  for (int& spare : stack.spare) spare = stack.with_gradient ? take(at, widest, stack.ld) : -1;
  stack.per_row = take(at, 2, stack.ld);
  stack.per_column = take(at, 1, stack.out());
  stack.tile_size = at;
}

// Copies a branch's parameters to where products read them, padded with zeros.
template <class T>
__device__ void pack(const Stack& stack, const T* parameters, int64_t branch, T* weights) {
  for (int l = 0; l < stack.depth; ++l) {
    const Linear& layer = stack.layers[l];
    const T* weight = parameters + layer.weight + branch * layer.weight_branch;
    const T* bias = parameters + layer.bias + branch * layer.bias_branch;
    const auto at = [&](int k, int j) {
      return weight[min(k, layer.in - 1) * layer.in_step + min(j, layer.out - 1) * layer.out_step];
    };
    const int wide = padded_to_side(layer.out), ld = stack.weight_ld(layer.out);
    T* packed = weights + layer.packed;
    copy<T>(layer.in, wide, at, [&](int k, int j, T value) { packed[k * ld + j] = j < layer.out ? value : T(0); });
    for (int j = threadIdx.x; j < wide; j += blockDim.x)
      weights[layer.packed_bias + j] = j < layer.out ? bias[j] : T(0);
    if (layer.transposed < 0) continue;
    const int transposed_ld = stack.weight_ld(layer.in);
    T* transposed = weights + layer.transposed;
    copy<T>(
        layer.out, padded_to_side(layer.in), [&](int j, int k) { return at(k, j); },
        [&](int j, int k, T value) { transposed[j * transposed_ld + k] = k < layer.in ? value : T(0); });
  }
  for (int j = threadIdx.x; stack.w >= 0 && j < stack.out(); j += blockDim.x)
    weights[stack.packed_w + j] = parameters[stack.w + branch * stack.w_branch + j];
}

// What a product is computed in: T, or on tensor cores with factors rounded to TF32 (T is float then).
enum class Math { exact, tf32 };

// to[column, row] = finish(row, column, sum of a w + bias), for `rows` rows (a multiple of 4) and the padded columns;
// `to` may be null. Rows up to the tile may be computed in vain.
template <Math math, class T, class F>
__device__ void product(const T* a, int ld, int depth, const T* w, int w_ld, int columns, const T* bias, int rows,
                        T* to, F finish) {
  if constexpr (math == Math::tf32) {
    // A warp takes 16 rows x 32 columns, as four squares of the tensor cores side by side.
    constexpr int squares = 4;
    const int lane = threadIdx.x % warp_size, warps = blockDim.x / warp_size, group = lane / 4, member = lane % 4;
    const int row_blocks = (rows + 15) / 16, column_blocks = (columns + 8 * squares - 1) / (8 * squares);
    for (int m = threadIdx.x / warp_size; m < row_blocks * column_blocks; m += warps) {
      __syncwarp();  // the tensor cores take the lanes together
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
        const Four<T> x = load_four(a + k * ld + row), y = load_four(w + k * w_ld + column);
        for (int j = 0; j < side; ++j)
          for (int i = 0; i < side; ++i) sum[j].at[i] += x.at[i] * y.at[j];
      }
      for (int j = 0; j < side; ++j) {
        for (int i = 0; i < side; ++i) sum[j].at[i] = finish(row + i, column + j, sum[j].at[i]);
        if (to) store_four(to + (column + j) * ld + row, sum[j]);
      }
    }
  }
}

// sum[k, j] += sum_rows a[k, row] g[j, row]; a thread's weights are strided, so that its neighbours' are on other
// banks.
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
        for (int i = 0; i < side; ++i) {  // what is too far is loaded in vain
          x[i] = load_four(a + min(first_k + i * k_groups, in - 1) * ld + row);
          y[i] = load_four(g + min(first_j + i * j_groups, out - 1) * ld + row);
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

// sum_row a[row] b[row], of two columns.
template <class T>
__device__ T dot_of_columns(const T* a, const T* b, int rows) {
  T sum = 0;
  int row = 0;
  for (; row + side <= rows; row += side) {
    const Four<T> x = load_four(a + row), y = load_four(b + row);
    for (int i = 0; i < side; ++i) sum += x.at[i] * y.at[i];
  }
  for (; row < rows; ++row) sum += a[row] * b[row];
  return sum;
}

template <class T>
__device__ T gate(T activation, T slope) {
  return activation > 0 ? T(1) : slope;
}

// The rows at `input` through all layers. Rows are a multiple of 4; the block is in step before and after.
template <Math math, class T>
__device__ void forward(const Stack& stack, const Memory<T>& memory, int rows) {
  const T* from = memory.tile + stack.input;
  for (int l = 0; l < stack.depth; ++l) {
    const Linear& layer = stack.layers[l];
    const T slope = static_cast<T>(layer.slope);
    product<math>(from, stack.ld, layer.in, memory.weights + layer.packed, stack.weight_ld(layer.out),
                  padded_to_side(layer.out), memory.weights + layer.packed_bias, rows, memory.tile + layer.activation,
                  [&](int, int, T value) { return value > 0 ? value : slope * value; });
    __syncthreads();
    from = memory.tile + layer.activation;
  }
}

// From the gradient of what goes into the last LeakyReLU, at spare[0]: adds to the gradients of all layers, and gives
// that of the input to finish(row, column, value), if it is asked for.
template <Math math, class T, class F>
__device__ void backward(const Stack& stack, const Memory<T>& memory, int rows, F finish) {
  T* g = memory.tile + stack.spare[0];
  T* next = memory.tile + stack.spare[1];
  for (int l = stack.depth - 1; l >= 0; --l) {
    const Linear& layer = stack.layers[l];
    const T* below = memory.tile + (l > 0 ? stack.layers[l - 1].activation : stack.input);
    T* sum = memory.gradient + layer.gradient;
    add_outer<math>(below, layer.in, g, layer.out, stack.ld, rows, sum);
    for (int j = threadIdx.x; j < layer.out; j += blockDim.x) {
      T total = 0;
      for (int row = 0; row < rows; row += side) {
        const Four<T> four = load_four(g + j * stack.ld + row);
        for (int i = 0; i < side; ++i) total += four.at[i];
      }
      sum[layer.in * layer.out + j] += total;
    }
    const T* w = memory.weights + layer.transposed;
    const int ld = stack.weight_ld(layer.in);
    const T* no_bias = nullptr;
    T* nowhere = nullptr;
    if (l > 0) {
      const T slope = static_cast<T>(stack.layers[l - 1].slope);
      product<math>(g, stack.ld, layer.out, w, ld, padded_to_side(layer.in), no_bias, rows, next,
                    [&](int row, int column, T value) { return value * gate(below[column * stack.ld + row], slope); });
    } else if (layer.transposed >= 0) {
      product<math>(g, stack.ld, layer.out, w, ld, padded_to_side(layer.in), no_bias, rows, nowhere,
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

}  // namespace spin_fast

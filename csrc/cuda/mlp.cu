// The host's part of an MLP: layouts, packed weights, and the sum of the gradients of all blocks.

#include <tuple>

#include "mlp.h"

namespace spin_fast {
namespace {

constexpr int pack_threads = 1024;
constexpr int64_t reduce_threads = 256;
constexpr int64_t most_weights = INT32_MAX / 16;  // of a layer
constexpr int summing_lanes = 4;                  // per parameter, as parameters are few and have a value in each block

// Divides the memory of a block for tiles of so many rows. Offsets are valid if both sizes fit an int.
void lay_out(MlpLayout& mlp, int tile) {
  const auto take = [](int64_t& at, int64_t rows, int64_t columns) {
    const int64_t here = at;
    at += (rows * columns + side - 1) / side * side;
    return static_cast<int>(here);
  };
  int64_t weights = 0, at = 0;
  int widest = 0;
  for (int l = 0; l < mlp.depth; ++l) {
    LayerLayout& layer = mlp.layers[l];
    const int wide = padded_to_side(layer.out);
    const bool passes_gradient = mlp.with_gradient && (l > 0 || mlp.with_input_gradient);
    layer.packed = take(weights, layer.in, mlp.weight_ld(layer.out));
    layer.packed_bias = take(weights, 1, wide);
    layer.transposed = passes_gradient ? take(weights, layer.out, mlp.weight_ld(layer.in)) : -1;
    widest = std::max(widest, wide);
  }
  mlp.packed_w = take(weights, 1, mlp.out());
  mlp.weights_size = weights;
  mlp.tile = tile;
  mlp.ld = tile + side;
  mlp.input = take(at, padded_to_side(mlp.in()), mlp.ld);
  for (int l = 0; l < mlp.depth; ++l)  // without gradients, two activations alternate
    mlp.layers[l].activation = mlp.with_gradient || l < 2 ? take(at, widest, mlp.ld) : mlp.layers[l - 2].activation;
  for (int& spare : mlp.spare) spare = mlp.with_gradient ? take(at, widest, mlp.ld) : -1;
  mlp.per_row = take(at, 2, mlp.ld);
  mlp.per_column = take(at, 1, mlp.out());
  mlp.tile_size = at;
}

// Chooses the rows of a tile, at most `rows`, and which regions are shared memory.
MlpLayout laid_out(const Device& device, const char* name, MlpLayout mlp, int64_t value_bytes, int rows) {
  const int64_t most = device.most_shared_bytes(), half = device.most_shared_bytes(2);
  for (int tile = rows; tile >= side && !mlp.shared_tile; tile /= 2) {
    lay_out(mlp, tile);
    for (const auto& [weights, gradient, room] : {std::tuple{true, true, half},
                                                  {true, false, half},
                                                  {true, true, most},
                                                  {true, false, most},
                                                  {false, false, most}}) {
      const bool shared_gradient = gradient && mlp.with_gradient;
      const int64_t bytes =
          value_bytes * (mlp.tile_size + (weights ? mlp.weights_size : 0) + (shared_gradient ? mlp.gradient_size : 0));
      if (mlp.shared_tile || bytes > room) continue;
      mlp.shared_tile = true;
      mlp.shared_weights = weights;
      mlp.shared_gradient = shared_gradient;
      mlp.shared_bytes = bytes;
    }
  }
  if (!mlp.shared_tile) lay_out(mlp, rows);
  const int64_t largest = std::max<int64_t>(mlp.tile_size, mlp.weights_size);
  require(largest <= INT32_MAX, name, " must make tiles and weights of at most ", INT32_MAX, " values, got ", largest);
  int widest = 0;
  for (int l = 0; l < mlp.depth; ++l) widest = std::max(widest, mlp.layers[l].out);
  const int64_t squares = static_cast<int64_t>(mlp.tile / side) * (padded_to_side(widest) / side);
  // More threads than squares still help to pack the weights, which waits for memory.
  mlp.threads = std::clamp<int64_t>((squares + warp_size - 1) / warp_size * warp_size, 128, 256);
  return mlp;
}

// One block per branch.
template <class T>
__global__ void __launch_bounds__(pack_threads) pack_kernel(MlpLayout mlp, const T* parameters, T* weights) {
  pack(mlp, parameters, blockIdx.x, weights + blockIdx.x * mlp.weights_size);
}

// The offset of parameter p of the flat vector in the gradients of its branch's first block; -1 if the MLP has no such
// parameter.
template <class T>
__device__ int64_t gradient_offset(const MlpCall<T>& call, int64_t p) {
  const MlpLayout& mlp = call.layout;
  const auto offset = [&](int64_t branch, int64_t at) { return branch * call.blocks * mlp.gradient_size + at; };
  if (mlp.w >= 0 && p >= mlp.w && p < mlp.w + call.branches * mlp.out())
    return offset((p - mlp.w) / mlp.out(), mlp.w_gradient + (p - mlp.w) % mlp.out());
  for (int l = 0; l < mlp.depth; ++l) {
    const LayerLayout& layer = mlp.layers[l];
    const int64_t size = static_cast<int64_t>(layer.in) * layer.out;
    int64_t i = p - layer.weight;
    if (i >= 0 && i < call.branches * size) {
      const int64_t k = i % size / layer.in_step % layer.in, j = i % size / layer.out_step % layer.out;
      return offset(i / size, layer.gradient + k * layer.out + j);
    }
    i = p - layer.bias;
    if (i >= 0 && i < call.branches * layer.out) return offset(i / layer.out, layer.gradient + size + i % layer.out);
  }
  return -1;
}

// `summing_lanes` lanes per parameter.
template <class T>
__global__ void reduce_kernel(MlpCalls<T> calls, int64_t parameters, T* gradient, const double* losses, T* loss) {
  const int64_t p = thread_index() / summing_lanes;
  const int lane = threadIdx.x % summing_lanes;
  if (loss != nullptr && blockIdx.x == 0 && threadIdx.x < warp_size) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < calls.classifier.blocks; i += warp_size) sum += losses[i];
    sum = sum_over_lanes(sum);
    if (threadIdx.x == 0) *loss = static_cast<T>(sum);
  }
  double sum = 0;
  if (p < parameters) {
    const MlpCall<T>& of = p < calls.hops.layout.end    ? calls.hops
                           : p < calls.joint.layout.end ? calls.joint
                                                        : calls.classifier;
    const T* values = of.gradients + gradient_offset(of, p);
#pragma unroll 8
    for (int64_t b = lane; b < of.blocks; b += summing_lanes) sum += values[b * of.layout.gradient_size];
  }
  sum = sum_over_lanes(sum, summing_lanes);
  if (p < parameters && lane == 0) gradient[p] = static_cast<T>(sum);
}

}  // namespace

MlpLayout layers_of(const char* name, int64_t in, const std::vector<int64_t>& widths, double slope, int64_t branches,
                    int64_t first, bool transposed) {
  MlpLayout mlp = {};
  mlp.depth = static_cast<int>(widths.size());
  mlp.w = -1;
  for (int l = 0; l < mlp.depth; ++l) {
    const int64_t out = widths[l], size = in * out;
    require(size <= most_weights, name, " must make layers of at most ", most_weights, " weights, got ", size);
    LayerLayout& layer = mlp.layers[l];
    layer.in = static_cast<int>(in);
    layer.out = static_cast<int>(out);
    layer.slope = slope;
    layer.weight = first;
    layer.weight_branch = size;
    layer.bias = first + branches * size;
    layer.bias_branch = out;
    layer.in_step = transposed ? 1 : out;
    layer.out_step = transposed ? in : 1;
    layer.gradient = mlp.gradient_size;
    mlp.gradient_size += static_cast<int>(size + out);
    first += branches * (size + out);
    in = out;
  }
  mlp.end = first;
  return mlp;
}

template <class T>
MlpLaunch<T>::MlpLaunch(const Device& device, const char* name, const MlpLayout& layers, int64_t branches,
                        const T* parameters, int rows)
    : layout(laid_out(device, name, layers, sizeof(T), rows)),
      device_(device),
      parameters_(parameters),
      branches_(branches),
      weights_(device, layout.shared_weights ? 0 : branches * layout.weights_size) {
  if (weights_)
    device.launch(&pack_kernel<T>, grid_of("num_branches", branches), pack_threads, 0, layout, parameters, weights_);
}

template <class T>
MlpCall<T> MlpLaunch<T>::call(int64_t blocks) {
  tiles_ = Buffer<T>(device_, layout.shared_tile ? 0 : branches_ * blocks * layout.tile_size);
  gradients_ = Buffer<T>(device_, layout.with_gradient ? branches_ * blocks * layout.gradient_size : 0);
  return {layout, branches_, blocks, parameters_, tiles_, weights_, gradients_};
}

template <class T>
void reduce_gradients(const Device& device, const MlpCalls<T>& calls, int64_t parameters, T* gradient,
                      const double* losses, T* loss) {
  device.launch(&reduce_kernel<T>, blocks_for("parameters", parameters, reduce_threads / summing_lanes), reduce_threads,
                0, calls, parameters, gradient, losses, loss);
}

template class MlpLaunch<float>;
template class MlpLaunch<double>;
template void reduce_gradients(const Device&, const MlpCalls<float>&, int64_t, float*, const double*, float*);
template void reduce_gradients(const Device&, const MlpCalls<double>&, int64_t, double*, const double*, double*);

}  // namespace spin_fast

// The training step on CUDA: the fused branches, the classifier with its loss, and the gradients of all parameters.

#include <cfloat>
#include <tuple>

#include "branch.h"

namespace spin_fast {
namespace {

constexpr int classifier_tile = 16;

// The weight of all chosen graphs; one warp.
template <class T>
__global__ void weigh_kernel(const T* class_weight, int classes, const int64_t* y, const int64_t* ids, int64_t graphs,
                             double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < graphs; i += warp_size) {
    const int64_t label = y[ids ? ids[i] : i];
    if (label >= 0 && label < classes) sum += class_weight[label];
  }
  sum = sum_over_lanes(sum);
  if (threadIdx.x == 0) *total = sum > DBL_MIN ? sum : DBL_MIN;  // graphs that all weigh 0 have loss 0
}

// The classifier on tiles of readouts, with the loss and its gradients; one block per tile.
template <bool Shared, class T>
__global__ void classifier_kernel(Stack stack, Fit fit, T* tiles, T* weights, const T* parameters, const T* readout,
                                  const int64_t* y, const T* class_weight, const double* total_weight,
                                  const int64_t* ids, int64_t graphs, T* grad, T* partial, double* loss) {
  T* kept = partial + blockIdx.x * static_cast<int64_t>(stack.gradient_size);
  const Memory<T> memory = memory_of_block<Shared>(stack, fit, parameters, 0, tiles, weights, kept);
  const int width = stack.in(), classes = stack.out();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * stack.tile, left = graphs - first;
  const int count = static_cast<int>(left < stack.tile ? left : stack.tile), rows = padded_to_side(count);
  T* input = memory.tile + stack.input;
  copy<T>(
      rows, width, [&](int row, int column) { return readout[(first + min(row, count - 1)) * width + column]; },
      [&](int row, int column, T value) { input[column * stack.ld + row] = row < count ? value : T(0); });
  __syncthreads();
  forward<Math::exact>(stack, memory, rows);
  const T* scores = memory.tile + stack.layers[stack.depth - 1].activation;
  T* dscores = memory.tile + stack.spare[0];
  T* losses = memory.tile + stack.per_row;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    if (row >= count) {
      for (int c = 0; c < classes; ++c) dscores[c * stack.ld + row] = 0;
      continue;
    }
    const int64_t graph = first + row, label = y[ids ? ids[graph] : graph];
    double top = scores[row], total = 0;
    for (int c = 1; c < classes; ++c) top = scores[c * stack.ld + row] > top ? scores[c * stack.ld + row] : top;
    for (int c = 0; c < classes; ++c) total += exp(scores[c * stack.ld + row] - top);
    const bool known = label >= 0 && label < classes;  // no contents are checked on a GPU: show it
    const double weight = !known         ? static_cast<double>(NAN)
                          : class_weight ? class_weight[label] / *total_weight
                                         : 1.0 / static_cast<double>(graphs);
    for (int c = 0; c < classes; ++c)
      dscores[c * stack.ld + row] =
          static_cast<T>((exp(scores[c * stack.ld + row] - top) / total - (c == label)) * weight);
    losses[row] =
        static_cast<T>(known ? (log(total) + top - scores[label * stack.ld + row]) * weight : static_cast<double>(NAN));
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
  for (int i = threadIdx.x; fit.gradient && i < stack.gradient_size; i += blockDim.x) kept[i] = memory.gradient[i];
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
    require(in * out <= most_weights, "classifier_widths must make layers of at most ", most_weights, " weights, got ",
            in * out);
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

std::tuple<Tensor, Tensor> training_step(const Tensor& rows, const Tensor& parameters, const Tensor& y,
                                         OptionalTensor class_weight, const Tensor& ptr, OptionalTensor index,
                                         OptionalTensor count, OptionalTensor ids, int64_t num_branches,
                                         std::vector<int64_t> widths, std::vector<int64_t> classifier_widths,
                                         bool attention, double negative_slope, bool tf32, bool) {
  const int64_t more = classifier_parameters(num_branches, widths, classifier_widths);
  const Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                       negative_slope, false, false, more);
  const ScalarType value = rows.scalar_type();
  expect("y", y, {of.seg.graphs}, {ScalarType::Long});
  if (class_weight) expect("class_weight", *class_weight, {classifier_widths.back()}, {value});
  const Device device(rows, {{"y", y},
                             {"class_weight", class_weight},
                             {"parameters", parameters},
                             {"ptr", ptr},
                             {"index", index},
                             {"count", count},
                             {"ids", ids}});
  Tensor loss = device.empty({}, value), gradient = device.empty({parameters.numel()}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t width = of.model.readout_width();
    Tensor readout = device.bytes_for<T>(of.graphs * width), grad = device.bytes_for<T>(of.graphs * width);
    Pass<T> pass(device, of, rows, parameters, tf32);
    pass.forward(Pass<T>::memory(readout));

    Stack stack = stack_of_classifier(of.model, classifier_widths);
    const Fit fit = fit_of<T>("classifier_widths", stack, device, classifier_tile);
    const dim3 grid = blocks_for("ptr", of.graphs, stack.tile);
    const int64_t blocks = grid.x;
    Tensor partial = device.bytes_for<T>(blocks * stack.gradient_size), losses = device.bytes_for<double>(blocks);
    Tensor tiles = device.bytes_for<T>(fit.tile ? 0 : blocks * stack.tile_size);
    Tensor weights = device.bytes_for<T>(fit.weights ? 0 : stack.weights_size);
    const T* flat = parameters.const_data_ptr<T>();
    double* loss_of_block = static_cast<double*>(losses.mutable_data_ptr());
    if (!fit.weights) device.launch(&pack_kernel<T>, dim3(1), pack_threads, 0, stack, flat, Pass<T>::memory(weights));
    Tensor total = device.bytes_for<double>(1);
    double* total_weight = static_cast<double*>(total.mutable_data_ptr());
    const T* of_class = class_weight ? class_weight->const_data_ptr<T>() : nullptr;
    if (of_class)
      device.launch(&weigh_kernel<T>, dim3(1), warp_size, 0, of_class, stack.out(), y.const_data_ptr<int64_t>(), of.ids,
                    of.graphs, total_weight);
    const auto kernel = fit.weights ? &classifier_kernel<true, T> : &classifier_kernel<false, T>;
    device.launch(kernel, grid, fit.threads, fit.shared_bytes, stack, fit, Pass<T>::memory(tiles),
                  Pass<T>::memory(weights), flat, Pass<T>::memory(readout), y.const_data_ptr<int64_t>(), of_class,
                  static_cast<const double*>(total_weight), of.ids, of.graphs, Pass<T>::memory(grad),
                  Pass<T>::memory(partial), loss_of_block);

    pass.backward(Pass<T>::memory(grad), nullptr);
    device.launch(&reduce_kernel<T>, blocks_for("parameters", parameters.numel(), threads / summands), threads, 0,
                  pass.stack(), num_branches, pass.partial(), pass.blocks(), stack, of.model.parameters(),
                  Pass<T>::memory(partial), blocks, parameters.numel(), gradient.mutable_data_ptr<T>(), loss_of_block,
                  loss.mutable_data_ptr<T>());
  });
  return {loss, gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) { m.impl("training_step", TORCH_BOX(&training_step)); }

}  // namespace spin_fast

// training_step on CUDA: the fused branches (branch.cu), then the classifier with the loss and all gradients.
//
// Layout: readouts [graphs, columns], those of the hops beside that of the joint branch, in tiles of graphs that go
// through the classifier's MLP (mlp.h). Parallel axis: a block per tile. Accumulator: T within a tile; the softmax, the
// loss and sums over tiles in float64.

#include <cfloat>
#include <tuple>

#include "branch.h"

namespace spin_fast {
namespace {

constexpr int tile_of_graphs = 16;

// The total class weight of the chosen graphs; one warp.
template <class T>
__global__ void total_weight_kernel(const T* class_weight, int classes, const int64_t* labels, const int64_t* ids,
                                    int64_t graphs, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < graphs; i += warp_size) {
    const int64_t label = labels[ids ? ids[i] : i];
    if (label >= 0 && label < classes) sum += class_weight[label];
  }
  sum = sum_over_lanes(sum);
  if (threadIdx.x == 0) *total = sum > DBL_MIN ? sum : DBL_MIN;  // the loss of graphs that all weigh 0 is 0
}

// The scores and losses of the graphs and their gradients. class_weight: [classes] or null, then without total_weight;
// grad: of the readout; loss: [blocks].
template <bool Shared, class T>
__global__ void classifier_kernel(MlpCall<T> call, const T* readout, const int64_t* labels, const T* class_weight,
                                  const double* total_weight, const int64_t* ids, int64_t graphs, T* grad,
                                  double* loss) {
  const MlpLayout& mlp = call.layout;
  const Memory<T> memory = prepare_memory<Shared>(call);
  const int width = mlp.in(), classes = mlp.out();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * mlp.tile, left = graphs - first;
  const int count = static_cast<int>(left < mlp.tile ? left : mlp.tile), rows = padded_to_side(count);
  T* input = memory.tile + mlp.input;
  copy<T>(
      rows, width, [&](int row, int column) { return readout[(first + min(row, count - 1)) * width + column]; },
      [&](int row, int column, T value) { input[column * mlp.ld + row] = row < count ? value : T(0); });
  __syncthreads();
  forward<Math::exact>(mlp, memory, rows);
  const T* scores = memory.tile + mlp.layers[mlp.depth - 1].activation;
  T* dscores = memory.tile + mlp.spare[0];
  T* losses = memory.tile + mlp.per_row;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    if (row >= count) {
      for (int c = 0; c < classes; ++c) dscores[c * mlp.ld + row] = 0;
      continue;
    }
    const int64_t graph = first + row, label = labels[ids ? ids[graph] : graph];
    double top = scores[row], total = 0;
    for (int c = 1; c < classes; ++c) top = scores[c * mlp.ld + row] > top ? scores[c * mlp.ld + row] : top;
    for (int c = 0; c < classes; ++c) total += exp(scores[c * mlp.ld + row] - top);
    const bool known = label >= 0 && label < classes;  // contents are not checked on a GPU: a wrong label gives NaN
    const double weight = !known         ? static_cast<double>(NAN)
                          : class_weight ? class_weight[label] / *total_weight
                                         : 1.0 / static_cast<double>(graphs);
    for (int c = 0; c < classes; ++c)
      dscores[c * mlp.ld + row] = static_cast<T>((exp(scores[c * mlp.ld + row] - top) / total - (c == label)) * weight);
    losses[row] =
        static_cast<T>(known ? (log(total) + top - scores[label * mlp.ld + row]) * weight : static_cast<double>(NAN));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int row = 0; row < count; ++row) sum += losses[row];
    loss[blockIdx.x] = sum;
  }
  backward<Math::exact>(mlp, memory, rows, [&](int row, int column, T value) {
    if (row < count && column < width) grad[(first + row) * width + column] = value;
  });
  store_gradient(call, memory);
}

std::tuple<Tensor, Tensor> training_step(const Tensor& rows, OptionalTensor crow_indices, OptionalTensor col_indices,
                                         int64_t num_features, const Tensor& parameters, const Tensor& labels,
                                         OptionalTensor class_weight, OptionalTensor ptr, OptionalTensor index,
                                         OptionalTensor count, OptionalTensor parts, OptionalTensor joint_ptr,
                                         OptionalTensor joint_index, OptionalTensor joint_count, OptionalTensor ids,
                                         int64_t num_branches, std::vector<int64_t> widths,
                                         std::vector<int64_t> classifier_widths, bool attention, double negative_slope,
                                         bool tf32, bool) {
  const StepArguments step = step_arguments(rows, crow_indices, col_indices, num_features, parameters, ptr, index,
                                            count, parts, joint_ptr, joint_index, joint_count, ids, num_branches,
                                            widths, classifier_widths, attention, negative_slope, false);
  const Arguments& of = step.any();
  const ScalarType value = rows.scalar_type();
  expect("labels", labels, {of.seg.graphs}, {ScalarType::Long});
  if (class_weight) expect("class_weight", *class_weight, {classifier_widths.back()}, {value});
  const Device device(rows, {{"labels", labels},
                             {"class_weight", class_weight},
                             {"parameters", parameters},
                             {"ptr", ptr},
                             {"index", index},
                             {"count", count},
                             {"parts", parts},
                             {"joint_ptr", joint_ptr},
                             {"joint_index", joint_index},
                             {"joint_count", joint_count},
                             {"ids", ids}});
  Tensor loss = device.empty({}, value), gradient = device.empty({parameters.numel()}, value);
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    const int64_t columns = step.readout_width(), hops_columns = step.hops ? step.hops->model.readout_width() : 0;
    const Buffer<T> readout(device, of.graphs * columns), grad(device, of.graphs * columns);
    std::optional<FusedBranches<T>> hops, joint;
    if (step.hops) hops.emplace(device, *step.hops, rows, parameters, 0, tf32).forward(readout, columns);
    if (step.joint)
      joint.emplace(device, *step.joint, rows, parameters, step.hops ? step.hops->model.parameters() : 0, tf32)
          .forward(readout + hops_columns, columns);

    MlpLayout layers = layers_of("classifier_widths", columns, classifier_widths, negative_slope, 1, step.parameters(),
                                 true);  // as torch.nn.Linear stores them
    layers.layers[layers.depth - 1].slope = 1;
    layers.with_gradient = layers.with_input_gradient = true;
    MlpLaunch<T> classifier(device, "classifier_widths", layers, 1, parameters.const_data_ptr<T>(), tile_of_graphs);
    const MlpLayout& mlp = classifier.layout;
    const dim3 grid = blocks_for("ptr", of.graphs, mlp.tile);
    const Buffer<double> losses(device, grid.x), total_weight(device, class_weight ? 1 : 0);
    MlpCalls<T> calls = {};
    calls.classifier = classifier.call(grid.x);
    const T* const weight_of_class = data<T>(class_weight);
    const int64_t* const label = labels.const_data_ptr<int64_t>();
    if (class_weight)
      device.launch(&total_weight_kernel<T>, dim3(1), warp_size, 0, weight_of_class, mlp.out(), label, of.ids,
                    of.graphs, total_weight);
    device.launch(mlp.shared_weights ? &classifier_kernel<true, T> : &classifier_kernel<false, T>, grid, mlp.threads,
                  mlp.shared_bytes, calls.classifier, readout, label, weight_of_class, total_weight, of.ids, of.graphs,
                  grad, losses);

    if (hops) calls.hops = hops->backward(grad, nullptr);
    if (joint) calls.joint = joint->backward(grad + hops_columns, nullptr);
    reduce_gradients(device, calls, parameters.numel(), gradient.mutable_data_ptr<T>(), losses,
                     loss.mutable_data_ptr<T>());
  });
  return {loss, gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) { m.impl("training_step", TORCH_BOX(&training_step)); }

}  // namespace spin_fast

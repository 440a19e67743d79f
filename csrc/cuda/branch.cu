// The ops branch_readout and its gradient on CUDA.

#include <tuple>

#include "branch.h"
#include "transpose.h"

namespace spin_fast {
namespace {

// Rows of the gradient, each the sum of those of its entries (or of the positions of a graph in ids), in their order.
template <class T>
__global__ void gather_kernel(const int64_t* offsets, Integers entries, const T* from, int64_t rows, int64_t width,
                              T* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * width) return;
  const int64_t row = i / width, column = i % width;
  double sum = 0;
  for (int64_t e = offsets[row]; e < offsets[row + 1]; ++e) sum += from[entries[e] * width + column];
  to[i] = static_cast<T>(sum);
}

Tensor branch_readout(const Tensor& rows, const Tensor& parameters, const Tensor& ptr, OptionalTensor index,
                      OptionalTensor count, OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                      bool attention, double negative_slope, bool tf32, bool shared, bool) {
  const Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                       negative_slope, shared, false, 0);
  const Device device(rows,
                      {{"parameters", parameters}, {"ptr", ptr}, {"index", index}, {"count", count}, {"ids", ids}});
  Tensor readout = device.empty({of.graphs, of.model.readout_width()}, rows.scalar_type());
  dispatch_compute(rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Pass<T>(device, of, rows, parameters, tf32).forward(readout.mutable_data_ptr<T>());
  });
  return readout;
}

std::tuple<Tensor, Tensor> branch_readout_backward(const Tensor& grad, const Tensor& rows, const Tensor& parameters,
                                                   const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                                                   OptionalTensor ids, int64_t num_branches,
                                                   std::vector<int64_t> widths, bool attention, double negative_slope,
                                                   bool tf32, bool shared, bool, bool with_rows) {
  Arguments of = model_arguments(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                 negative_slope, shared, false, 0);
  const ScalarType value = rows.scalar_type();
  const int64_t width = of.model.readout_width(), features = rows.size(1);
  expect("grad", grad, {of.graphs, width}, {value});
  const Device device(
      rows,
      {{"grad", grad}, {"parameters", parameters}, {"ptr", ptr}, {"index", index}, {"count", count}, {"ids", ids}});
  Tensor gradient = device.empty({parameters.numel()}, value);
  Tensor drows = device.empty({with_rows ? rows.size(0) : 0, features}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto gather = [&](const Transposed& by, const T* from, int64_t to_rows, int64_t columns, T* to) {
      device.launch(&gather_kernel<T>, blocks_for("rows", to_rows * columns, threads), threads, 0,
                    by.offsets.template const_data_ptr<int64_t>(), integers_of(by.entries), from, to_rows, columns, to);
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
    Pass<T> pass(device, of, rows, parameters, tf32);
    pass.forward(Pass<T>::memory(readout));
    pass.backward(grads.const_data_ptr<T>(), with_rows && index ? dentries.mutable_data_ptr<T>() : to_rows);
    const double* no_losses = nullptr;
    T* no_loss = nullptr;
    device.launch(&reduce_kernel<T>, blocks_for("parameters", parameters.numel(), threads / summands), threads, 0,
                  pass.stack(), num_branches, pass.partial(), pass.blocks(), pass.stack(), parameters.numel(),
                  pass.partial(), int64_t{0}, parameters.numel(), gradient.mutable_data_ptr<T>(), no_losses, no_loss);
    if (with_rows && index) {
      const Transposed entries =
          transposed(device, index->scalar_type(), index->const_data_ptr(), of.seg.entries, rows.size(0));
      gather(entries, dentries.const_data_ptr<T>(), rows.size(0), features, to_rows);
    }
  });
  return {gradient, drows};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) {
  m.impl("branch_readout", TORCH_BOX(&branch_readout));
  m.impl("branch_readout_backward", TORCH_BOX(&branch_readout_backward));
}

}  // namespace spin_fast

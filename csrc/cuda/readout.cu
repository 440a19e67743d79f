// sum_readout and attention_readout with their gradients on CUDA.
//
// For now: one warp per segment, lanes over columns.

#include "../segments.h"
#include "device.h"
#include "ops.h"

namespace spin_fast {
namespace {

__host__ __device__ inline int64_t entry_of(const Segments& seg, int64_t branch, int64_t graph) {
  return seg.ptr[branch * seg.ptr_stride + graph] + branch * seg.entry_stride;
}

template <class S>
__global__ void sum_kernel(Segments seg, const S* z, S* readout) {
  const int64_t s = static_cast<int64_t>(blockIdx.x) * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  if (s >= seg.branches * seg.graphs) return;
  const int64_t branch = s / seg.graphs, graph = s % seg.graphs;
  for (int64_t j = threadIdx.x % warp_size; j < seg.width; j += warp_size) {
    double sum = 0;
    for (int64_t e = entry_of(seg, branch, graph); e < entry_of(seg, branch, graph + 1); ++e) {
      const int64_t row = seg.narrow_index ? seg.narrow_index[e] : seg.wide_index ? seg.wide_index[e] : e;
      sum += (seg.count ? seg.count[e] : 1) * static_cast<double>(widened(z[row * seg.width + j]));
    }
    readout[(graph * seg.branches + branch) * seg.width + j] = Narrowed<S>::of(static_cast<Compute<S>>(sum));
  }
}

Tensor sum_readout(const Tensor& z, const Tensor& ptr, OptionalTensor index, OptionalTensor count, int64_t num_branches,
                   bool shared, bool checked) {
  const ScalarType value = z.scalar_type();
  const Form form = form_of(rows_of(z), z.size(-1), ptr, index, count, num_branches, shared, true);
  const Device device(z);
  Tensor readout = device.empty({form.graphs, form.branches * form.width}, value);
  const Segments seg = segments_of(form, ptr, index, count, shared);
  dispatch_storage(value, [&](auto tag) {
    using S = typename decltype(tag)::type;
    device.launch(&sum_kernel<S>, blocks_for(form.branches * form.graphs, 4), 128, 0, seg, stored<S>(z),
                  static_cast<S*>(readout.mutable_data_ptr()));
  });
  return readout;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, SPIN_FAST_DEVICE, m) { m.impl("sum_readout", TORCH_BOX(&sum_readout)); }

}  // namespace spin_fast

// The kernels of one instruction set; included inside its namespace, after its target pragma, `vector_bytes`, the size
// of its registers, and `bypass`, an aligned store around the caches that is done after `settle`.

#include "lanes.inl"
#include "power.inl"
#include "readout.inl"

template <class T, class I>
Kernels<T, I> table() {
  return {hop<T, I>};
}

template Kernels<float, int32_t> table();
template Kernels<float, int64_t> table();
template Kernels<double, int32_t> table();
template Kernels<double, int64_t> table();

template <class S, class I>
ReadoutKernels<S, I> readout_table() {
  return {sum_readout<S, I>,  attention_readout<S, I>,  attention_weights<Compute<S>, I>,
          sum_backward<S, I>, attention_backward<S, I>, rows_backward<S>};
}

template ReadoutKernels<float, int32_t> readout_table();
template ReadoutKernels<float, int64_t> readout_table();
template ReadoutKernels<double, int32_t> readout_table();
template ReadoutKernels<double, int64_t> readout_table();
template ReadoutKernels<BFloat16, int32_t> readout_table();
template ReadoutKernels<BFloat16, int64_t> readout_table();
template ReadoutKernels<Half, int32_t> readout_table();
template ReadoutKernels<Half, int64_t> readout_table();

// The kernels of one instruction set; included inside its namespace, after its target pragma, `vector_bytes`, the size
// of its registers, and `bypass`, an aligned store around the caches that is done after `settle`.

#include "lanes.inl"
// What follows is written in those.
#include "hop.inl"
#include "power.inl"
#include "readout.inl"

template <class T, class I>
PowerKernels<T, I> power_table() {
  using A = Compute<T>;
  return {hop<A, I>, powers_of_graphs<T, I, A>, powers_of_graphs<T, I, double>, convert_rows<T, A>, convert_rows<A, T>};
}

template PowerKernels<float, int32_t> power_table();
template PowerKernels<float, int64_t> power_table();
template PowerKernels<double, int32_t> power_table();
template PowerKernels<double, int64_t> power_table();
template PowerKernels<Half, int32_t> power_table();
template PowerKernels<Half, int64_t> power_table();
template PowerKernels<BFloat16, int32_t> power_table();
template PowerKernels<BFloat16, int64_t> power_table();

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

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

template <class S>
ReadoutKernels<S> readout_table() {
  return {sum_readout<S>,  attention_readout<S>,  attention_weights<Compute<S>>,
          sum_backward<S>, attention_backward<S>, rows_backward<S>};
}

template ReadoutKernels<float> readout_table();
template ReadoutKernels<double> readout_table();
template ReadoutKernels<BFloat16> readout_table();
template ReadoutKernels<Half> readout_table();

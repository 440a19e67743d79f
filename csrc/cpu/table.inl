// The kernels of one instruction set; included inside its namespace, after its target pragma and `vector_bytes`, the
// size of its registers.

#include "memory.inl"
// What follows needs it.
#include "hop.inl"
#include "power.inl"
#include "readout.inl"

template <class T, class I>
PowerKernels<T, I> power_table() {
  using A = accumulator<T>;
  return {hop<A, I>, powers_of_graphs<T, I, A>, powers_of_graphs<T, I, double>, widen<T, A>, narrow<T, A>};
}

template PowerKernels<float, int32_t> power_table();
template PowerKernels<float, int64_t> power_table();
template PowerKernels<double, int32_t> power_table();
template PowerKernels<double, int64_t> power_table();
template PowerKernels<Half, int32_t> power_table();
template PowerKernels<Half, int64_t> power_table();
template PowerKernels<BFloat16, int32_t> power_table();
template PowerKernels<BFloat16, int64_t> power_table();

template <class T, class I>
Kernels<T, I> table() {
  return {sum_readout<T, I>, attention_readout<T, I>, attention_backward<T, I>, rows_backward<T>};
}

template Kernels<float, int32_t> table();
template Kernels<float, int64_t> table();
template Kernels<double, int32_t> table();
template Kernels<double, int64_t> table();

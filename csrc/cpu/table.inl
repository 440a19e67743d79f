// The kernels of one instruction set; included inside its namespace, after its target pragma and `vector_bytes`, the
// size of its registers.

#include "power.inl"
#include "readout.inl"

template <class T, class I>
Kernels<T, I> table() {
  return {hop<T, I>, sum_readout<T, I>, attention_readout<T, I>, attention_backward<T, I>, rows_backward<T>};
}

template Kernels<float, int32_t> table();
template Kernels<float, int64_t> table();
template Kernels<double, int32_t> table();
template Kernels<double, int64_t> table();

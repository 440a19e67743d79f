// The kernels of one instruction set; included inside its namespace, after its target pragma, `vector_bytes`, the size
// of its registers, and `bypass`, an aligned store around the caches that is done after `settle`.

#include "simd.inl"
// These use it.
#include "distinct.inl"
#include "mlp.inl"
#include "readout.inl"
#include "spmm.inl"
// These use those.
#include "branch.inl"
#include "piecewise_linear.inl"
#include "power.inl"
// This uses that.
#include "patterns.inl"

template <class T, class I>
PowerKernels<T, I> power_table() {
  using A = Compute<T>;
  PowerKernels<T, I> table = {};
  table.hop = hop_rows<A, I>;
  table.powers = powers_of_graphs<T, I, A>;
  table.float64_powers = powers_of_graphs<T, I, double>;
  if constexpr (!is_half<T>) {
    table.pattern_rows = pattern_rows<T, I, A>;
    table.float64_pattern_rows = pattern_rows<T, I, double>;
    table.pattern_sources = pattern_sources<T, I, A>;
    table.float64_pattern_sources = pattern_sources<T, I, double>;
    table.near_nodes = near_nodes<A, I>;
  }
  table.widen = convert_rows<T, A>;
  table.narrow = convert_rows<A, T>;
  return table;
}

template <class W, class I>
DistinctKernels<W, I> distinct_table() {
  return {number_rows<W, I>, list_rows<I>, nonzeros<W>};
}

inline PatternKernels pattern_table() { return {pattern_keys, number_patterns}; }

template <class S>
ReadoutKernels<S> readout_table() {
  return {sum_readout<S>,  attention_readout<S>,  attention_weights<Compute<S>>,
          sum_backward<S>, attention_backward<S>, rows_backward<S>};
}

template <class T>
BranchKernels<T> branch_table() {
  return {mlp_forward<T>,
          mlp_backward<T>,
          nonzero_columns<T>,
          narrow_rows<T>,
          branch_forward<T>,
          branch_readout<T>,
          branch_readout_backward<T>,
          branch_backward<T>,
          add_partials<T>,
          find_kinks<T>,
          bend<T>,
          piecewise_linear_readout<T>,
          piecewise_linear_backward<T>,
          bent_backward<T>};
}

#define SPIN_FAST_TABLE(make, ...) \
  template <>                      \
  __VA_ARGS__ table() {            \
    return make();                 \
  }
SPIN_FAST_TABLE((power_table<float, int32_t>), PowerKernels<float, int32_t>)
SPIN_FAST_TABLE((power_table<float, int64_t>), PowerKernels<float, int64_t>)
SPIN_FAST_TABLE((power_table<double, int32_t>), PowerKernels<double, int32_t>)
SPIN_FAST_TABLE((power_table<double, int64_t>), PowerKernels<double, int64_t>)
SPIN_FAST_TABLE((power_table<Half, int32_t>), PowerKernels<Half, int32_t>)
SPIN_FAST_TABLE((power_table<Half, int64_t>), PowerKernels<Half, int64_t>)
SPIN_FAST_TABLE((power_table<BFloat16, int32_t>), PowerKernels<BFloat16, int32_t>)
SPIN_FAST_TABLE((power_table<BFloat16, int64_t>), PowerKernels<BFloat16, int64_t>)
SPIN_FAST_TABLE((distinct_table<uint16_t, int32_t>), DistinctKernels<uint16_t, int32_t>)
SPIN_FAST_TABLE((distinct_table<uint16_t, int64_t>), DistinctKernels<uint16_t, int64_t>)
SPIN_FAST_TABLE((distinct_table<uint32_t, int32_t>), DistinctKernels<uint32_t, int32_t>)
SPIN_FAST_TABLE((distinct_table<uint32_t, int64_t>), DistinctKernels<uint32_t, int64_t>)
SPIN_FAST_TABLE((distinct_table<uint64_t, int32_t>), DistinctKernels<uint64_t, int32_t>)
SPIN_FAST_TABLE((distinct_table<uint64_t, int64_t>), DistinctKernels<uint64_t, int64_t>)
SPIN_FAST_TABLE(pattern_table, PatternKernels)
SPIN_FAST_TABLE(readout_table<float>, ReadoutKernels<float>)
SPIN_FAST_TABLE(readout_table<double>, ReadoutKernels<double>)
SPIN_FAST_TABLE(readout_table<BFloat16>, ReadoutKernels<BFloat16>)
SPIN_FAST_TABLE(readout_table<Half>, ReadoutKernels<Half>)
SPIN_FAST_TABLE(branch_table<float>, BranchKernels<float>)
SPIN_FAST_TABLE(branch_table<double>, BranchKernels<double>)
#undef SPIN_FAST_TABLE

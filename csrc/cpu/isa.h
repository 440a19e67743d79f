// Which instruction set the CPU kernels run on: the best that this CPU has, unless told otherwise.
#pragma once

#include <string>
#include <vector>

#include "../kernels.h"

namespace spin_fast {

enum class Isa { baseline, avx2, avx512 };

Isa current_isa();
std::string isa_name();
std::vector<std::string> available_isas();
// Throws std::invalid_argument for an unknown name and for one that this CPU does not have.
void set_isa(const std::string& name);

template <class T, class I>
PowerKernels<T, I> power_kernels() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512:
      return avx512::power_table<T, I>();
    case Isa::avx2:
      return avx2::power_table<T, I>();
    case Isa::baseline:
      break;
  }
#endif
  return baseline::power_table<T, I>();
}

template <class S>
ReadoutKernels<S> readout_kernels() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512:
      return avx512::readout_table<S>();
    case Isa::avx2:
      return avx2::readout_table<S>();
    case Isa::baseline:
      break;
  }
#endif
  return baseline::readout_table<S>();
}

}  // namespace spin_fast

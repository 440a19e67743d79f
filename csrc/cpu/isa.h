// The instruction set of the CPU kernels: the best that this CPU has, unless another is chosen.
#pragma once

#include <string>
#include <vector>

#include "../kernels.h"

namespace spin_fast {

enum class Isa { baseline, avx2, avx512 };

Isa current_isa();
std::string isa_name();
std::vector<std::string> available_isas();
// Throws std::invalid_argument for an unknown name and for one that this CPU does not have. Not while rows are
// searched: each has hashes of its own.
void set_isa(const std::string& name);

// The kernels for the chosen instruction set.
template <class Kernels>
Kernels isa_kernels() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::avx512:
      return avx512::table<Kernels>();
    case Isa::avx2:
      return avx2::table<Kernels>();
    case Isa::baseline:
      break;
  }
#endif
  return baseline::table<Kernels>();
}

}  // namespace spin_fast

#include "isa.h"

#include <array>
#include <atomic>
#include <stdexcept>

namespace spin_fast {
namespace {

// What the compiler targets by default, then what is chosen at run time.
#if defined(__aarch64__)
constexpr std::array names = {"neon"};
#else
constexpr std::array names = {"baseline", "avx2", "avx512"};
#endif

bool has(Isa level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("aes");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return level == Isa::baseline || (level == Isa::avx2 && avx2) || (level == Isa::avx512 && avx512);
#else
  return level == Isa::baseline;
#endif
}

Isa best() { return has(Isa::avx512) ? Isa::avx512 : has(Isa::avx2) ? Isa::avx2 : Isa::baseline; }

std::atomic<Isa> chosen{best()};

}  // namespace

Isa current_isa() { return chosen.load(std::memory_order_relaxed); }

std::string isa_name() { return names[static_cast<size_t>(current_isa())]; }

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
  for (size_t i = 0; i < names.size(); ++i)
    if (has(static_cast<Isa>(i))) found.emplace_back(names[i]);
  return found;
}

void set_isa(const std::string& name) {
  std::string all;
  for (size_t i = 0; i < names.size(); ++i) {
    all += std::string(i == 0 ? "" : ", ") + names[i];
    if (name != names[i]) continue;
    if (!has(static_cast<Isa>(i))) throw std::invalid_argument("this CPU does not have " + name);
    chosen.store(static_cast<Isa>(i));
    return;
  }
  throw std::invalid_argument("must be one of " + all + ", got '" + name + "'");
}

}  // namespace spin_fast

// Whether training steps are made by one thread or by all; no torch header.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace spin_fast {

// Whether one thread makes steps faster than all do: cores that share no cache take a while to hand memory over. The
// other way is tried now and then, which costs about a hundredth of the time.
class Pace {
 public:
  // Steps of other sizes begin anew.
  void begin(int64_t parameters, int64_t batch_size, int64_t threads) {
    if (const std::array of = {parameters, batch_size, threads}; of != of_) *this = Pace(), of_ = of;
  }

  bool is_alone() const { return alone_ != trying_; }
  // Steps to make before asking again.
  int64_t steps() const { return (trying_ ? tried : usual) - static_cast<int64_t>(seconds_.size()); }

  void add(double seconds) {
    seconds_.push_back(seconds);
    if (steps() > 0) return;
    const auto middle = seconds_.begin() + seconds_.size() / 2;  // a pause of the system does not count
    std::nth_element(seconds_.begin(), middle, seconds_.end());
    const double now = *middle, before = std::exchange(step_, now);
    if (trying_) {
      if (now < before)
        alone_ = !alone_;
      else
        step_ = before;
      wait_ = std::max(least_wait, 100 * tried * std::abs(now - before));
    } else {
      wait_ -= std::accumulate(seconds_.begin(), seconds_.end(), 0.0);
    }
    trying_ = !trying_ && wait_ <= 0 && (alone_ || step_ < most_seconds);
    seconds_.clear();
  }

 private:
  static constexpr int64_t usual = 15, tried = 5;  // steps
  static constexpr double least_wait = 0.25;       // seconds
  static constexpr double most_seconds = 2e-3;     // of a step: in longer ones handing over is no matter

  std::array<int64_t, 3> of_ = {};
  bool alone_ = false, trying_ = false;
  double step_ = 0, wait_ = least_wait;  // seconds of a step, and until the other way is tried
  std::vector<double> seconds_;
};

}  // namespace spin_fast

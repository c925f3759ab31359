#pragma once

#include <algorithm>
#include <cstdint>

namespace oomb::paging {

// How long a batch of loads takes once nothing holds it up, as latency + slots / bandwidth: the
// line that fits the latest batches best, older ones fading.
class LoadPace {
 public:
  void add(int64_t slots, double seconds) {
    constexpr double kKeep = 1 - 1.0 / 32;
    const auto n = static_cast<double>(slots);
    batches_ = kKeep * batches_ + 1;
    n_ = kKeep * n_ + n;
    t_ = kKeep * t_ + seconds;
    nn_ = kKeep * nn_ + n * n;
    nt_ = kKeep * nt_ + n * seconds;
  }

  bool known() const { return batches_ > 4 && t_ > 0; }
  double batch_seconds() const { return t_ / batches_; }  // as batches have been
  // Of one more slot in a batch. Batches of one size do not tell it from their latency.
  double slot_seconds() const {
    const double spread = batches_ * nn_ - n_ * n_;
    const double slope = batches_ * nt_ - n_ * t_;
    return spread > 1e-3 * n_ * n_ && slope > 0 ? std::min(slope / spread, t_ / n_) : t_ / n_;
  }

 private:
  double batches_ = 0;
  double n_ = 0, t_ = 0, nn_ = 0, nt_ = 0;  // sums of slots, seconds and their products
};

}  // namespace oomb::paging

#include "paging/prefetch_window.h"

#include <algorithm>

namespace oomb::paging {

namespace {

// Before anything is known: what the sweep of a layer reads at long contexts.
constexpr int64_t kMostBytes = int64_t{1} << 30;

// The host runs ahead in bursts, a chunk at most: the mean is over about as many visits.
constexpr double kFade = 1.0 / 64;
constexpr double kKnown = 16;
constexpr double kLongest = 1.5;  // times the mean: a visit of the backward pass

}  // namespace

PrefetchWindow::PrefetchWindow(int64_t device_slots, int64_t slot_bytes, int64_t smallest,
                               int64_t usual_bytes) {
  if (device_slots < 3 * smallest) return;
  least_ = smallest;
  slots_ = std::max(std::min(device_slots / (usual_bytes > int64_t{512} << 20 ? 2 : 8), usual_bytes / slot_bytes), least_);
  most_ = std::max(std::min(device_slots / 4, kMostBytes / slot_bytes), slots_);
}

void PrefetchWindow::advance(int32_t visits, double now, const LoadPace& pace) {
  if (then_ >= 0) {
    visits_ += visits - kFade * visits_;
    seconds_ += now - then_ - kFade * seconds_;
  }
  then_ = now;
  if (most_ == 0 || visits_ < kKnown || !pace.known()) return;
  const double visit = kLongest * seconds_ / visits_;
  const double enough = (pace.batch_seconds() + visit) / pace.slot_seconds();
  slots_ = static_cast<int64_t>(
      std::clamp(enough, static_cast<double>(least_), static_cast<double>(most_)));
}

}  // namespace oomb::paging

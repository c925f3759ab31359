#pragma once

#include <cstdint>

#include "paging/copy_engine.h"

namespace oomb::paging {

// How many slots of pages are loaded ahead of their use. Enough is what the link moves while one
// batch is on its way and compute is busy with one visit:
//
//     load     [ batch ][ batch ][ ...  needed by visit v + 1 ]
//     compute  | arrives|     visit v                          | visit v + 1
//
// More would take room from pages that stay. It is a fixed number until advance() tells both times
// as the call goes on; results never depend on it, since a wave may end anywhere.
class PrefetchWindow {
 public:
  PrefetchWindow() = default;
  // `smallest`: the slots of one wave that must not be parted.
  PrefetchWindow(int64_t device_slots, int64_t slot_bytes, int64_t smallest,
                 int64_t usual_bytes = int64_t{512} << 20);

  // 0: the tier is too small for anything but page by page.
  int64_t slots() const { return slots_; }

  // Compute has gone on by so many visits, at this time on the engine's clock.
  void advance(int32_t visits, double now, const LoadPace& pace);

 private:
  int64_t slots_ = 0;
  int64_t least_ = 0;
  int64_t most_ = 0;
  double visits_ = 0;  // the latest ones, older ones fading
  double seconds_ = 0;
  double then_ = -1;
};

}  // namespace oomb::paging

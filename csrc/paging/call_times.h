#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "paging/lane.h"

namespace oomb::paging {

// How long copies took in a call, and how long compute stood still for them: for the load of a
// page, or the store of one whose slot it was going to write.
//
// Waits count under the visit that was under way when they were issued. They are over long after
// that, so whoever measures one takes a label along.
class CallTimes {
 public:
  using Label = int64_t;

  // Forgets everything; the next call has so many visits.
  void begin(int32_t visits) {
    visit_ = 0;
    total_ = 0;
    copying_ = {};
    for (std::vector<double>* waits : {&for_loads_, &for_stores_}) {
      waits->assign(static_cast<size_t>(visits), 0);
    }
  }
  void enter(int32_t visit) { visit_ = visit; }

  Label label(Lane awaited) const { return 2 * visit_ + (awaited == Lane::kStore ? 1 : 0); }
  void add_wait(Label label, double seconds) {
    total_ += seconds;
    std::vector<double>& waits = label % 2 == 1 ? for_stores_ : for_loads_;
    const auto visit = static_cast<size_t>(label / 2);
    if (visit < waits.size()) waits[visit] += seconds;
  }
  void add_copy(Lane lane, double seconds) { copying_[static_cast<size_t>(lane)] += seconds; }

  // Per visit, in seconds.
  std::span<const double> waits_for_loads() const { return for_loads_; }
  std::span<const double> waits_for_stores() const { return for_stores_; }
  double waits() const { return total_; }
  // What a lane's copies took, without what they had to wait for.
  double copying(Lane lane) const { return copying_[static_cast<size_t>(lane)]; }

 private:
  int64_t visit_ = 0;
  double total_ = 0;
  std::vector<double> for_loads_, for_stores_;
  std::array<double, kNumLanes> copying_ = {};
};

}  // namespace oomb::paging

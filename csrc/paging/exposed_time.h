#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "paging/lane.h"

namespace oomb::paging {

// Time that compute stood still for pages, by the visit in which it did and what it waited for: the
// load of a page, or the store of one whose slot it is going to write.
//
// A wait is over long after it was issued, so that whoever measures it takes a label along.
class ExposedTime {
 public:
  using Label = int64_t;

  // Of a call with so many visits.
  void begin(int32_t visits) {
    now_ = 0;
    for (std::vector<double>* seconds : {&loads_, &stores_}) {
      seconds->assign(static_cast<size_t>(visits) + 1, 0);
    }
  }
  // The visit under way; -1: before the first.
  void enter(int32_t visit) { now_ = visit + 1; }

  Label label(Lane awaited) const { return 2 * now_ + (awaited == Lane::kStore ? 1 : 0); }
  void add(Label label, double seconds) {
    std::vector<double>& of = label % 2 == 1 ? stores_ : loads_;
    const auto visit = static_cast<size_t>(label / 2);
    if (visit < of.size()) of[visit] += seconds;  // else: of a call that failed
  }

  // Entry v + 1 is visit v; what comes before the first visit is in entry 0.
  std::span<const double> of_loads() const { return loads_; }
  std::span<const double> of_stores() const { return stores_; }
  double total() const {
    return std::accumulate(stores_.begin(), stores_.end(),
                           std::accumulate(loads_.begin(), loads_.end(), 0.0));
  }

 private:
  int64_t now_ = 0;
  std::vector<double> loads_ = {0.0};
  std::vector<double> stores_ = {0.0};
};

}  // namespace oomb::paging

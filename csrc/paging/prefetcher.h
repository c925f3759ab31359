#pragma once

#include <cstdint>
#include <vector>

#include "paging/page_space.h"
#include "paging/schedule.h"
#include "paging/tiers.h"

namespace oomb::paging {

// Loads what comes next in the access order, as long as that costs no page that is needed earlier.
// What does not fit the device tier streams through two buffers inside the pool: a wave brings at
// most window() slots of pages that were not resident, and as much is loaded ahead while its
// kernels run.
//     |  pages that stay             | this wave's | next wave's |
class Prefetcher {
 public:
  explicit Prefetcher(Tiers& tiers) : tiers_(tiers) {}

  // `exact`: visits read all of their ranges; otherwise only those with a list are worth a copy.
  // `smallest`: the slots of one wave that must not be parted.
  void begin(const PageSpace& space, const Schedule& schedule, int64_t smallest, bool exact);

  // How many slots are loaded ahead of their use, at most; 0: the tier is too small for anything
  // but page by page. More would take room from pages that stay.
  int64_t window() const { return window_; }

  // Compute is at page `page` of visit `now`: goes on behind it.
  void run(int32_t now, int64_t page);

 private:
  bool load_visit();

  Tiers& tiers_;
  const PageSpace* space_ = nullptr;
  const Schedule* schedule_ = nullptr;
  int64_t window_ = 0;
  bool exact_ = true;
  int32_t visit_ = 0;  // where loading goes on: visit and logical page
  int64_t page_ = 0;
  std::vector<PageIndex> missing_;
};

}  // namespace oomb::paging

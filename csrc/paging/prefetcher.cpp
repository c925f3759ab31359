#include "paging/prefetcher.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace oomb::paging {

void Prefetcher::begin(const PageSpace& space, const Schedule& schedule, PrefetchWindow window,
                       bool exact, int32_t visits_ahead) {
  visits_ahead_ = visits_ahead;
  space_ = &space;
  schedule_ = &schedule;
  window_ = window;
  exact_ = exact;
  visit_ = 0;
  page_ = 0;
}

void Prefetcher::run(int32_t now, int64_t page) {
  if (std::pair(visit_, page_) < std::pair(now, page)) {
    visit_ = now;
    page_ = page;
  }
  const int32_t last = std::min(schedule_->size() - 1, now + visits_ahead_);
  try {
    while (visit_ <= last && load_visit()) {
      ++visit_;
      page_ = 0;
    }
  } catch (const OutOfMemory&) {
    // A tier could not grow. What was acquired stands; the next acquire that needs room will say
    // so.
  }
}

// Goes on with the visit at the cursor. False when it must stop before the visit's end.
bool Prefetcher::load_visit() {
  const Visit& visit = (*schedule_)[visit_];
  if (!exact_ && !schedule_->has_pages(visit_)) return true;  // a guess is not worth a copy
  missing_.clear();
  const int64_t budget = window_.slots() - tiers_.ahead_slots();
  int64_t slots = 0;
  const auto consider = [&](PageKind kind, int64_t position) {
    const PageIndex index = space_->index(kind, visit.layer, position);
    if (!visit.touches(kind) || tiers_[index].state != Residency::kHostOnly) return true;
    const int64_t with = slots + tiers_.slots_of(index);
    if (with > budget) {
      page_ = space_->page(index);
      return false;
    }
    slots = with;
    missing_.push_back(index);
    return true;
  };
  const int64_t first = std::max<int64_t>(visit.first, page_);
  const bool whole = schedule_->for_each_position(visit_, first, visit.last, [&](int64_t position) {
    return consider(PageKind::kKeyValue, position) && consider(PageKind::kGradient, position);
  });
  const int64_t room = slots == 0 ? 0 : tiers_.make_up_to(slots, visit_, tiers_.used_before_);
  bool all = true;
  while (slots > room) {
    page_ = space_->page(missing_.back());
    slots -= tiers_.slots_of(missing_.back());
    missing_.pop_back();
    all = false;
  }
  tiers_.load(missing_, visit_ - 1, true);
  return whole && all;
}

}  // namespace oomb::paging

#include "paging/prefetcher.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace oomb::paging {

namespace {

// What the sweep of a layer reads at long contexts.
constexpr int64_t kWindowBytes = int64_t{512} << 20;
constexpr int32_t kVisitsAhead = 4;

int64_t window_of(int64_t device_slots, int64_t slot_bytes, int64_t smallest) {
  if (device_slots < 3 * smallest) return 0;
  return std::max(std::min(device_slots / 8, kWindowBytes / slot_bytes), smallest);
}

}  // namespace

void Prefetcher::begin(const PageSpace& space, const Schedule& schedule, int64_t smallest,
                       bool exact) {
  space_ = &space;
  schedule_ = &schedule;
  window_ = window_of(tiers_.max_slots(), tiers_.slot_bytes(), smallest);
  exact_ = exact;
  visit_ = 0;
  page_ = 0;
}

void Prefetcher::run(int32_t now, int64_t page) {
  if (std::pair(visit_, page_) < std::pair(now, page)) {
    visit_ = now;
    page_ = page;
  }
  const int32_t last = std::min(schedule_->size() - 1, now + kVisitsAhead);
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
  if (!exact_ && !schedule_->is_exact(visit_)) return true;  // a guess is not worth a copy
  missing_.clear();
  const int64_t budget = window_ - tiers_.ahead_slots();
  int64_t slots = 0;
  const auto consider = [&](PageKind kind, int64_t position) {
    const PageIndex index = space_->index(kind, visit.layer, position);
    if (!visit.touches(kind) || tiers_[index].state != Residency::kHostOnly) return true;
    if (slots + tiers_.slots_of(index) > budget) {
      page_ = space_->page(index);
      return false;
    }
    slots += tiers_.slots_of(index);
    missing_.push_back(index);
    return true;
  };
  const int64_t first = std::max<int64_t>(visit.first, page_);
  bool whole = schedule_->for_each_position(visit_, first, visit.last, [&](int64_t position) {
    return consider(PageKind::kKeyValue, position) && consider(PageKind::kGradient, position) &&
           consider(PageKind::kOutput, position);
  });
  const int64_t room = tiers_.make_room_ahead(slots, visit_);
  for (; slots > room; missing_.pop_back()) {
    slots -= tiers_.slots_of(missing_.back());
    page_ = space_->page(missing_.back());
    whole = false;
  }
  tiers_.load(missing_, visit_ - 1, true);
  return whole;
}

}  // namespace oomb::paging

// Visits: pages come before the kernels that read them, wave by wave, and what comes next is loaded
// meanwhile.

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "paging/page_manager.h"

namespace oomb::paging {

using Growth = memory::SlotPool::Growth;

// Pages of the visit within [begin, end), KV and gradient, by page. A visit asks for its waves,
// then acquires and releases each: its pages are looked up once, and held until they may be others.
std::span<const PageIndex> PageManager::gathered(int32_t visit, int64_t begin, int64_t end) {
  check_visit(visit);
  const Visit& what = schedule_[visit];
  const bool output = what.kind == VisitKind::kReadOutput;
  if (output) {
    check_outputs(what.layer, begin, end, 0);
  } else {
    check_range(what.layer, begin, end);
  }
  if (visit != held_.visit || begin < held_.begin || end > held_.end) {
    ++gathers_;
    held_ = {visit, begin, end, std::move(held_.pages)};
    held_.pages.clear();
    schedule_.for_each_position(visit, begin, end, [&](int64_t position) {
      if (what.touches(PageKind::kKeyValue)) {
        held_.pages.push_back(space_.index(PageKind::kKeyValue, what.layer, position));
      }
      if (what.touches(PageKind::kGradient)) {
        const PageIndex index = space_.index(PageKind::kGradient, what.layer, position);
        if (tiers_[index].wanted) held_.pages.push_back(index);
      }
      if (output) held_.pages.push_back(space_.index(PageKind::kOutput, what.layer, position));
    });
  }
  const auto earlier = [this](PageIndex index, int64_t page) { return space_.page(index) < page; };
  const auto first = std::lower_bound(held_.pages.begin(), held_.pages.end(), begin, earlier);
  return {first, std::lower_bound(first, held_.pages.end(), end, earlier)};
}

// Pages may have been dropped since they were acquired, which gives them back.
bool PageManager::holds_pages(int32_t visit) {
  if (!acquired_.contains(visit)) return false;
  const std::span<const PageIndex> pages =
      gathered(visit, schedule_[visit].first, schedule_[visit].last);
  return std::ranges::any_of(pages, [&](PageIndex index) { return tiers_[index].pins > 0; });
}

int64_t PageManager::slots_not_on_device(std::span<const PageIndex> pages) const {
  int64_t slots = 0;
  for (const PageIndex index : pages) {
    if (!tiers_[index].on_device()) slots += tiers_.slots_of(index);
  }
  return slots;
}

std::vector<std::pair<int64_t, int64_t>> PageManager::waves(int32_t visit) {
  check_visit(visit);
  const int64_t begin = schedule_[visit].first;
  const int64_t end = schedule_[visit].last;
  const std::span<const PageIndex> pages = gathered(visit, begin, end);
  // A wave must fit what the device gives, not what it was hoped to give.
  tiers_.reserve(slots_not_on_device(pages), Growth::kSteps);
  if (usable_slots() - tiers_.pinned_slots() < smallest_slots_) {
    tiers_.reserve(smallest_slots_, Growth::kMissing);
  }
  const int64_t room = usable_slots() - tiers_.pinned_slots();
  const int64_t limit = std::max(room - prefetcher_.window(), std::min(room, smallest_slots_));
  const int64_t missing_limit = prefetcher_.window() > 0 ? prefetcher_.window() : limit;

  std::vector<std::pair<int64_t, int64_t>> result;
  int64_t first = begin;
  int64_t slots = 0;
  int64_t missing = 0;
  for (size_t i = 0; i < pages.size();) {
    // All of what a wave must not part: the sequences, keys and gradients of wave_pages_ pages.
    const int64_t group = space_.page(pages[i]) / wave_pages_;
    int64_t group_slots = 0;
    int64_t group_missing = 0;
    for (; i < pages.size() && space_.page(pages[i]) / wave_pages_ == group; ++i) {
      group_slots += tiers_.slots_of(pages[i]);
      const PageRecord& record = tiers_[pages[i]];
      if (!record.on_device() || record.ahead) group_missing += tiers_.slots_of(pages[i]);
    }
    if (group_slots > room) throw_out_of_memory(group_slots);
    if (slots > 0 && (slots + group_slots > limit || missing + group_missing > missing_limit)) {
      result.emplace_back(first, group * wave_pages_);
      first = group * wave_pages_;
      slots = missing = 0;
    }
    slots += group_slots;
    missing += group_missing;
  }
  if (first < end) result.emplace_back(first, end);
  return result;
}

bool PageManager::own_alone(int32_t visit, int64_t begin, int64_t end) {
  return std::ranges::any_of(gathered(visit, begin, end), [&](PageIndex index) {
    return tiers_[index].state == Residency::kHostOnly;
  });
}

void PageManager::acquire(int32_t visit, int64_t begin, int64_t end, void* stream) {
  const std::span<const PageIndex> pages = gathered(visit, begin, end);
  use(stream);
  tiers_.poll();
  advance(visit);
  acquire_pages(pages, schedule_[visit].kind == VisitKind::kAccumulate);
  if (!pages.empty()) acquired_[visit] += static_cast<int64_t>(pages.size());
  prefetch(end);
}

// Pins pages, loading what is missing; all of it or nothing.
void PageManager::acquire_pages(std::span<const PageIndex> pages, bool will_write) {
  missing_.clear();
  fresh_.clear();
  int64_t slots = 0;
  int64_t found = 0;
  for (const PageIndex index : pages) {
    const PageRecord& record = tiers_[index];
    if (record.on_device()) {
      ++found;
      continue;
    }
    slots += tiers_.slots_of(index);
    if (record.state == Residency::kHostOnly) {
      missing_.push_back(index);
    } else if (tiers_.is_gradient(index) && will_write) {
      fresh_.push_back(index);
    } else {
      const PageId id = space_.id(index);
      throw Error(concat("page ", id.page, " of layer ", id.layer, ", sequence ", id.sequence,
                         " holds nothing: it was never created, or dropped"));
    }
  }
  const auto writes = [&](PageIndex index) { return will_write && tiers_.is_gradient(index); };
  pinned_.clear();
  const auto pin = [&](PageIndex index) {
    tiers_.pin(index, writes(index));
    pinned_.push_back(index);
  };
  try {
    for (const PageIndex index : pages) {
      if (tiers_[index].on_device()) pin(index);
    }
    const auto bring = [&](std::span<const PageIndex> missing, std::span<const PageIndex> fresh) {
      tiers_.load(missing, now_ - 1, false);
      for (const PageIndex index : missing) pin(index);
      tiers_.create(fresh, true);
      pinned_.insert(pinned_.end(), fresh.begin(), fresh.end());
    };
    if (find_room(slots)) {
      bring(missing_, fresh_);
    } else {
      // Two tiers that are full have pages change places one at a time: the place on the host that
      // one leaves is the next one's.
      for (const PageIndex& index : missing_) {
        require_room(tiers_.slots_of(index));
        bring({&index, 1}, {});
      }
      for (const PageIndex& index : fresh_) {
        require_room(tiers_.slots_of(index));
        bring({}, {&index, 1});
      }
    }
    tiers_.order_compute();
  } catch (...) {
    for (const PageIndex index : pinned_) tiers_.cancel_pin(index, now_ - 1);
    throw;
  }
  hits_ += found;
  misses_ += static_cast<int64_t>(missing_.size());
}

void PageManager::release(int32_t visit, int64_t begin, int64_t end, void* stream) {
  const std::span<const PageIndex> pages = gathered(visit, begin, end);
  for (const PageIndex index : pages) tiers_.require_pinned(index);
  use(stream);
  const Ticket used = engine_->mark_compute();
  const bool accumulated = schedule_[visit].kind == VisitKind::kAccumulate;
  for (const PageIndex index : pages) {
    tiers_.unpin(index, used, accumulated && tiers_.is_gradient(index), visit);
  }
  if (const auto left = acquired_.find(visit); left != acquired_.end()) {
    left->second -= static_cast<int64_t>(pages.size());
    if (left->second <= 0) acquired_.erase(left);
  }
  tiers_.poll();
  store_ahead();
  prefetch(schedule_[visit].first);
}

void PageManager::acquire_gradients(int32_t layer, int64_t begin, int64_t end, void* stream) {
  check_range(layer, begin, end);
  use(stream);
  tiers_.poll();
  // Any page of the range tells the visit; not every sequence has its first one.
  int32_t visit = schedule_.size();
  space_.for_each_position(begin, end, [&](int64_t position) {
    visit = schedule_.next_use(PageKind::kGradient, layer, position, now_ - 1);
    return false;
  });
  if (visit < schedule_.size() && schedule_[visit].kind == VisitKind::kReadGradient) {
    advance(visit);
  }
  own_.clear();
  space_.for_each_position(begin, end, [&](int64_t position) {
    const PageIndex index = space_.index(PageKind::kGradient, layer, position);
    if (tiers_[index].state != Residency::kFree) own_.push_back(index);
  });
  acquire_pages(own_, false);
  prefetch(end);
}

// Time moves on: pages filed under visits that are over get their next use.
void PageManager::advance(int32_t visit) {
  if (visit > now_) {
    now_ = visit;
    tiers_.enter(visit);
    engine_->times().enter(visit);
  }
  for (int32_t past = tiers_.nearest_visit(); past >= 0 && past < now_;
       past = tiers_.nearest_visit()) {
    for (const PageIndex index : tiers_.filed_under(past)) tiers_.requeue(index, now_ - 1);
  }
}

void PageManager::prefetch(int64_t page) {
  if (host_.pool->taken_slots() == 0) return;  // nothing has ever left the device
  prefetcher_.run(now_, page);
}

// The next wave's new pages and the next chunk's should find slots that need no store any more.
void PageManager::store_ahead() {
  if (total_slots_ <= usable_slots()) return;  // nothing will ever have to go
  tiers_.store_ahead(std::min(prefetcher_.window() + create_slots_, usable_slots() / 2));
}

}  // namespace oomb::paging

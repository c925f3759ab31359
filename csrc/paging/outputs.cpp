// Kept outputs: written once, in the fill, read once, in the sweep, then dead.

#include <algorithm>

#include "common/error.h"
#include "common/math.h"
#include "paging/page_manager.h"

namespace oomb::paging {

void PageManager::check_outputs(int32_t layer, int64_t begin, int64_t end, int64_t bytes) const {
  check_call();
  expect(layer >= 0 && layer < space_.num_layers(), "layer",
         concat("0 .. ", space_.num_layers() - 1), layer);
  expect(0 <= begin && begin <= end && end <= space_.outputs(), "outputs",
         concat("a range within 0 .. ", space_.outputs()), concat(begin, " .. ", end));
  const int64_t most = (end - begin) * slot_bytes();
  expect(bytes >= 0 && bytes <= most, "num_bytes", concat("0 .. ", most), bytes);
}

int64_t PageManager::max_outputs() const {
  check_call();
  return std::max<int64_t>(1, usable_slots() - tiers_.pinned_slots());
}

std::vector<memory::Slot> PageManager::slots_of_outputs(int32_t layer, int64_t begin,
                                                        int64_t end) const {
  std::vector<memory::Slot> slots;
  slots.reserve(static_cast<size_t>(end - begin));
  for (int64_t position = begin; position < end; ++position) {
    slots.push_back(tiers_[space_.index(PageKind::kOutput, layer, position)].device[0]);
  }
  return slots;
}

void PageManager::write_output(int32_t layer, int64_t begin, int64_t end, const std::byte* source,
                               int64_t bytes, void* stream) {
  check_outputs(layer, begin, end, bytes);
  use(stream);
  tiers_.poll();
  fresh_.clear();
  for (int64_t position = begin; position < end; ++position) {
    const PageIndex index = space_.index(PageKind::kOutput, layer, position);
    if (tiers_[index].state != Residency::kFree) throw Error("an output was kept twice");
    fresh_.push_back(index);
  }
  require_room(end - begin);
  create_slots_ = std::max(create_slots_, end - begin);
  tiers_.create(fresh_, false);
  tiers_.order_compute();
  const Ticket written = engine_->pack(slots_of_outputs(layer, begin, end), source, bytes);
  for (const PageIndex index : fresh_) tiers_.unpin(index, written, true, now_);
  store_ahead();
}

void PageManager::read_output(int32_t visit, int64_t begin, int64_t end, std::byte* target,
                              int64_t bytes, void* stream) {
  check_visit(visit);
  expect(schedule_[visit].kind == VisitKind::kReadOutput, "visit", "one that reads an output",
         visit);
  const int32_t layer = schedule_[visit].layer;
  check_outputs(layer, begin, end, bytes);
  const Visit& pieces = schedule_[visit];
  expect(pieces.first <= begin && end <= pieces.last, "begin, end",
         concat("a range within ", pieces.first, " .. ", pieces.last), concat(begin, " .. ", end));
  acquire(visit, begin, end, stream);
  engine_->unpack(slots_of_outputs(layer, begin, end), target, bytes);
  release(visit, begin, end, stream);
  for (int64_t position = begin; position < end; ++position) {
    tiers_.drop(space_.index(PageKind::kOutput, layer, position));
  }
}

}  // namespace oomb::paging

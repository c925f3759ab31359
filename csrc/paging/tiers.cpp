#include "paging/tiers.h"

#include <algorithm>
#include <exception>

#include "common/error.h"

namespace oomb::paging {

using memory::kNoSlot;
using memory::Slot;

Tiers::Tiers(memory::SlotPool& device, memory::SlotPool& host, CopyEngine& engine,
             std::optional<Wait> disabled_wait, bool poison)
    : device_(device),
      host_(host),
      engine_(engine),
      ordering_(engine, disabled_wait),
      poison_(poison) {}

void Tiers::begin(const PageSpace& space, const Schedule& schedule, int grad_slots, bool exact) {
  if (is_stuck_) engine_.drain();
  is_stuck_ = false;
  space_ = &space;
  schedule_ = &schedule;
  grad_slots_ = grad_slots;
  exact_ = exact;
  records_.assign(at(space.size()), PageRecord{});
  owner_.assign(at(device_.max_slots()), -1);
  now_ = -1;
  device_use_.assign(at(device_.max_slots()), DeviceSlotUse{});
  host_use_.clear();
  // A scan in ascending order keeps its beginning; of what is guessed the least recently used goes.
  victims_.reset(device_.max_slots(), 2 * (int64_t{schedule.size()} + 1),
                 exact ? VictimQueue::Ties::kNewestFirst : VictimQueue::Ties::kOldestFirst);
  tables_ = BlockTables(space);
  pinned_slots_ = ahead_slots_ = 0;
  traffic_ = {};
  log_.clear();
}

void Tiers::end(bool release_host) {
  std::exception_ptr failure;
  try {
    engine_.drain();
  } catch (...) {
    failure = std::current_exception();
  }
  is_stuck_ = failure != nullptr;
  ordering_.cancel();
  loads_.clear();
  stores_.clear();
  records_.clear();
  device_.reset(!is_stuck_);
  host_.reset(release_host && !is_stuck_);
  space_ = nullptr;
  schedule_ = nullptr;
  pinned_slots_ = ahead_slots_ = 0;
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Tiers::move(PageIndex index, Residency to) {
  Residency& state = records_[at(index)].state;
  if (!is_legal(state, to)) {
    const PageId id = space_->id(index);
    throw Error(concat("illegal transition of page (layer ", id.layer, ", sequence ", id.sequence,
                       ", page ", id.page, ", ", name_of(id.kind), "): ", name_of(state), " to ",
                       name_of(to)));
  }
  log_.add({index, state, to});
  state = to;
}

// --- Pins ---------------------------------------------------------------------------------------

void Tiers::pin(PageIndex index, bool will_write) {
  PageRecord& record = records_[at(index)];
  for (const Slot slot : record.device) {
    if (slot == kNoSlot) continue;
    const DeviceSlotUse& use = device_use_[at(slot)];
    ordering_.need(Wait::kComputeAfterLoad, use.load);
    if (will_write) ordering_.need(Wait::kWriteAfterStore, use.store);
  }
  if (record.state == Residency::kLoading) move(index, Residency::kResident);
  // Its host copy is about to be outdated.
  if (record.state == Residency::kStoring && will_write) move(index, Residency::kResident);
  clear_ahead(index);
  if (record.pins++ == 0) {
    if (victims_.contains(record.device[0])) victims_.remove(record.device[0]);
    pinned_slots_ += slots_of(index);
  }
}

void Tiers::require_pinned(PageIndex index) const {
  if (records_[at(index)].pins > 0) return;
  throw Error("a page was released that had not been acquired");
}

void Tiers::require_unpinned(PageIndex index, int but) const {
  if (records_[at(index)].pins > but) throw Error("a page was dropped while acquired");
}

void Tiers::unpin(PageIndex index, Ticket use, bool written, int32_t now) {
  require_pinned(index);
  PageRecord& record = records_[at(index)];
  for (const Slot slot : record.device) {
    if (slot != kNoSlot) device_use_[at(slot)].use = use;
  }
  if (written && record.state == Residency::kResident) move(index, Residency::kDirty);
  record.used = now;
  cancel_pin(index, now);
}

void Tiers::cancel_pin(PageIndex index, int32_t now) {
  PageRecord& record = records_[at(index)];
  if (--record.pins > 0) return;
  pinned_slots_ -= slots_of(index);
  enqueue(index, now);
}

// --- Slots --------------------------------------------------------------------------------------

// All or nothing: the pool may fail to grow in the middle.
std::vector<Slot> Tiers::take_device_slots(int64_t count) {
  std::vector<Slot> slots;
  slots.reserve(at(count));
  try {
    for (int64_t i = 0; i < count; ++i) {
      const Slot slot = device_.take();
      if (slot == kNoSlot) throw Error("device slots were promised that are not there");
      slots.push_back(slot);
    }
  } catch (...) {
    for (const Slot slot : slots) device_.give_back(slot);
    throw;
  }
  return slots;
}

// For a dirty page. If it has a place there, with what it was before, it gets another one beside
// the pages that go with it, as far as there are free ones: the tier does not grow for that. Nor is
// memory that was refused asked for again for the next page: that may take long.
bool Tiers::take_host_slots(PageIndex index) {
  PageRecord& record = records_[at(index)];
  if (host_.free_slots() < slots_of(index)) {
    if (record.on_host()) return true;
    if (!host_error_.empty()) return false;
  }
  std::array<Slot, 2> slots = {kNoSlot, kNoSlot};
  for (int64_t i = 0; i < slots_of(index); ++i) {
    try {
      slots[at(i)] = host_.take();
    } catch (const OutOfMemory& error) {
      host_error_ = error.what();
    }
    if (slots[at(i)] == kNoSlot) {
      if (i > 0) host_.give_back(slots[0]);
      return false;
    }
  }
  free_host_slots(index);
  record.host = slots;
  if (host_use_.size() < at(host_.mapped_slots())) host_use_.resize(at(host_.mapped_slots()));
  return true;
}

void Tiers::need_for_write(Slot slot) {
  ordering_.need(Wait::kWriteAfterStore, device_use_[at(slot)].store);
  ordering_.need(Wait::kWriteAfterLoad, device_use_[at(slot)].load);
}

void Tiers::free_device_slots(PageIndex index) {
  PageRecord& record = records_[at(index)];
  for (Slot& slot : record.device) {
    if (slot == kNoSlot) continue;
    if (poison_) {
      need_for_write(slot);
      ordering_.issue(Lane::kCompute);
      device_use_[at(slot)].use = engine_.fill({&slot, 1}, 0xFF);
    }
    owner_[at(slot)] = -1;
    device_.give_back(slot);
    slot = kNoSlot;
  }
  tables_.clear(index);
}

void Tiers::free_host_slots(PageIndex index) {
  for (Slot& slot : records_[at(index)].host) {
    if (slot == kNoSlot) continue;
    host_.give_back(slot);
    slot = kNoSlot;
  }
}

// --- Pages come and go --------------------------------------------------------------------------

void Tiers::create(std::span<const PageIndex> pages, bool zeroed) {
  int64_t count = 0;
  for (const PageIndex index : pages) count += slots_of(index);
  const std::vector<Slot> slots = take_device_slots(count);
  for (const Slot slot : slots) need_for_write(slot);
  Ticket use = 0;
  if (zeroed) {
    try {
      ordering_.issue(Lane::kCompute);
      use = engine_.fill(slots, 0);
    } catch (...) {
      for (const Slot slot : slots) device_.give_back(slot);
      throw;
    }
  }
  size_t next = 0;
  for (const PageIndex index : pages) {
    PageRecord& record = records_[at(index)];
    move(index, Residency::kDirty);
    for (int64_t i = 0; i < slots_of(index); ++i) {
      const Slot slot = slots[next++];
      record.device[at(i)] = slot;
      owner_[at(slot)] = index;
      if (zeroed) device_use_[at(slot)].use = use;
    }
    tables_.set(index, record.device[0], record.device[1]);
    record.pins = 1;
    pinned_slots_ += slots_of(index);
  }
}

void Tiers::clear_ahead(PageIndex index) {
  PageRecord& record = records_[at(index)];
  if (record.ahead) ahead_slots_ -= slots_of(index);
  record.ahead = false;
}

void Tiers::drop(PageIndex index) {
  PageRecord& record = records_[at(index)];
  record.wanted = false;
  if (record.state == Residency::kFree) return;
  require_unpinned(index);
  if (record.on_device()) {
    clear_ahead(index);
    victims_.remove(record.device[0]);
    free_device_slots(index);
  }
  free_host_slots(index);
  move(index, Residency::kFree);
}

// --- Progress -----------------------------------------------------------------------------------

void Tiers::order_compute() {
  ordering_.issue(Lane::kCompute);
  engine_.update_tables(tables_.changes());
  tables_.changes().clear();
}

void Tiers::poll() {
  // A page may have moved on since (and even be on its way again): its slot then has a newer
  // ticket.
  const auto settle = [this](std::deque<InFlight>& queue, Lane lane, Residency state,
                             Ticket DeviceSlotUse::* last) {
    if (queue.empty()) return;
    const Ticket done = engine_.completed(lane);
    for (; !queue.empty() && queue.front().ticket <= done; queue.pop_front()) {
      const auto [index, ticket] = queue.front();
      const PageRecord& record = records_[at(index)];
      if (record.state != state) continue;
      if (device_use_[at(record.device[0])].*last == ticket) move(index, Residency::kResident);
    }
  };
  settle(loads_, Lane::kLoad, Residency::kLoading, &DeviceSlotUse::load);
  settle(stores_, Lane::kStore, Residency::kStoring, &DeviceSlotUse::store);
}

}  // namespace oomb::paging

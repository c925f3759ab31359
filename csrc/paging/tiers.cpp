#include "paging/tiers.h"

#include <algorithm>
#include <exception>

#include "common/error.h"
#include "paging/host_runs.h"

namespace oomb::paging {

using memory::kNoSlot;
using memory::Slot;

namespace {

constexpr int64_t kBatchBytes = int64_t{64} << 20;

}  // namespace

Tiers::Tiers(memory::SlotPool& device, memory::SlotPool& host, CopyEngine& engine,
             std::optional<Wait> disabled_wait, bool poison)
    : device_(device),
      host_(host),
      engine_(engine),
      ordering_(engine, disabled_wait),
      poison_(poison) {}

void Tiers::begin(const PageSpace& space, const Schedule& schedule, int grad_slots,
                  VictimQueue::Ties ties) {
  space_ = &space;
  schedule_ = &schedule;
  grad_slots_ = grad_slots;
  records_.assign(at(space.size()), PageRecord{});
  owner_.assign(at(device_.max_slots()), -1);
  device_use_.assign(at(device_.max_slots()), DeviceSlotUse{});
  host_use_.clear();
  victims_.reset(device_.max_slots(), 2 * (int64_t{schedule.size()} + 1), ties);
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
  ordering_.cancel();
  loads_.clear();
  stores_.clear();
  records_.clear();
  device_.reset();
  host_.reset(release_host);
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
                       ", page ", id.page, id.kind == PageKind::kGradient ? ", gradient" : "",
                       "): ", name_of(state), " to ", name_of(to)));
  }
  log_.add({index, state, to});
  state = to;
}

// --- Order of eviction --------------------------------------------------------------------------

int32_t Tiers::key(PageIndex index, int32_t now) const {
  const bool gradient = is_gradient(index);
  const int64_t row = index / space_->positions();
  const int64_t position = index - row * space_->positions();
  const int64_t layer = row - (gradient ? space_->num_layers() : 0);
  const PageKind kind = gradient ? PageKind::kGradient : PageKind::kKeyValue;
  return key_at(schedule_->next_use(kind, static_cast<int32_t>(layer), position, now), kind);
}

int32_t Tiers::key_at(int32_t visit, PageKind kind) {
  // Of two pages needed at the same time the KV page goes first: it need not be stored again.
  return 2 * visit + (kind == PageKind::kGradient ? 0 : 1);
}

void Tiers::enqueue(PageIndex index, int32_t now) {
  victims_.insert(records_[at(index)].device[0], key(index, now));
}

void Tiers::requeue(PageIndex index, int32_t now) {
  victims_.remove(records_[at(index)].device[0]);
  enqueue(index, now);
}

void Tiers::requeue_unlisted(int32_t visit, int32_t heir) {
  victims_.move_all(key_at(visit, PageKind::kKeyValue), key_at(heir, PageKind::kKeyValue));
  for (const int64_t position : schedule_->pages(visit)) {
    const PageIndex index = space_->index(PageKind::kKeyValue, (*schedule_)[visit].layer, position);
    const PageRecord& record = records_[at(index)];
    if (record.on_device() && victims_.contains(record.device[0])) requeue(index, visit - 1);
  }
}

std::vector<PageIndex> Tiers::filed_under(int32_t visit) const {
  std::vector<PageIndex> pages;
  for (const PageKind kind : {PageKind::kGradient, PageKind::kKeyValue}) {
    for (const Slot slot : victims_.with_key(key_at(visit, kind)))
      pages.push_back(owner_[at(slot)]);
  }
  return pages;
}

int32_t Tiers::nearest_visit() const {
  const int32_t key = victims_.nearest_key();
  return key < 0 ? -1 : key / 2;
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

void Tiers::unpin(PageIndex index, Ticket use, bool written, int32_t now) {
  PageRecord& record = records_[at(index)];
  if (record.pins == 0) throw Error("a page was released that had not been acquired");
  for (const Slot slot : record.device) {
    if (slot != kNoSlot) device_use_[at(slot)].use = use;
  }
  if (written && record.state == Residency::kResident) move(index, Residency::kDirty);
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

// For a dirty page. If it has a place there, with what it was before, it gets another one beside the
// pages that go with it, as far as there are free ones: the tier does not grow for that.
bool Tiers::take_host_slots(PageIndex index) {
  PageRecord& record = records_[at(index)];
  if (record.on_host() && host_.free_slots() < slots_of(index)) return true;
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

// Whoever needs the first pages of a batch waits for its last: batches of about a millisecond.
template <typename Issue>
void Tiers::in_batches(std::span<const PageIndex> pages, Issue issue) {
  const auto limit = std::max<size_t>(1, at(kBatchBytes / device_.slot_bytes() / grad_slots_));
  for (; pages.size() > limit; pages = pages.subspan(limit)) issue(pages.first(limit));
  if (!pages.empty()) issue(pages);
}

void Tiers::load(std::span<const PageIndex> pages, int32_t now, bool ahead) {
  in_batches(pages, [&](std::span<const PageIndex> batch) { load_batch(batch, now, ahead); });
}

void Tiers::store(std::span<const PageIndex> pages) {
  in_batches(pages, [&](std::span<const PageIndex> batch) { store_batch(batch); });
}

void Tiers::load_batch(std::span<const PageIndex> pages, int32_t now, bool ahead) {
  int64_t count = 0;
  for (const PageIndex index : pages) count += slots_of(index);
  const std::vector<Slot> slots = take_device_slots(count);
  std::vector<PageCopy> copies;
  copies.reserve(slots.size());
  size_t next = 0;
  for (const PageIndex index : pages) {
    for (int64_t i = 0; i < slots_of(index); ++i) {
      const PageCopy copy = {slots[next++], records_[at(index)].host[at(i)]};
      const DeviceSlotUse& use = device_use_[at(copy.device_slot)];
      ordering_.need(Wait::kLoadAfterUse, use.use);
      ordering_.need(Wait::kLoadAfterStore, use.store);
      ordering_.need(Wait::kLoadAfterHostWrite, host_use_[at(copy.host_slot)].store);
      copies.push_back(copy);
    }
  }
  Ticket ticket = 0;
  try {
    ordering_.issue(Lane::kLoad);
    ticket = engine_.copy(Lane::kLoad, copies);
  } catch (...) {
    for (const Slot slot : slots) device_.give_back(slot);
    throw;
  }
  next = 0;
  for (const PageIndex index : pages) {
    PageRecord& record = records_[at(index)];
    move(index, Residency::kLoading);
    for (int64_t i = 0; i < slots_of(index); ++i) {
      const PageCopy& copy = copies[next++];
      record.device[at(i)] = copy.device_slot;
      owner_[at(copy.device_slot)] = index;
      device_use_[at(copy.device_slot)].load = ticket;
      host_use_[at(copy.host_slot)].load = ticket;
    }
    tables_.set(index, record.device[0], record.device[1]);
    enqueue(index, now);
    loads_.push_back({index, ticket});
    record.ahead = ahead;
  }
  if (ahead) ahead_slots_ += count;
  traffic_.loaded_pages += static_cast<int64_t>(pages.size());
  traffic_.loaded_slots += count;
  traffic_.loaded_runs += host_runs(copies);
}

void Tiers::store_batch(std::span<const PageIndex> pages) {
  std::vector<PageCopy> copies;
  for (const PageIndex index : pages) {
    const PageRecord& record = records_[at(index)];
    for (int64_t i = 0; i < slots_of(index); ++i) {
      const PageCopy copy = {record.device[at(i)], record.host[at(i)]};
      ordering_.need(Wait::kStoreAfterWrite, device_use_[at(copy.device_slot)].use);
      ordering_.need(Wait::kStoreAfterHostRead, host_use_[at(copy.host_slot)].load);
      copies.push_back(copy);
    }
  }
  ordering_.issue(Lane::kStore);
  const Ticket ticket = engine_.copy(Lane::kStore, copies);
  for (const PageCopy& copy : copies) {
    device_use_[at(copy.device_slot)].store = ticket;
    host_use_[at(copy.host_slot)].store = ticket;
  }
  for (const PageIndex index : pages) {
    move(index, Residency::kStoring);
    stores_.push_back({index, ticket});
  }
  traffic_.stored_pages += static_cast<int64_t>(pages.size());
  traffic_.stored_slots += static_cast<int64_t>(copies.size());
  traffic_.stored_runs += host_runs(copies);
}

void Tiers::clear_ahead(PageIndex index) {
  PageRecord& record = records_[at(index)];
  if (record.ahead) ahead_slots_ -= slots_of(index);
  record.ahead = false;
}

void Tiers::evict(PageIndex index) {
  clear_ahead(index);
  victims_.remove(records_[at(index)].device[0]);
  move(index, Residency::kHostOnly);
  free_device_slots(index);
}

bool Tiers::make_room(int64_t slots, int32_t visit) {
  host_error_.clear();
  int64_t room = available_slots();
  if (room >= slots) return true;
  std::vector<PageIndex> chosen, dirty;
  for (Slot slot = victims_.first(); slot != kNoSlot && room < slots; slot = victims_.after(slot)) {
    if (victims_.key(slot) / 2 <= visit) break;
    const PageIndex index = owner_[at(slot)];
    if (records_[at(index)].state == Residency::kDirty) {
      // With a full host tier a page that already has its place there can still go.
      if (!take_host_slots(index)) continue;
      dirty.push_back(index);
    }
    chosen.push_back(index);
    room += slots_of(index);
  }
  if (room < slots) return false;
  store(dirty);
  for (const PageIndex index : chosen) evict(index);
  return true;
}

void Tiers::store_ahead(int64_t slots) {
  int64_t ready = available_slots();
  std::vector<PageIndex> dirty;
  for (Slot slot = victims_.first(); slot != kNoSlot && ready < slots;
       slot = victims_.after(slot)) {
    const PageIndex index = owner_[at(slot)];
    ready += slots_of(index);
    if (records_[at(index)].state != Residency::kDirty) continue;
    if (!take_host_slots(index)) break;
    dirty.push_back(index);
  }
  store(dirty);
}

void Tiers::drop(PageIndex index) {
  PageRecord& record = records_[at(index)];
  record.wanted = false;
  if (record.state == Residency::kFree) return;
  if (record.pins > 0) throw Error("a page was dropped while acquired");
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

std::array<int64_t, kNumResidencies> Tiers::count_states() const {
  std::array<int64_t, kNumResidencies> counts{};
  for (const PageRecord& record : records_) ++counts[static_cast<size_t>(record.state)];
  return counts;
}

}  // namespace oomb::paging

// How Tiers moves pages: loads and stores in batches, behind the waits that each of them needs.

#include <vector>

#include "common/error.h"
#include "paging/host_runs.h"
#include "paging/tiers.h"

namespace oomb::paging {

using memory::Slot;

namespace {

constexpr int64_t kBatchBytes = int64_t{64} << 20;

}  // namespace

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
      // Of a visit that could not be made others may have taken the host slots of its pages.
      ordering_.need(Wait::kStoreAfterLoad, device_use_[at(copy.device_slot)].load);
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

}  // namespace oomb::paging

#include "memory/slot_pool.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "common/error.h"
#include "common/math.h"

namespace oomb::memory {

void check_pool_size(int64_t slot_bytes, int64_t slots, const char* setting) {
  expect(slot_bytes > 0 && slot_bytes <= kMostSlotBytes, "slot_bytes", "1 .. 2^32", slot_bytes);
  expect(slots >= 0 && slots <= kMostSlots, setting, concat("0 .. ", kMostSlots, " slots"), slots);
}

SlotPool::SlotPool(std::unique_ptr<MemoryResource> resource, const SlotPoolOptions& options)
    : resource_(std::move(resource)),
      options_(options),
      capacity_(options.max_slots),
      free_(make_free_slots(options.order, options.shuffle_seed)) {
  check_pool_size(options_.slot_bytes, options_.max_slots, "max_slots");
}

Slot SlotPool::take() {
  if (free_slots() == 0) {
    if (mapped_slots() == max_slots()) return kNoSlot;
    grow(step());
  }
  const Slot slot = free_->take();
  taken_[static_cast<size_t>(slot)] = true;
  ++taken_count_;
  return slot;
}

void SlotPool::reserve(int64_t count, Growth growth) {
  try {
    while (free_slots() < count && mapped_slots() < max_slots()) {
      grow(growth == Growth::kSteps ? step() : count - free_slots());
    }
  } catch (const OutOfMemory&) {
    // usable_slots() tells it, and refusal() why.
  }
}

void SlotPool::give_back(Slot slot) {
  if (slot < 0 || slot >= mapped_slots() || !is_taken(slot)) {
    throw Error(concat("slot ", slot, " given back but not taken"));
  }
  free_->add(slot);
  taken_[static_cast<size_t>(slot)] = false;
  --taken_count_;
}

void SlotPool::set_max_slots(int64_t slots) {
  assert(mapped_slots() == 0 && slots >= 0 && slots <= capacity_);
  options_.max_slots = slots;
}

void SlotPool::reset(bool release_memory) {
  free_->clear();
  taken_.clear();
  taken_count_ = 0;
  refusal_.reset();
  if (release_memory) resource_->release();
}

int64_t SlotPool::step() const { return std::max<int64_t>(1, options_.step_bytes / slot_bytes()); }

void SlotPool::grow(int64_t slots) {
  const int64_t first = mapped_slots();
  // Memory that the resource rounded up to is used before more is asked for.
  const int64_t rounded = resource_->committed() / slot_bytes();
  const int64_t last = std::min(max_slots(), std::max(first + slots, rounded));
  try {
    resource_->commit(last * slot_bytes());
  } catch (const OutOfMemory& error) {
    refusal_ = error;
    throw;
  }
  refusal_.reset();
  taken_.resize(static_cast<size_t>(last), false);
  for (int64_t slot = first; slot < last; ++slot) free_->add(static_cast<Slot>(slot));
}

}  // namespace oomb::memory

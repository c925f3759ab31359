#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/error.h"
#include "memory/free_slots.h"
#include "memory/memory_resource.h"

namespace oomb::memory {

// Within these limits no number of bytes in a pool overflows.
constexpr int64_t kMostSlots = (int64_t{1} << 30) - 1;
constexpr int64_t kMostSlotBytes = int64_t{1} << 32;

// Throws InvalidArgument about `setting`, which decides the number of slots.
void check_pool_size(int64_t slot_bytes, int64_t slots, const char* setting);

struct SlotPoolOptions {
  int64_t slot_bytes = 0;
  int64_t max_slots = 0;                  // hard cap
  int64_t step_bytes = int64_t{1} << 26;  // memory arrives in steps of about this size
  SlotOrder order = SlotOrder::kFreedFirst;
  std::optional<uint64_t> shuffle_seed = std::nullopt;  // in random order instead (tests)
};

// How much of a pool there is, and how much of that is in use.
struct SlotPoolState {
  int64_t slot_bytes = 0;
  int64_t max_slots = 0;
  int64_t mapped_slots = 0;
  int64_t taken_slots = 0;
  int64_t free_slots = 0;
  int64_t committed_bytes = 0;
  int64_t ready_bytes = 0;  // with memory that was made ahead

  int64_t taken_bytes() const { return taken_slots * slot_bytes; }
};

// Equal slots carved from one resource: slot s lies at base + s * slot_bytes.
class SlotPool {
 public:
  SlotPool(std::unique_ptr<MemoryResource> resource, const SlotPoolOptions& options);

  // A free slot, growing the pool by a step if need be; kNoSlot when max_slots are taken. Throws
  // OutOfMemory, with nothing changed, when the resource cannot grow.
  Slot take();
  // Grows the pool as far as the resource lets it until `count` slots are free: by steps, or by
  // what is missing, which takes the last of the memory there is.
  enum class Growth : uint8_t { kSteps, kMissing };
  void reserve(int64_t count, Growth growth);
  void give_back(Slot slot);

  // A new cap, at most the one of the beginning, for a pool that was reset.
  void set_max_slots(int64_t slots);

  // Forgets all slots. The memory is released too, unless getting it back costs too much.
  void reset(bool release_memory = true);

  std::byte* base() const { return resource_->base(); }
  std::byte* address(Slot slot) const { return base() + slot * options_.slot_bytes; }
  int64_t slot_bytes() const { return options_.slot_bytes; }
  int64_t capacity() const { return capacity_; }  // the hard cap of the beginning
  int64_t max_slots() const { return options_.max_slots; }
  int64_t mapped_slots() const { return static_cast<int64_t>(taken_.size()); }
  // All slots that can be counted on: max_slots, or those there are once the resource has refused.
  int64_t usable_slots() const { return refusal_ ? mapped_slots() : max_slots(); }
  // The latest growth failed with this.
  const std::optional<OutOfMemory>& refusal() const { return refusal_; }
  int64_t taken_slots() const { return taken_count_; }
  int64_t free_slots() const { return mapped_slots() - taken_count_; }
  int64_t available_slots() const { return usable_slots() - taken_count_; }
  int64_t committed_bytes() const { return resource_->committed(); }
  SlotPoolState state() const {
    return {slot_bytes(), max_slots(),       mapped_slots(),    taken_slots(),
            free_slots(), committed_bytes(), resource_->ready()};
  }
  bool is_taken(Slot slot) const { return taken_[static_cast<size_t>(slot)]; }

 private:
  int64_t step() const;
  void grow(int64_t slots);

  std::unique_ptr<MemoryResource> resource_;
  SlotPoolOptions options_;
  int64_t capacity_;
  std::unique_ptr<FreeSlots> free_;
  std::vector<bool> taken_;
  int64_t taken_count_ = 0;
  std::optional<OutOfMemory> refusal_;
};

}  // namespace oomb::memory

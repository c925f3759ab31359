#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace oomb::memory {

using Slot = int32_t;
constexpr Slot kNoSlot = -1;

// Which free slot is handed out. Either way a freed slot rests for as long as others are free, so
// that whatever still reads it has the longest time to finish.
enum class SlotOrder : uint8_t {
  kFreedFirst,  // the one that was freed first
  // The next one in ascending order after the last, round and round: slots taken together lie
  // together, as far as free ones do. For host memory, where copies to neighbours are faster.
  kRound,
};

// Slots that nobody has taken.
class FreeSlots {
 public:
  FreeSlots() = default;
  FreeSlots(const FreeSlots&) = delete;
  FreeSlots& operator=(const FreeSlots&) = delete;
  virtual ~FreeSlots() = default;

  virtual void add(Slot slot) = 0;
  // There must be one.
  virtual Slot take() = 0;
  virtual void clear() = 0;
};

// `shuffle_seed`: in random order instead.
std::unique_ptr<FreeSlots> make_free_slots(SlotOrder order, std::optional<uint64_t> shuffle_seed);

}  // namespace oomb::memory

// Room for pages in the device tier, and what is said when there is none.

#include <algorithm>

#include "common/bytes.h"
#include "common/error.h"
#include "paging/page_manager.h"

namespace oomb::paging {

using Growth = memory::SlotPool::Growth;

// Where the device gives no further step, pages go to the host; it is made to give its last only
// where they cannot.
bool PageManager::find_room(int64_t slots) {
  for (const Growth growth : {Growth::kSteps, Growth::kMissing}) {
    tiers_.reserve(slots, growth);
    if (tiers_.make_room(slots)) return true;
  }
  return false;
}

void PageManager::require_room(int64_t slots) {
  if (!find_room(slots)) throw_out_of_memory(slots);
}

void PageManager::throw_out_of_memory(int64_t slots) const {
  const int64_t bytes = slot_bytes();
  const int64_t pinned = active_ ? tiers_.pinned_slots() : 0;
  if (const auto& refusal = device_.pool->refusal(); refusal && pinned + slots <= device_slots()) {
    const int64_t limit = host_.pool->max_slots() * bytes;
    throw OutOfMemory(
        concat(refusal->what(), limit == 0 ? ""
                                           : concat("; nor has host_memory room for others, ",
                                                    human_bytes(host_.pool->taken_slots() * bytes),
                                                    " of ", human_bytes(limit), " are taken")),
        refusal->needed_bytes(), refusal->available_bytes());
  }
  if (active_ && pinned + slots <= device_slots()) {
    const int64_t limit = host_.pool->max_slots() * bytes;
    throw OutOfMemory(
        concat("host tier full: needed room for ", human_bytes(slots * bytes),
               " of pages that no longer fit the device tier; host_memory holds ",
               human_bytes(host_.pool->taken_slots() * bytes), " of at most ", human_bytes(limit),
               "; raise host_memory or device_memory",
               tiers_.host_error().empty() ? "" : concat(" (", tiers_.host_error(), ")")),
        slots * bytes, host_.pool->available_slots() * bytes);
  }
  const int64_t needed = (pinned + slots) * bytes;
  const int64_t smallest =
      std::max(smallest_slots_, slots > smallest_slots_ ? pinned + slots : 0) * bytes;
  throw OutOfMemory(concat("device tier too small: needed ", human_bytes(needed),
                           " of pages at the same time, device_memory allows ",
                           human_bytes(device_slots() * bytes),
                           "; the smallest device_memory that works here is ",
                           human_bytes(smallest), " of pages (", smallest, " bytes)"),
                    needed, device_slots() * bytes);
}

}  // namespace oomb::paging

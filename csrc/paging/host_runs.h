#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "paging/copy_engine.h"

namespace oomb::paging {

// Into how many stretches of neighbours the host slots of a batch fall: the fewer, the faster is
// the batch.
inline int64_t host_runs(std::span<const PageCopy> copies) {
  std::vector<memory::Slot> slots;
  slots.reserve(copies.size());
  std::ranges::transform(copies, std::back_inserter(slots), &PageCopy::host_slot);
  std::ranges::sort(slots);
  int64_t runs = slots.empty() ? 0 : 1;
  for (size_t i = 1; i < slots.size(); ++i) runs += slots[i] != slots[i - 1] + 1;
  return runs;
}

}  // namespace oomb::paging

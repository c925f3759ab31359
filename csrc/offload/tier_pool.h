#pragma once

#include <memory>
#include <utility>

#include "memory/slot_pool.h"
#include "memory/statistics_resource.h"
#include "paging/page_manager.h"

namespace oomb::offload {

// A pool over a resource whose use is counted.
inline paging::TierPool make_tier_pool(std::unique_ptr<memory::MemoryResource> memory,
                                       const memory::SlotPoolOptions& options) {
  auto counted = std::make_unique<memory::StatisticsResource>(std::move(memory));
  paging::TierPool tier;
  tier.resource = counted.get();
  tier.pool = std::make_unique<memory::SlotPool>(std::move(counted), options);
  return tier;
}

}  // namespace oomb::offload

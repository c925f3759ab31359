#include "offload/cpu_page_manager.h"

#include <utility>

#include "memory/host_resource.h"
#include "memory/limited_resource.h"
#include "offload/tier_pool.h"

namespace oomb::offload {

std::unique_ptr<paging::PageManager> make_cpu_page_manager(const CpuPageManagerOptions& options) {
  const auto pool = [&](int64_t slots, const char* setting, memory::SlotOrder order) {
    memory::check_pool_size(options.slot_bytes, slots, setting);
    const int64_t limit = slots * options.slot_bytes;
    return make_tier_pool(std::make_unique<memory::LimitedResource>(
                              std::make_unique<memory::HostResource>(limit), limit, setting),
                          {.slot_bytes = options.slot_bytes,
                           .max_slots = slots,
                           .step_bytes = int64_t{1} << 20,
                           .order = order,
                           .shuffle_seed = options.shuffle_seed});
  };
  paging::TierPool device =
      pool(options.device_slots, "device_memory", memory::SlotOrder::kFreedFirst);
  paging::TierPool host = pool(options.host_slots, "host_memory", memory::SlotOrder::kRound);
  auto engine = std::make_unique<HostCopyEngine>(HostCopyOptions{
      .device_base = device.pool->base(),
      .host_base = host.pool->base(),
      .slot_bytes = options.slot_bytes,
      .delay_seed = options.copy_delay_seed,
      .dry = options.dry,
  });
  return std::make_unique<paging::PageManager>(std::move(device), std::move(host),
                                               std::move(engine), options.paging);
}

}  // namespace oomb::offload

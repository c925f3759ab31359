#include <utility>

#include "memory/cuda/cuda_call.h"
#include "memory/cuda/device_resource.h"
#include "offload/cuda/cuda_page_manager.h"
#include "offload/tier_pool.h"

namespace oomb::offload {

std::unique_ptr<paging::PageManager> make_cuda_page_manager(const CudaPageManagerOptions& options) {
  memory::check_pool_size(options.slot_bytes, options.device_slots, "device_memory");
  memory::check_pool_size(options.slot_bytes, options.host_slots, "host_memory");
  const DeviceGuard guard(options.device);
  int unified = 0;
  check_cuda(cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, options.device),
             "cudaDeviceGetAttribute");
  expect(unified != 0, "device", "a GPU with unified addressing", options.device);

  memory::SlotPoolOptions slots = {.slot_bytes = options.slot_bytes,
                                   .max_slots = options.device_slots,
                                   .step_bytes = int64_t{256} << 20,
                                   .shuffle_seed = options.shuffle_seed};
  paging::TierPool device = make_tier_pool(
      memory::make_device_resource(options.device, options.device_slots * options.slot_bytes,
                                   options.map_device_memory),
      slots);
  slots.max_slots = options.host_slots;
  slots.step_bytes = int64_t{64} << 20;
  slots.order = memory::SlotOrder::kRound;
  paging::TierPool host =
      make_tier_pool(memory::make_pinned_memory(
                         options.device, {.capacity = options.host_slots * options.slot_bytes,
                                          .slot_bytes = options.slot_bytes,
                                          .explicit_size = options.explicit_host_memory}),
                     slots);
  auto engine = make_cuda_copy_engine({.device = options.device,
                                       .device_base = device.pool->base(),
                                       .host_base = host.pool->base(),
                                       .slot_bytes = options.slot_bytes,
                                       .delay_seed = options.copy_delay_seed});
  paging::PageManagerOptions paging = options.paging;
  paging.keep_host_memory = true;
  return std::make_unique<paging::PageManager>(std::move(device), std::move(host),
                                               std::move(engine), paging);
}

}  // namespace oomb::offload

#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "memory/cuda/pinned_memory.h"
#include "offload/cuda/cuda_copy_engine.h"
#include "paging/page_manager.h"

namespace oomb::offload {

struct CudaPageManagerOptions {
  int device = 0;
  int64_t slot_bytes = 0;
  int64_t device_slots = 0;
  int64_t host_slots = 0;
  bool explicit_host_memory = false;  // host_slots was asked for by name, see PinnedOptions
  bool map_device_memory = true;      // see make_device_resource()
  std::optional<uint64_t> copy_delay_seed = std::nullopt;
  std::optional<uint64_t> shuffle_seed = std::nullopt;
  paging::PageManagerOptions paging = {};  // all but keep_host_memory, which is on
};

// The page manager of one GPU and page-locked host memory.
std::unique_ptr<paging::PageManager> make_cuda_page_manager(const CudaPageManagerOptions& options);

}  // namespace oomb::offload

#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "offload/host_copy_engine.h"
#include "paging/page_manager.h"

namespace oomb::offload {

struct CpuPageManagerOptions {
  int64_t slot_bytes = 0;
  int64_t device_slots = 0;
  int64_t host_slots = 0;
  std::optional<uint64_t> copy_delay_seed = std::nullopt;
  std::optional<uint64_t> shuffle_seed = std::nullopt;
  bool dry = false;  // pages hold nothing
  paging::PageManagerOptions paging = {};
};

// The page manager of a machine without a GPU.
std::unique_ptr<paging::PageManager> make_cpu_page_manager(const CpuPageManagerOptions& options);

}  // namespace oomb::offload

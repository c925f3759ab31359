#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "paging/copy_engine.h"

namespace oomb::offload {

struct CudaCopyOptions {
  int device = 0;
  std::byte* device_base = nullptr;
  std::byte* host_base = nullptr;  // page-locked
  int64_t slot_bytes = 0;
  double timeout_seconds = 60;  // work that takes longer counts as stuck
  bool batched = true;          // false: one copy call per page
  bool overlap_hint = true;     // tells the driver that kernels run beside the copies
  std::optional<uint64_t> delay_seed = std::nullopt;  // batches are late at random (tests)
};

// Copies pages with the GPU's copy engines, as batches in the order of issue.
// The compute lane is the caller's stream.
std::unique_ptr<paging::CopyEngine> make_cuda_copy_engine(const CudaCopyOptions& options);

}  // namespace oomb::offload

#pragma once

#include <cstdint>
#include <memory>

#include "memory/memory_resource.h"

namespace oomb::memory {

// Memory of one GPU. With virtual memory management: addresses for the whole capacity at once,
// memory mapped behind them step by step and unmapped by release(), which costs well under a
// millisecond per 256 MiB. Without it: one allocation of the whole capacity, held until the end.
// `use_mapping` false takes the second way in any case.
std::unique_ptr<MemoryResource> make_device_resource(int device, int64_t capacity,
                                                     bool use_mapping = true);

}  // namespace oomb::memory

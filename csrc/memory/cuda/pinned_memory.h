#pragma once

#include <memory>

#include "memory/pinned_resource.h"

namespace oomb::memory {

// Host memory registered with one GPU, near it where the machine has several memory nodes.
// `options.numa_node` is set here.
std::unique_ptr<PinnedResource> make_pinned_memory(int device, PinnedOptions options);

}  // namespace oomb::memory

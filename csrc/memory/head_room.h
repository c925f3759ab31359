#pragma once

#include <cstdint>

namespace oomb::memory {

// Host memory as the kernel sees it now.
struct HeadRoom {
  int64_t available = 0;  // what can still be taken: min(MemAvailable, room in the cgroup)
  int64_t total = 0;      // MemTotal; grows on machines that get memory as they use it
};

HeadRoom read_head_room();

}  // namespace oomb::memory

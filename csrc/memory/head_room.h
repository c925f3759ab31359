#pragma once

#include <cstdint>
#include <string>

namespace oomb::memory {

// Host memory as the kernel sees it now.
struct HeadRoom {
  int64_t available = 0;  // what can still be taken: min(MemAvailable, room in the cgroup)
  int64_t total = 0;      // MemTotal; grows on machines that get memory as they use it
};

HeadRoom read_head_room();

// Read from these places. A container may hide `meminfo`: then the system is asked, which counts no
// file cache as available.
HeadRoom head_room_of(const std::string& meminfo, const std::string& cgroup);

}  // namespace oomb::memory

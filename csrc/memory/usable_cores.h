#pragma once

#include <string>

namespace oomb::memory {

// Cores that this process may keep busy: those it may run on, less what its control group's quota
// (cpu.max) takes away. At least 1.
int usable_cores(const std::string& quota_file = "/sys/fs/cgroup/cpu.max");

}  // namespace oomb::memory

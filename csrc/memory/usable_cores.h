#pragma once

namespace oomb::memory {

// Cores that this process may keep busy: those it may run on, less what its control group's quota
// (cpu.max) takes away. At least 1.
int usable_cores();

}  // namespace oomb::memory

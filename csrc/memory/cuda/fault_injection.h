#pragma once

#include <cstdint>

namespace oomb::memory {

// Tests only: makes the k-th CUDA call from now on (0: the next) fail; -1: none does.
void fail_cuda_call(int64_t k);

// CUDA calls of the tiers so far, to know which k there are.
int64_t cuda_calls_made();

// Counts a call; true if this is the one that has to fail.
bool fault_due();

}  // namespace oomb::memory

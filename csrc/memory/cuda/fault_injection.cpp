#include "memory/cuda/fault_injection.h"

#include <atomic>

namespace oomb::memory {

namespace {

std::atomic<int64_t> calls_made{0};
std::atomic<int64_t> failing_call{-1};

}  // namespace

void fail_cuda_call(int64_t k) { failing_call = k < 0 ? -1 : calls_made + k; }

int64_t cuda_calls_made() { return calls_made; }

bool fault_due() { return calls_made++ == failing_call; }

}  // namespace oomb::memory

#pragma once

// Calls of the CUDA runtime and driver by the two tiers go through here: checked, and open to the
// injection of failures. Only files that are built with CUDA include this.

#include <cuda_runtime_api.h>

#include <source_location>

#include "common/cuda_check.h"
#include "memory/cuda/fault_injection.h"

namespace oomb::memory {

// Runs one call: `call` returns a cudaError_t. Nothing is run when a failure is due.
template <typename Call>
void cuda_call(const char* name, Call call,
               std::source_location where = std::source_location::current()) {
  if (fault_due()) throw CudaError(concat("injected failure of ", name));
  check_cuda(call(), name, where);
}

}  // namespace oomb::memory

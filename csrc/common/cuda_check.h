#pragma once

// Checks of CUDA runtime calls and launches. Only files that are built with CUDA include this.

#include <cuda_runtime_api.h>

#include <source_location>

#include "common/error.h"

namespace oomb {

// Throws CudaError with the failed call's name and place. The runtime's last-error slot is cleared,
// so that one failure is not reported again by the next, unrelated launch.
inline void check_cuda(cudaError_t status, const char* call,
                       std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(concat(call, " failed: ", cudaGetErrorName(status), " (",
                         cudaGetErrorString(status), ") in ", where.function_name(), ", line ",
                         where.line()));
}

// Call right after a launch: reports bad launch configurations, and errors of earlier asynchronous
// work that the runtime already knows of.
inline void check_launch(const char* kernel,
                         std::source_location where = std::source_location::current()) {
  check_cuda(cudaGetLastError(), kernel, where);
}

// Makes `device` current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace oomb

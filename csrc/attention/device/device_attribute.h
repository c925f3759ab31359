#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda_check.h"

namespace oomb::attention::device {

// Of the current device.
inline int device_attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace oomb::attention::device

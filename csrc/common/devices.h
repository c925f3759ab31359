#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace oomb {

// One CUDA device as the runtime reports it.
struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  int64_t total_bytes = 0;
  std::string problem;  // why our kernels cannot run there; empty when one did
};

// What this build can do with CUDA on this machine. Never throws: `problem` says in words why no
// device can be used (built without CUDA, no driver, driver too old, no device).
struct CudaStatus {
  bool built = false;
  int runtime_version = 0;  // 13000 for 13.0; 0 when built without CUDA
  int driver_version = 0;   // the newest runtime that the driver supports; 0 without a driver
  std::vector<DeviceInfo> devices;
  std::string problem;
};

CudaStatus cuda_status();

}  // namespace oomb

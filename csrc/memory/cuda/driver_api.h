#pragma once

// Entry points of the driver, found at run time, so that nothing links to libcuda.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace oomb::memory {

// Virtual memory management.
struct DriverApi {
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
  bool complete = false;
};

// Null where the driver does not have it all.
const DriverApi* driver_api();

// Contexts beside the runtime's, and memory registered in them.
struct ContextApi {
  PFN_cuCtxCreate_v3020 create = nullptr;
  PFN_cuCtxDestroy_v4000 destroy = nullptr;
  PFN_cuCtxPushCurrent_v4000 push = nullptr;
  PFN_cuCtxPopCurrent_v4000 pop = nullptr;
  PFN_cuMemHostRegister_v6050 register_host = nullptr;
  PFN_cuMemHostUnregister_v4000 unregister_host = nullptr;
  bool complete = false;
};

// Null where the driver does not have it all.
const ContextApi* context_api();

}  // namespace oomb::memory

#pragma once

// The driver's virtual memory management, found at run time, so that nothing links to libcuda.

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace oomb::memory {

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

}  // namespace oomb::memory

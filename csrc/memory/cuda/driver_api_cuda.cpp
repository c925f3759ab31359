#include "memory/cuda/driver_api.h"

namespace oomb::memory {

namespace {

template <typename Function>
bool resolve(const char* name, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned int kVersion = 12000;  // the version these signatures are from
  if (cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return false;
  }
  function = reinterpret_cast<Function>(address);
  return true;
}

}  // namespace

const DriverApi* driver_api() {
  static const DriverApi api = [] {
    DriverApi found;
    found.complete =
        resolve("cuMemAddressReserve", found.address_reserve) &&
        resolve("cuMemAddressFree", found.address_free) && resolve("cuMemCreate", found.create) &&
        resolve("cuMemRelease", found.release) && resolve("cuMemMap", found.map) &&
        resolve("cuMemUnmap", found.unmap) && resolve("cuMemSetAccess", found.set_access) &&
        resolve("cuMemGetAllocationGranularity", found.granularity) &&
        resolve("cuDeviceGetAttribute", found.device_attribute);
    return found;
  }();
  return api.complete ? &api : nullptr;
}

}  // namespace oomb::memory

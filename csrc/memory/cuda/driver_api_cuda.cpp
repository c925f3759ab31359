#include "memory/cuda/driver_api.h"

namespace oomb::memory {

namespace {

// `version`: the one that the signature is from.
template <typename Function>
bool resolve(const char* name, Function& function, unsigned int version = 12000) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found) !=
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

const ContextApi* context_api() {
  static const ContextApi api = [] {
    ContextApi found;
    found.complete = resolve("cuCtxCreate", found.create, 3020) &&
                     resolve("cuCtxDestroy", found.destroy, 4000) &&
                     resolve("cuCtxPushCurrent", found.push, 4000) &&
                     resolve("cuCtxPopCurrent", found.pop, 4000) &&
                     resolve("cuMemHostRegister", found.register_host, 6050) &&
                     resolve("cuMemHostUnregister", found.unregister_host, 4000);
    return found;
  }();
  return api.complete ? &api : nullptr;
}

}  // namespace oomb::memory

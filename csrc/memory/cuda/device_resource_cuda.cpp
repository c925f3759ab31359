#include <algorithm>
#include <utility>
#include <vector>

#include "common/bytes.h"
#include "common/math.h"
#include "memory/cuda/cuda_call.h"
#include "memory/cuda/device_resource.h"
#include "memory/cuda/driver_api.h"

namespace oomb::memory {

namespace {

[[noreturn]] void throw_out_of_memory(int64_t needed, int64_t committed) {
  size_t free = 0;
  size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) cudaGetLastError();
  throw OutOfMemory(concat("device memory: needed ", human_bytes(needed), " (", needed,
                           " bytes) more for pages beside ", human_bytes(committed),
                           " held, the driver has ", human_bytes(static_cast<int64_t>(free)),
                           " free; lower device_memory or free memory on the device"),
                    needed, static_cast<int64_t>(free));
}

// A driver call that may find no memory.
void driver_call(const char* name, CUresult status, int64_t needed = 0, int64_t committed = 0) {
  if (status == CUDA_SUCCESS) return;
  if (status == CUDA_ERROR_OUT_OF_MEMORY) throw_out_of_memory(needed, committed);
  throw CudaError(concat(name, " failed with driver error ", static_cast<int>(status)));
}

void check_fault(const char* name) {
  if (fault_due()) throw CudaError(concat("injected failure of ", name));
}

class MappedDeviceResource final : public MemoryResource {
 public:
  MappedDeviceResource(const DriverApi& api, int device, int64_t capacity)
      : api_(api), device_(device) {
    const DeviceGuard guard(device_);
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device_}};
    size_t granularity = 0;
    driver_call("cuMemGetAllocationGranularity",
                api_.granularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    granularity_ = static_cast<int64_t>(granularity);
    capacity_ = align_up(std::max<int64_t>(capacity, 1), granularity_);
    driver_call("cuMemAddressReserve",
                api_.address_reserve(&address_, static_cast<size_t>(capacity_), 0, 0, 0),
                capacity_);
  }

  ~MappedDeviceResource() override {
    release();
    api_.address_free(address_, static_cast<size_t>(capacity_));
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(address_); }
  int64_t capacity() const override { return capacity_; }
  int64_t committed() const override { return committed_; }
  int64_t granularity() const override { return granularity_; }

  void commit(int64_t bytes) override {
    if (bytes > capacity_) throw_out_of_memory(bytes, committed_);
    const int64_t target = align_up(bytes, granularity_);
    if (target <= committed_) return;
    const DeviceGuard guard(device_);
    const auto step = static_cast<size_t>(target - committed_);
    const CUdeviceptr place = address_ + static_cast<CUdeviceptr>(committed_);
    CUmemGenericAllocationHandle handle = 0;
    check_fault("cuMemCreate");
    driver_call("cuMemCreate", api_.create(&handle, step, &properties_, 0), target - committed_,
                committed_);
    bool mapped = false;
    try {
      check_fault("cuMemMap");
      driver_call("cuMemMap", api_.map(place, step, 0, handle, 0));
      mapped = true;
      const CUmemAccessDesc access = {properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      check_fault("cuMemSetAccess");
      driver_call("cuMemSetAccess", api_.set_access(place, step, &access, 1), target - committed_,
                  committed_);
    } catch (...) {
      if (mapped) api_.unmap(place, step);
      api_.release(handle);
      throw;
    }
    // The mapping keeps the memory alive; it ends with the unmapping.
    api_.release(handle);
    steps_.push_back(step);
    committed_ = target;
  }

  void release() override {
    CUdeviceptr place = address_;
    for (const size_t step : steps_) {
      api_.unmap(place, step);
      place += step;
    }
    steps_.clear();
    committed_ = 0;
  }

 private:
  const DriverApi& api_;
  int device_;
  CUmemAllocationProp properties_{};
  int64_t granularity_ = 0;
  int64_t capacity_ = 0;
  int64_t committed_ = 0;
  CUdeviceptr address_ = 0;
  std::vector<size_t> steps_;
};

class AllocatedDeviceResource final : public MemoryResource {
 public:
  AllocatedDeviceResource(int device, int64_t capacity) : capacity_(capacity) {
    const DeviceGuard guard(device);
    if (capacity == 0) return;
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(capacity));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw_out_of_memory(capacity, 0);
    }
    check_cuda(status, "cudaMalloc");
    base_ = static_cast<std::byte*>(memory);
  }
  ~AllocatedDeviceResource() override { cudaFree(base_); }

  std::byte* base() const override { return base_; }
  int64_t capacity() const override { return capacity_; }
  int64_t committed() const override { return committed_; }
  int64_t granularity() const override { return 1; }
  void commit(int64_t bytes) override {
    if (bytes > capacity_) throw_out_of_memory(bytes, committed_);
    committed_ = std::max(committed_, bytes);
  }
  void release() override { committed_ = 0; }
  bool gives_back() const override { return false; }

 private:
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t committed_ = 0;
};

bool has_mapping(const DriverApi& api, int device) {
  int supported = 0;
  return api.device_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                              device) == CUDA_SUCCESS &&
         supported != 0;
}

}  // namespace

std::unique_ptr<MemoryResource> make_device_resource(int device, int64_t capacity,
                                                     bool use_mapping) {
  const DeviceGuard guard(device);
  check_cuda(cudaFree(nullptr), "cudaFree");  // makes the device's context, if nothing has yet
  const DriverApi* api = use_mapping ? driver_api() : nullptr;
  if (api != nullptr && has_mapping(*api, device)) {
    return std::make_unique<MappedDeviceResource>(*api, device, capacity);
  }
  return std::make_unique<AllocatedDeviceResource>(device, capacity);
}

}  // namespace oomb::memory

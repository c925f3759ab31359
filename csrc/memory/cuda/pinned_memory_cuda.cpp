#include <algorithm>
#include <cctype>
#include <cstdio>
#include <memory>
#include <string>

#include "memory/cuda/cuda_call.h"
#include "memory/cuda/pinned_memory.h"

namespace oomb::memory {

namespace {

class CudaRegistrar final : public Registrar {
 public:
  explicit CudaRegistrar(int device) : device_(device) {}

  void add(std::byte* begin, int64_t bytes) override {
    const DeviceGuard guard(device_);
    cuda_call("cudaHostRegister", [&] {
      return cudaHostRegister(begin, static_cast<size_t>(bytes),
                              cudaHostRegisterPortable | cudaHostRegisterMapped);
    });
  }

  void remove(std::byte* begin) noexcept override {
    // A failure can only be that of a broken context, which has unpinned everything anyway.
    if (cudaHostUnregister(begin) != cudaSuccess) cudaGetLastError();
  }

 private:
  int device_;
};

// The memory node nearest to the device, -1 where unknown.
int numa_node_of(int device) {
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  std::string path = bus;
  std::transform(path.begin(), path.end(), path.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  path = "/sys/bus/pci/devices/" + path + "/numa_node";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "r"),
                                                             &std::fclose);
  int node = -1;
  return file && std::fscanf(file.get(), "%d", &node) == 1 ? node : -1;
}

}  // namespace

std::unique_ptr<PinnedResource> make_pinned_memory(int device, PinnedOptions options) {
  const DeviceGuard guard(device);
  options.numa_node = numa_node_of(device);
  return std::make_unique<PinnedResource>(options, std::make_unique<CudaRegistrar>(device));
}

}  // namespace oomb::memory

#include <cuda_runtime.h>

#include "common/devices.h"

namespace oomb {

namespace {

__global__ void write_answer(int* answer) { *answer = 42; }

// Runs one trivial kernel: finds devices whose code is missing from this build, or that are taken.
cudaError_t try_kernel(int device) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  int* answer = nullptr;
  int host = 0;
  error = cudaMalloc(&answer, sizeof(int));
  if (error == cudaSuccess) {
    write_answer<<<1, 1>>>(answer);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = cudaMemcpy(&host, answer, sizeof(int), cudaMemcpyDefault);
    if (error == cudaSuccess && host != 42) error = cudaErrorUnknown;
    const cudaError_t freed = cudaFree(answer);
    if (error == cudaSuccess) error = freed;
  }
  const cudaError_t restored = cudaSetDevice(previous);
  return error == cudaSuccess ? restored : error;
}

DeviceInfo describe(int index) {
  DeviceInfo info;
  info.index = index;
  cudaDeviceProp properties{};
  cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error == cudaSuccess) {
    info.name = properties.name;
    info.major = properties.major;
    info.minor = properties.minor;
    info.multiprocessors = properties.multiProcessorCount;
    info.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    error = try_kernel(index);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears it, so that it does not appear in someone else's check
    info.problem = cudaGetErrorString(error);
  }
  return info;
}

}  // namespace

CudaStatus cuda_status() {
  CudaStatus status;
  status.built = true;
  status.runtime_version = CUDART_VERSION;
  if (cudaDriverGetVersion(&status.driver_version) != cudaSuccess) status.driver_version = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    status.problem = status.driver_version == 0 ? "no NVIDIA driver" : cudaGetErrorString(error);
    return status;
  }
  for (int index = 0; index < count; ++index) status.devices.push_back(describe(index));
  if (count == 0) status.problem = "no device";
  return status;
}

}  // namespace oomb

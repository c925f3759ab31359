// Stands in for devices.cu in a build without CUDA.
#include "common/devices.h"

#if !OOMB_WITH_CUDA

namespace oomb {

CudaStatus cuda_status() {
  CudaStatus status;
  status.problem = "built without CUDA";
  return status;
}

}  // namespace oomb

#endif

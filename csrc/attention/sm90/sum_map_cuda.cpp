#include <cuda_runtime_api.h>

#include "attention/sm90/sum_map.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm90 {

CUtensorMap make_sum_map(const char* argument, float* data, int64_t planes, int64_t tokens,
                         int64_t head_dim, int box_rows) {
  // The driver is reached through the runtime, so nothing links against libcuda.
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                              cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess) {
    throw CudaError("cuTensorMapEncodeTiled: not offered by this driver");
  }
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(tokens),
                                 static_cast<cuuint64_t>(planes)};
  const cuuint64_t pitches[2] = {static_cast<cuuint64_t>(head_dim) * sizeof(float),
                                 static_cast<cuuint64_t>(tokens * head_dim) * sizeof(float)};
  const cuuint32_t box[3] = {32, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, data, extents, pitches, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  expect(status == CUDA_SUCCESS, argument, "fp32 data aligned to 16 bytes",
         concat("driver error ", static_cast<int>(status)));
  return map;
}

}  // namespace oomb::attention::sm90

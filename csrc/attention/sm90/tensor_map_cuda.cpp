#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "attention/sm90/tensor_map.h"
#include "common/error.h"

namespace oomb::attention::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver is reached through the runtime, so nothing links against libcuda.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw CudaError("cuTensorMapEncodeTiled: not offered by this driver");
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

CUtensorMap encode(const char* argument, const void* data, uint32_t rank, const cuuint64_t* extents,
                   const cuuint64_t* pitches, const cuuint32_t* box) {
  constexpr cuuint32_t kUnitSteps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode_tiled()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), extents, pitches, box,
      kUnitSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  expect(status == CUDA_SUCCESS, argument, "a tensor the copy engine can address",
         concat("driver error ", static_cast<int>(status)));
  return map;
}

void expect_aligned(const char* argument, const void* data) {
  expect(reinterpret_cast<uintptr_t>(data) % 16 == 0, argument, "data aligned to 16 bytes", data);
}

}  // namespace

CUtensorMap make_token_map(const char* argument, const void* data, const Strides& strides,
                           int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                           int box_rows) {
  expect_aligned(argument, data);
  const int64_t extents[3] = {tokens, heads, batch};
  const int64_t steps[3] = {strides.token, strides.head, strides.batch};
  cuuint64_t dims[4] = {static_cast<cuuint64_t>(head_dim)};
  cuuint64_t pitches[3];
  for (int i = 0; i < 3; ++i) {
    // The stride of a dimension of size one is free and may be anything.
    const int64_t step = extents[i] == 1 ? head_dim : steps[i];
    expect(step > 0 && step % 8 == 0, argument, "positive strides in multiples of 8 elements",
           step);
    dims[i + 1] = static_cast<cuuint64_t>(extents[i]);
    pitches[i] = static_cast<cuuint64_t>(step) * 2;
  }
  const cuuint32_t box[4] = {kBoxColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  return encode(argument, data, 4, dims, pitches, box);
}

CUtensorMap make_pool_map(const PastPages& past, const Shape& shape, int box_rows) {
  expect_aligned("kv_pool", past.kv_pool);
  const int64_t row_bytes = shape.head_dim * 2;
  const int64_t page_bytes = 2 * shape.kv_heads * shape.page_size * row_bytes;
  expect(past.kv_slot_bytes % row_bytes == 0 && past.kv_slot_bytes >= page_bytes, "kv_slot_bytes",
         concat("a multiple of ", row_bytes, ", at least ", page_bytes), past.kv_slot_bytes);
  const int64_t rows = past.kv_num_slots * pool_rows_per_slot(past, shape);
  expect(rows > 0 && rows <= std::numeric_limits<int32_t>::max(), "kv_num_slots",
         "1 to 2^31 - 1 rows of head_dim elements in the pool", concat(rows, " rows"));
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(shape.head_dim),
                              static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitches[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return encode("kv_pool", past.kv_pool, 2, dims, pitches, box);
}

}  // namespace oomb::attention::sm90

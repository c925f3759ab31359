// A megabyte or two, read and written once: a thread takes one value, neighbours take neighbours.

#include <cstdint>

#include "adapters/row_factor.h"
#include "common/cuda_check.h"
#include "common/rounding.h"

namespace oomb::adapters {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 132 * 16;

__global__ void __launch_bounds__(kThreads)
    row_factor_kernel(const float* halves, uint16_t* factor, int64_t values, int64_t rank,
                      float scale) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < values; i += step) {
    const int64_t row = i / rank, column = i % rank;
    const float* pair = halves + row * 2 * rank + column;
    // Rounded by itself: with the subtraction below in one operation u2 would have other bits.
    const float u = __fmul_rn(pair[0] + pair[rank], scale);
    const uint16_t first = nearest_bits(u);
    uint16_t* place = factor + row * 3 * rank + column;
    place[0] = first;
    place[rank] = first;
    place[2 * rank] = nearest_bits(u - __uint_as_float(uint32_t{first} << 16));
  }
}

}  // namespace

void cuda::row_factor(const RowFactorParams& params) {
  const int64_t values = params.rows * params.rank;
  if (values == 0) return;
  const DeviceGuard guard(params.device);
  const int64_t blocks = ceil_div(values, int64_t{kThreads});
  row_factor_kernel<<<static_cast<uint32_t>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0,
                      static_cast<cudaStream_t>(params.stream)>>>(
      params.halves, params.factor, values, params.rank, params.scale);
  check_launch("row_factor");
}

}  // namespace oomb::adapters

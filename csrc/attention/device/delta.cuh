#pragma once

// delta = rowsum(o * d_o) - d_lse of every query row, the part of dS that does not depend on the
// key.

#include <cstdint>

#include "attention/device/numeric.cuh"
#include "attention/params.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::device {

// One warp per row. Grid: (rows / 8, query heads, batch).
template <typename T>
__global__ void __launch_bounds__(256) delta_kernel(const BackwardParams p) {
  using A = Acc<T>;
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  if (row >= p.shape.chunk) return;
  const int64_t head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const T* o = static_cast<const T*>(p.o) + batch * p.o_strides.batch + head * p.o_strides.head +
               row * p.o_strides.token;
  const T* d_o = static_cast<const T*>(p.d_o) + batch * p.do_strides.batch +
                 head * p.do_strides.head + row * p.do_strides.token;
  A sum = 0;
  for (int64_t d = lane; d < p.shape.head_dim; d += 32) sum += load(o[d]) * load(d_o[d]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane != 0) return;
  const int64_t index = (batch * p.shape.query_heads + head) * p.shape.chunk + row;
  if (p.d_lse != nullptr) sum -= static_cast<const A*>(p.d_lse)[index];
  static_cast<A*>(p.delta)[index] = sum;
}

template <typename T>
void compute_delta(const BackwardParams& params) {
  const dim3 grid(ceil_div(params.shape.chunk, 8), params.shape.query_heads, params.shape.batch);
  delta_kernel<T><<<grid, 256, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  check_launch("attention_delta");
}

}  // namespace oomb::attention::device

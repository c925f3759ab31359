#pragma once

// 64 rows of dQ of one head, summed in fp32 in memory by the one-pass backward. A full tile is laid
// out as the registers of its warps are, so that each instruction of a warp adds to 128 bytes in a
// row: [warp][register][lane]. A shorter one, the chunk's last, is row by row, since there may be
// nothing behind it. Nobody else reads either.

#include <cstdint>

#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/params.h"
#include "attention/sm80/one_pass.h"
#include "attention/sm80/query_steps.cuh"

namespace oomb::attention::sm80 {

// Element e of part [m][n] of a warp: row first_row + m * 16 + e / 2 * 8 + lane / 4, column
// first_column + n * 8 + lane % 4 * 2 + e % 2.
template <int kDim>
struct DqTile {
  static constexpr int kColumns = kDim / 4;  // of a warp; rows: 32
  static constexpr int kParts = kColumns / 8;
  static constexpr int kRegisters = 2 * kParts * 4;

  __device__ static int first_row(int warp) { return warp % 2 * 32; }
  __device__ static int first_column(int warp) { return warp / 2 * kColumns; }

  __device__ static int row(int warp, int lane, int m, int e) {
    return first_row(warp) + m * 16 + e / 2 * 8 + lane / 4;
  }
  __device__ static int place(bool full, int warp, int lane, int m, int n, int e) {
    if (full) return (warp * kRegisters + (m * kParts + n) * 4 + e) * 32 + lane;
    return row(warp, lane, m, e) * kDim + first_column(warp) + n * 8 + lane % 4 * 2 + e % 2;
  }

  __device__ static void add(float* tile, int warp, int lane, int rows,
                             const float (&dq)[2][kParts][4]) {
    if (rows == kQueries) {
      float* base = tile + place(true, warp, lane, 0, 0, 0);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            device::add_to(base + ((m * kParts + n) * 4 + e) * 32, dq[m][n][e]);
        }
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row(warp, lane, m, e) >= rows) continue;
        float* base = tile + place(false, warp, lane, m, 0, e);
#pragma unroll
        for (int n = 0; n < kParts; ++n) device::add_to(base + n * 8, dq[m][n][e]);
      }
    }
  }
};

// dq = scale * sum. Grid: (query tiles, query heads, batch).
template <typename T, int kDim>
__global__ void __launch_bounds__(32 * kOnePassWarps)
    finish_dq_kernel(const BackwardParams p, const float* sum) {
  using Dq = DqTile<kDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * kQueries;
  const int rows = min(kQueries, static_cast<int>(p.shape.chunk) - first);
  const int64_t head = blockIdx.z * p.shape.query_heads + blockIdx.y;
  const float* tile = sum + (head * p.shape.chunk + first) * kDim;
  T* target = static_cast<T*>(p.dq) + blockIdx.z * p.dq_strides.batch +
              blockIdx.y * p.dq_strides.head + first * p.dq_strides.token + Dq::first_column(warp) +
              lane % 4 * 2;
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = Dq::row(warp, lane, m, e);
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < Dq::kParts; ++n) {
        const float x = tile[Dq::place(rows == kQueries, warp, lane, m, n, e)];
        const float y = tile[Dq::place(rows == kQueries, warp, lane, m, n, e + 1)];
        *reinterpret_cast<uint32_t*>(target + row * p.dq_strides.token + n * 8) =
            device::pack<T>(x * scale, y * scale);
      }
    }
  }
}

}  // namespace oomb::attention::sm80

#pragma once

// dQ = scale * dS K. A block of four warps owns 64 queries of one head, a warp 16 of them, with Q and
// dO in registers; keys and values stream through two stages of shared memory as in the forward.
// Per 16 keys: S = Q K^T and dP = dO V^T, dS = P (dP - delta) in registers, dQ += dS K.

#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/key_tiles.cuh"
#include "attention/sm80/loads.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

template <int kDim>
struct QueryPass {
  using Tile = device::Tile<kDim>;
  static constexpr int kRows = 64;
  static constexpr int kMatrixBytes = Tile::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kMatrixBytes;
  static constexpr int kSharedBytes = 2 * kStageBytes;
};

// Grid: (query tiles, query heads, batch).
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 3 : 2) dq_kernel(const BackwardParams p) {
  using Pass = QueryPass<kDim>;
  using Tile = device::Tile<kDim>;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ KeyTiles tiles;
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int batch = blockIdx.z, head = blockIdx.y;
  const int kv_head = head / static_cast<int>(p.shape.query_heads / p.shape.kv_heads);
  const int chunk = static_cast<int>(p.shape.chunk);
  const int first = blockIdx.x * Pass::kRows;

  // Q and dO pass through the second stage on their way to registers.
  load_rows<kDim, Pass::kRows>(shared + Pass::kStageBytes,
                               static_cast<const T*>(p.q) + batch * p.q_strides.batch +
                                   head * p.q_strides.head + first * p.q_strides.token,
                               p.q_strides.token, chunk - first);
  load_rows<kDim, Pass::kRows>(shared + Pass::kStageBytes + Pass::kMatrixBytes,
                               static_cast<const T*>(p.d_o) + batch * p.do_strides.batch +
                                   head * p.do_strides.head + first * p.do_strides.token,
                               p.do_strides.token, chunk - first);
  device::commit_copies();
  tiles.start(p, batch, kv_head, first, Pass::kRows);

  const auto start_copies = [&](int index) {
    const KeyTile& tile = tiles.ring[index % 4];
    if (tile.rows == 0) return;
    const uint32_t target = shared + index % 2 * Pass::kStageBytes;
    load_rows<kDim, kKeys>(target, static_cast<const T*>(tile.k), tile.k_stride, tile.rows);
    load_rows<kDim, kKeys>(target + Pass::kMatrixBytes, static_cast<const T*>(tile.v),
                           tile.v_stride, tile.rows);
  };
  start_copies(0);
  device::commit_copies();
  device::wait_copies<1>();
  __syncthreads();
  uint32_t q[kDim / 16][4], d_o[kDim / 16][4];
  {
    const uint32_t base =
        shared + Pass::kStageBytes + Tile::block_a(lane) + warp * 16 * Tile::kRowBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      device::load_matrices(q[k], base ^ (k * 32));
      device::load_matrices(d_o[k], (base ^ (k * 32)) + Pass::kMatrixBytes);
    }
  }

  // Lane's rows: row0 and row0 + 8.
  const int row0 = first + warp * 16 + lane / 4;
  const int64_t state_row = (batch * p.shape.query_heads + head) * p.shape.chunk + row0;
  float lse[2], delta[2];
  float dq[kDim / 8][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool inside = row0 + r * 8 < chunk;
    const float value = inside ? static_cast<const float*>(p.lse)[state_row + r * 8] : INFINITY;
    lse[r] = value == -INFINITY ? INFINITY : value * kLog2E;  // nothing seen: P = 0
    delta[r] = inside ? static_cast<const float*>(p.delta)[state_row + r * 8] : 0.0f;
    const bool resume = inside && !p.first_wave;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float2 pair = make_float2(0.0f, 0.0f);
      if (resume) {
        pair = *reinterpret_cast<const float2*>(static_cast<const float*>(p.dq_acc) +
                                                (state_row + r * 8) * kDim + n * 8 +
                                                (lane % 4) * 2);
      }
      dq[n][2 * r] = pair.x;
      dq[n][2 * r + 1] = pair.y;
    }
  }

  const float scale = static_cast<float>(p.scale) * kLog2E;
  for (int index = 0; tiles.ring[index % 4].rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    if (lane == 0 && warp == index % 4) tiles.describe<true>(p, index + 2);
    device::commit_copies();
    const uint32_t keys = shared + index % 2 * Pass::kStageBytes;
    const uint32_t key_base = keys + Tile::block_b(lane);
    const uint32_t key_columns = keys + Tile::block_a(lane);
    const bool masked = tiles.ring[index % 4].masked;

#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part) {
      float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const uint32_t address = (key_base ^ (k * 32)) + part * 16 * Tile::kRowBytes;
        uint32_t b[4];
        device::load_matrices(b, address);
        device::multiply<T>(s[0], q[k], b[0], b[1]);
        device::multiply<T>(s[1], q[k], b[2], b[3]);
        device::load_matrices(b, address + Pass::kMatrixBytes);
        device::multiply<T>(dp[0], d_o[k], b[0], b[1]);
        device::multiply<T>(dp[1], d_o[k], b[2], b[3]);
      }
      if (masked) {
        const KeyTile& tile = tiles.ring[index % 4];
        const int key = tile.first + part * 16 + (lane % 4) * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto range = device::visible_keys(
              p.shape, p.visibility, static_cast<int>(p.past.num_tokens), batch, row0 + r * 8);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int column = key + n * 8 + c;
              if (column < range.begin || column >= min(range.end, tile.end)) {
                s[n][2 * r + c] = -INFINITY;
              }
            }
          }
        }
      }
      uint32_t ds[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float p0 = device::exp2_fast(fmaf(s[n][2 * r], scale, -lse[r]));
          const float p1 = device::exp2_fast(fmaf(s[n][2 * r + 1], scale, -lse[r]));
          ds[2 * n + r] = device::pack<T>(p0 * (dp[n][2 * r] - delta[r]),
                                          p1 * (dp[n][2 * r + 1] - delta[r]));
        }
      }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b,
                                         (key_columns ^ (n * 32)) + part * 16 * Tile::kRowBytes);
        device::multiply<T>(dq[2 * n], ds, b[0], b[1]);
        device::multiply<T>(dq[2 * n + 1], ds, b[2], b[3]);
      }
    }
  }

  const float out_scale = static_cast<float>(p.scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + r * 8;
    if (row >= chunk) continue;
    if (p.last_wave) {
      T* target = static_cast<T*>(p.dq) + batch * p.dq_strides.batch + head * p.dq_strides.head +
                  row * p.dq_strides.token + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<uint32_t*>(target + n * 8) =
            device::pack<T>(dq[n][2 * r] * out_scale, dq[n][2 * r + 1] * out_scale);
      }
    } else {
      float* target =
          static_cast<float*>(p.dq_acc) + (state_row + r * 8) * kDim + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(target + n * 8) = make_float2(dq[n][2 * r], dq[n][2 * r + 1]);
      }
    }
  }
}

template <typename T, int kDim>
void launch_dq(const BackwardParams& params) {
  using Pass = QueryPass<kDim>;
  const auto kernel = dq_kernel<T, kDim>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Pass::kSharedBytes),
             "cudaFuncSetAttribute");
  const dim3 grid(ceil_div(params.shape.chunk, Pass::kRows), params.shape.query_heads,
                  params.shape.batch);
  kernel<<<grid, kThreads, Pass::kSharedBytes, static_cast<cudaStream_t>(params.stream)>>>(params);
  check_launch("attention_backward dQ (sm80)");
}

}  // namespace oomb::attention::sm80

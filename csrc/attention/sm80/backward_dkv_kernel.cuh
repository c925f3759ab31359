#pragma once

// dK = scale * dS^T Q and dV = P^T dO. A block of four warps owns 64 keys of one kv head, a warp 16
// of them, with K and V in registers; queries and dO of all heads of the group stream through two
// stages of shared memory. Everything is computed transposed, so that P^T and dS^T come out of the
// products as the A operands of the next ones, and one block is the only writer of its gradients:
//
//   per 16 queries: S^T = K Q^T, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T
//   Q

#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/key_block.cuh"
#include "attention/sm80/loads.cuh"
#include "attention/sm80/query_steps.cuh"
#include "attention/sm80/soft_cap.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

constexpr int kKeys = 64;  // of a block

template <int kDim>
struct KeyPass {
  using Tile = device::Tile<kDim>;
  static constexpr int kMatrixBytes = Tile::bytes(kQueries);
  static constexpr int kLse = 2 * kMatrixBytes;
  static constexpr int kDelta = kLse + kQueries * 4;
  static constexpr int kStageBytes = kDelta + kQueries * 4;
  static constexpr int kSharedBytes = 2 * kStageBytes;
};

// Grid: (own key tiles, then tiles of the wave's pages; kv heads; batch).
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 3 : 2)
    dkv_kernel(const BackwardParams p, const BackwardPlan plan, int own_tiles) {
  using Pass = KeyPass<kDim>;
  using Tile = device::Tile<kDim>;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ QuerySteps<kKeys> steps;
  __shared__ KeyBlock place;  // leaves the registers to the main loop
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int batch = blockIdx.z, kv_head = blockIdx.y;
  KeyBlock block{static_cast<int>(blockIdx.x) < own_tiles, batch, kv_head, 0, 0};
  place_block<kKeys>(p, own_tiles, block);
  KeySource<T> source;
  if (!find_keys<T, kDim, kKeys>(p, plan, block, source)) return;
  if (!block.own) {
    const int64_t entry = batch * p.past.table_stride + block.page;
    if (p.grads.dkv_table[entry * 2] < 0 && p.grads.dkv_table[entry * 2 + 1] < 0) return;
  }

  // K and V pass through the second stage on their way to registers.
  load_rows<kDim, kKeys>(shared + Pass::kStageBytes, source.k, source.k_stride, source.rows);
  load_rows<kDim, kKeys>(shared + Pass::kStageBytes + Pass::kMatrixBytes, source.v, source.v_stride,
                         source.rows);
  device::commit_copies();
  if (threadIdx.x == 0) {
    place = block;
    steps.start(p, plan, batch, kv_head, source.first, source.end,
                block.own ? block.row0 / kQueries : 0, source.query_blocks);
  }
  __syncthreads();

  const auto start_copies = [&](int index) {
    const QueryStep& step = steps.ring[index % steps.kRing];
    if (step.rows == 0) return;
    const int offset = index % 2 * Pass::kStageBytes;
    load_rows<kDim, kQueries>(shared + offset, static_cast<const T*>(step.q), p.q_strides.token,
                              step.rows);
    load_rows<kDim, kQueries>(shared + offset + Pass::kMatrixBytes, static_cast<const T*>(step.d_o),
                              p.do_strides.token, step.rows);
    const int row = threadIdx.x % kQueries;
    const bool is_lse = threadIdx.x < kQueries;
    const bool inside = row < step.rows;
    const auto* source = static_cast<const float*>(is_lse ? p.lse : p.delta) + step.row;
    copy_word(shared_memory + offset + (is_lse ? Pass::kLse : Pass::kDelta) + row * 4,
              source + (inside ? row : 0), inside);
  };
  start_copies(0);
  device::commit_copies();
  device::wait_copies<1>();
  __syncthreads();
  uint32_t keys[kDim / 16][4], values[kDim / 16][4];
  {
    const uint32_t base =
        shared + Pass::kStageBytes + Tile::block_a(lane) + warp * 16 * Tile::kRowBytes;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      device::load_matrices(keys[i], base ^ (i * 32));
      device::load_matrices(values[i], (base ^ (i * 32)) + Pass::kMatrixBytes);
    }
  }

  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  const float scale = exponent_scale(p);
  for (int index = 0; steps.ring[index % steps.kRing].rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    if (lane == 0 && warp == index % 4) steps.describe(p, plan, index + 2);
    device::commit_copies();
    const int offset = index % 2 * Pass::kStageBytes;

    // Not unrolled: with more of the products in flight the registers would not suffice.
#pragma unroll 1
    for (int part = 0; part < kQueries / 16; ++part) {
      const uint32_t rows = shared + offset + part * 16 * Tile::kRowBytes;
      const uint32_t query_base = rows + Tile::block_b(lane);
      const uint32_t query_columns = rows + Tile::block_a(lane);
      float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const uint32_t address = query_base ^ (i * 32);
        uint32_t b[4];
        device::load_matrices(b, address);
        device::multiply<T>(s[0], keys[i], b[0], b[1]);
        device::multiply<T>(s[1], keys[i], b[2], b[3]);
        device::load_matrices(b, address + Pass::kMatrixBytes);
        device::multiply<T>(dp[0], values[i], b[0], b[1]);
        device::multiply<T>(dp[1], values[i], b[2], b[3]);
      }
      cap_scores(p, s);
      cap_by_column(p, s, dp, shared + offset + Pass::kDelta + (part * 16 + (lane % 4) * 2) * 4);
      if (steps.ring[index % steps.kRing].masked) {
        const int key = steps.key_first + warp * 16 + lane / 4;
        const int query = steps.ring[index % steps.kRing].first + part * 16 + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const auto range =
                device::visible_keys(p.shape, p.visibility, static_cast<int>(p.past.num_tokens),
                                     blockIdx.z, query + n * 8 + c);
            const int end = min(range.end, steps.key_end);
            if (key < range.begin || key >= end) s[n][c] = -INFINITY;
            if (key + 8 < range.begin || key + 8 >= end) s[n][2 + c] = -INFINITY;
          }
        }
      }
      uint32_t probabilities[4], ds[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        // The pair of queries that this lane's columns belong to.
        const uint32_t pair = shared + offset + (part * 16 + n * 8 + (lane % 4) * 2) * 4;
        float2 lse = device::load_pair(pair + Pass::kLse);
        const float2 delta = device::load_pair(pair + Pass::kDelta);
        lse.x = lse.x == -INFINITY ? INFINITY : lse.x * kLog2E;
        lse.y = lse.y == -INFINITY ? INFINITY : lse.y * kLog2E;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float p0 = device::exp2_fast(fmaf(s[n][2 * r], scale, -lse.x));
          const float p1 = device::exp2_fast(fmaf(s[n][2 * r + 1], scale, -lse.y));
          probabilities[2 * n + r] = device::pack<T>(p0, p1);
          ds[2 * n + r] =
              device::pack<T>(p0 * (dp[n][2 * r] - delta.x), p1 * (dp[n][2 * r + 1] - delta.y));
        }
      }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b, (query_columns ^ (n * 32)) + Pass::kMatrixBytes);
        device::multiply<T>(dv[2 * n], probabilities, b[0], b[1]);
        device::multiply<T>(dv[2 * n + 1], probabilities, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b, (query_columns ^ (n * 32)));
        device::multiply<T>(dk[2 * n], ds, b[0], b[1]);
        device::multiply<T>(dk[2 * n + 1], ds, b[2], b[3]);
      }
    }
  }

  write_gradient<T, kDim>(p, place, steps.key_end, dk, dv);
}

template <typename T, int kDim>
void launch_dkv(const BackwardParams& params, const BackwardPlan& plan) {
  using Pass = KeyPass<kDim>;
  const int64_t parts = params.shape.page_size / kKeys;
  const int64_t own_tiles = params.own_chunk ? ceil_div(params.shape.chunk, kKeys) : 0;
  int64_t page_tiles = 0;
  if (params.grads.dkv_table != nullptr) {
    page_tiles = parts * (plan.work != nullptr ? plan.capacity : plan.pages);
  }
  if (own_tiles + page_tiles == 0) return;
  const auto kernel = dkv_kernel<T, kDim>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Pass::kSharedBytes),
      "cudaFuncSetAttribute");
  const dim3 grid(own_tiles + page_tiles, params.shape.kv_heads, params.shape.batch);
  kernel<<<grid, kThreads, Pass::kSharedBytes, static_cast<cudaStream_t>(params.stream)>>>(
      params, plan, static_cast<int>(own_tiles));
  check_launch("attention_backward dK, dV (sm80)");
}

}  // namespace oomb::attention::sm80

#pragma once

// dK or dV at head dims 256 and 512. A block of four warps (eight, column_parts.cuh) owns 64 keys
// of one kv head, a warp 16 of them. The sums of one of the two take 128 registers of a thread, so
// there is a block for each, and both make S. K and V stay in shared memory, queries and dO stream
// through two stages of 32 rows (16):
//
//   256, in KiB: | K 32 | V 32 | Q0 dO0 32 | Q1 dO1 32 |                 V is dK's alone
//   512, in KiB: | K 64 | V 64 | Q0 dO0 32 | Q1 dO1 32 | exchange 16 |
//
// Small tiles have half of the rows in a stage (256), or half of the keys and warps (512):
//
//   256, in KiB: | K 32 | V 32 | Q0 dO0 16 | Q1 dO1 16 |
//   512, in KiB: | K 32 | V 32 | Q0 dO0 32 | Q1 dO1 32 | exchange 8 |
//
//   dV: S^T = K Q^T                   dV += P^T dO
//   dK: S^T = K Q^T, dP^T = V dO^T    dK += dS^T Q,  dS^T = P^T (dP^T - delta)

#include "attention/device/gradient_page.cuh"
#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/column_parts.cuh"
#include "attention/sm80/key_block.cuh"
#include "attention/sm80/loads.cuh"
#include "attention/sm80/query_steps.cuh"
#include "attention/sm80/soft_cap.cuh"
#include "attention/sm80/tile_size.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

template <int kDim, TileSize kTileSize>
struct WidePass {
  static constexpr bool kSmall = kTileSize == TileSize::kSmall;
  using Tile = device::Tile<kDim>;
  using Parts = ColumnParts<kDim, kSmall && kDim == 512 ? 2 : 4>;
  static constexpr int kKeys = 16 * Parts::kWarps;              // of a block
  static constexpr int kRows = kSmall || kDim > 256 ? 16 : 32;  // of a stage
  static constexpr int kStagesOfStep = kQueries / kRows;
  static constexpr int kKeyBytes = Tile::bytes(kKeys);
  static constexpr int kMatrixBytes = Tile::bytes(kRows);
  static constexpr int kStages = 2 * kKeyBytes;  // where they begin
  static constexpr int kLse = 2 * kMatrixBytes;
  static constexpr int kDelta = kLse + kRows * 4;
  static constexpr int kStageBytes = kLse + Tile::kRowBytes;   // tiles begin at multiples of a row
  static constexpr int kExchange = kStages + 2 * kStageBytes;  // where it begins
  static constexpr int kSharedBytes = kExchange + Parts::exchange_bytes(2 * kRows / 8);
  static_assert(fits(kSharedBytes, kDim, kTileSize));
};

// Grid: (own key tiles, then tiles of the wave's pages; kv heads and for each dK, dV; batch).
template <typename T, int kDim, TileSize kTileSize>
__global__ void __launch_bounds__((WidePass<kDim, kTileSize>::Parts::kThreads), 1)
    wide_dkv_kernel(const BackwardParams p, const BackwardPlan plan, int own_tiles) {
  using Pass = WidePass<kDim, kTileSize>;
  using Tile = Pass::Tile;
  using Parts = Pass::Parts;
  constexpr int kKeys = Pass::kKeys, kRows = Pass::kRows, kStagesOfStep = Pass::kStagesOfStep;
  constexpr int kColumns = Parts::kColumns, kCopyThreads = Parts::kThreads;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ QuerySteps<kKeys> steps;
  __shared__ KeyBlock place;  // leaves the registers to the main loop
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = Parts::row_warp(), part = Parts::part();
  const int batch = blockIdx.z, kv_head = blockIdx.y / 2;
  const bool is_value = blockIdx.y % 2;
  KeyBlock block{static_cast<int>(blockIdx.x) < own_tiles, batch, kv_head, 0, 0};
  place_block<kKeys>(p, own_tiles, block);
  KeySource<T> source;
  if (!find_keys<T, kDim, kKeys>(p, plan, block, source)) return;
  if (!block.own) {
    const int64_t entry = batch * p.past.table_stride + block.page;
    if (p.grads.dkv_table[entry * 2 + is_value] < 0) return;
  }
  load_rows<kDim, kKeys, kCopyThreads>(shared, source.k, source.k_stride, source.rows);
  if (!is_value) {
    load_rows<kDim, kKeys, kCopyThreads>(shared + Pass::kKeyBytes, source.v, source.v_stride,
                                         source.rows);
  }
  if (threadIdx.x == 0) {
    place = block;
    steps.start(p, plan, batch, kv_head, source.first, source.end,
                block.own ? block.row0 / kQueries : 0, source.query_blocks);
  }
  __syncthreads();

  // Part `index % kStagesOfStep` of step `index / kStagesOfStep`.
  const auto start_copies = [&](int index) {
    const QueryStep& step = steps.ring[index / kStagesOfStep % steps.kRing];
    if (step.rows == 0) return;
    const int first = index % kStagesOfStep * kRows, rows = step.rows - first;
    const int offset = Pass::kStages + index % 2 * Pass::kStageBytes;
    load_rows<kDim, kRows, kCopyThreads>(shared + offset,
                                         static_cast<const T*>(step.q) + first * p.q_strides.token,
                                         p.q_strides.token, rows);
    load_rows<kDim, kRows, kCopyThreads>(
        shared + offset + Pass::kMatrixBytes,
        static_cast<const T*>(step.d_o) + first * p.do_strides.token, p.do_strides.token, rows);
    const int row = threadIdx.x % kRows;
    const bool is_lse = threadIdx.x < kRows;
    if (threadIdx.x >= 2 * kRows) return;
    const auto* from = static_cast<const float*>(is_lse ? p.lse : p.delta) + step.row;
    copy_word(shared_memory + offset + (is_lse ? Pass::kLse : Pass::kDelta) + row * 4,
              from + (row < rows ? first + row : 0), row < rows);
  };
  start_copies(0);
  device::commit_copies();

  float sum[kColumns / 8][4] = {};
  const float scale = exponent_scale(p);
  const uint32_t key_base =
      (shared + Tile::block_a(lane) + warp * 16 * Tile::kRowBytes) ^ part * Parts::kPartBytes;
  for (int index = 0; steps.ring[index / kStagesOfStep % steps.kRing].rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    const int in_step = index % kStagesOfStep;
    if (in_step == 0 && lane == 0 && part == 0 && warp == index / kStagesOfStep % Parts::kWarps) {
      steps.describe(p, plan, index / kStagesOfStep + 2);
    }
    device::commit_copies();
    const QueryStep& step = steps.ring[index / kStagesOfStep % steps.kRing];
    if (step.rows <= in_step * kRows) continue;
    const int offset = Pass::kStages + index % 2 * Pass::kStageBytes;
    const uint32_t query_base = (shared + offset + Tile::block_b(lane)) ^ part * Parts::kPartBytes;
    // What the sum takes: rows of dO, or of Q.
    const uint32_t columns =
        (shared + offset + (is_value ? Pass::kMatrixBytes : 0) + Tile::block_a(lane)) ^
        part * Parts::kPartBytes;

    float s[kRows / 8][4] = {}, dp[kRows / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t a[4];
      device::load_matrices(a, key_base ^ (i * 32));
#pragma unroll
      for (int n = 0; n < kRows / 16; ++n) {
        uint32_t b[4];
        device::load_matrices(b, (query_base ^ (i * 32)) + n * 16 * Tile::kRowBytes);
        device::multiply<T>(s[2 * n], a, b[0], b[1]);
        device::multiply<T>(s[2 * n + 1], a, b[2], b[3]);
      }
    }
    if (!is_value) {
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t a[4];
        device::load_matrices(a, (key_base ^ (i * 32)) + Pass::kKeyBytes);
#pragma unroll
        for (int n = 0; n < kRows / 16; ++n) {
          uint32_t b[4];
          device::load_matrices(
              b, (query_base ^ (i * 32)) + Pass::kMatrixBytes + n * 16 * Tile::kRowBytes);
          device::multiply<T>(dp[2 * n], a, b[0], b[1]);
          device::multiply<T>(dp[2 * n + 1], a, b[2], b[3]);
        }
      }
    }
    if constexpr (Parts::kParts > 1) {
      const PartExchange<2 * kRows / 8, Parts::kWarps> exchange(shared + Pass::kExchange);
      exchange.send(s);
      if (!is_value) exchange.send(dp, kRows / 8);
      exchange.meet();
      exchange.add(s);
      if (!is_value) exchange.add(dp, kRows / 8);
    }
    cap_scores(p, s);
    if (!is_value) cap_by_column(p, s, dp, shared + offset + Pass::kDelta + (lane % 4) * 8);
    if (step.masked) {
      const int key = steps.key_first + warp * 16 + lane / 4;
      const int query = step.first + in_step * kRows + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
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
    // P^T or dS^T, as the A operand of 16 queries each.
    uint32_t operand[kRows / 16][4];
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      // The pair of queries that this lane's columns belong to.
      const uint32_t pair = shared + offset + (n * 8 + (lane % 4) * 2) * 4;
      float2 lse = device::load_pair(pair + Pass::kLse);
      const float2 delta = device::load_pair(pair + Pass::kDelta);
      lse.x = lse.x == -INFINITY ? INFINITY : lse.x * kLog2E;
      lse.y = lse.y == -INFINITY ? INFINITY : lse.y * kLog2E;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float p0 = device::exp2_fast(fmaf(s[n][2 * r], scale, -lse.x));
        const float p1 = device::exp2_fast(fmaf(s[n][2 * r + 1], scale, -lse.y));
        operand[n / 2][2 * (n % 2) + r] =
            is_value
                ? device::pack<T>(p0, p1)
                : device::pack<T>(p0 * (dp[n][2 * r] - delta.x), p1 * (dp[n][2 * r + 1] - delta.y));
      }
    }
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b, (columns ^ (n * 32)) + k * 16 * Tile::kRowBytes);
        device::multiply<T>(sum[2 * n], operand[k], b[0], b[1]);
        device::multiply<T>(sum[2 * n + 1], operand[k], b[2], b[3]);
      }
    }
  }

  const float factor = is_value ? 1.0f : static_cast<float>(p.scale);
  write_sum<T, kDim, Parts>(p, place, steps.key_end, is_value, sum, factor);
}

template <typename T, int kDim, TileSize kTileSize>
void launch_wide_dkv(const BackwardParams& params, const BackwardPlan& plan) {
  using Pass = WidePass<kDim, kTileSize>;
  const int64_t parts = params.shape.page_size / Pass::kKeys;
  const int64_t own_tiles = params.own_chunk ? ceil_div(params.shape.chunk, Pass::kKeys) : 0;
  int64_t page_tiles = 0;
  if (params.grads.dkv_table != nullptr) {
    page_tiles = parts * (plan.work != nullptr ? plan.capacity : plan.pages);
  }
  if (own_tiles + page_tiles == 0) return;
  const auto kernel = wide_dkv_kernel<T, kDim, kTileSize>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Pass::kSharedBytes),
      "cudaFuncSetAttribute");
  const dim3 grid(own_tiles + page_tiles, 2 * params.shape.kv_heads, params.shape.batch);
  kernel<<<grid, Pass::Parts::kThreads, Pass::kSharedBytes,
           static_cast<cudaStream_t>(params.stream)>>>(params, plan, static_cast<int>(own_tiles));
  check_launch("attention_backward dK, dV (sm80)");
}

template <typename T, int kDim>
void launch_wide_dkv(const BackwardParams& params, const BackwardPlan& plan, TileSize size) {
  if (size == TileSize::kSmall) {
    launch_wide_dkv<T, kDim, TileSize::kSmall>(params, plan);
  } else {
    launch_wide_dkv<T, kDim, TileSize::kLarge>(params, plan);
  }
}

}  // namespace oomb::attention::sm80

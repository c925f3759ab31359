#pragma once

// dQ = scale * dS K. A block of four warps owns kRowTiles * 64 queries of one head, a warp
// kRowTiles * 16 of them; keys and values stream through two stages of shared memory as in the
// forward. Per part of the keys: S = Q K^T and dP = dO V^T, dS = P (dP - delta) in registers,
// dQ += dS K.
//
// What bounds this pass is reading shared memory. Two row tiles use every K and V fragment twice;
// Q and dO then stay in shared memory, and stages are half as long so that two blocks still fit:
//
//   kRowTiles 2: | Q 128 | dO 128 | K0 V0 32 | K1 V1 32 |
//   kRowTiles 1: | K0 V0 64 | K1 V1 64 |      Q and dO in registers
//
// At head dim 256 the sums of one row tile fill the registers: Q and dO stay in shared memory too.
//
//   head dim 256: | Q 64 | dO 64 | K0 V0 32 | K1 V1 32 |              128 KiB
//   small tiles:  | Q 64 | dO 64 | K0 V0 16 | K1 V1 16 |               96 KiB
//   head dim 512: | Q 64 | dO 64 | K0 V0 16 | K1 V1 16 | exchange |   208 KiB, eight warps
//   small tiles:  | Q 32 | dO 32 | K0 V0 16 | K1 V1 16 | exchange |   136 KiB, four warps

#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/column_parts.cuh"
#include "attention/sm80/key_tiles.cuh"
#include "attention/sm80/loads.cuh"
#include "attention/sm80/soft_cap.cuh"
#include "attention/sm80/tile_size.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

template <int kDim, int kRowTiles, TileSize kTileSize>
struct QueryPass {
  static constexpr bool kSmall = kTileSize == TileSize::kSmall;
  using Tile = device::Tile<kDim>;
  using Parts = ColumnParts<kDim, kSmall && kDim == 512 ? 2 : 4>;
  static constexpr bool kInRegisters = kRowTiles == 1 && kDim <= 128;
  static constexpr int kRows = kRowTiles * 16 * Parts::kWarps;
  // Of one stage.
  static constexpr int kKeys = kInRegisters ? 64 : kDim <= 256 && !kSmall ? 32 : 16;
  static constexpr int kPart =
      kInRegisters ? 16 : kKeys;  // keys whose dS is in registers at a time
  static constexpr int kMatrixBytes = Tile::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kMatrixBytes;
  static constexpr int kQueryBytes = Tile::bytes(kRows);
  static constexpr int kStages = kInRegisters ? 0 : 2 * kQueryBytes;  // where the stages begin
  static constexpr int kQueries = kInRegisters ? kStageBytes : 0;     // where Q and dO begin
  static constexpr int kExchange = kStages + 2 * kStageBytes;         // where it begins
  static constexpr int kSharedBytes = kExchange + Parts::exchange_bytes(2 * kPart / 8);
  static constexpr int kBlocksPerProcessor = kDim == 64 ? 3 : kDim >= 256 ? 1 : 2;
  static_assert(fits(kSharedBytes, kDim, kTileSize));
};

// Grid: (query tiles, query heads, batch).
template <typename T, int kDim, int kRowTiles, TileSize kTileSize>
__global__ void __launch_bounds__((QueryPass<kDim, kRowTiles, kTileSize>::Parts::kThreads),
                                  (QueryPass<kDim, kRowTiles, kTileSize>::kBlocksPerProcessor))
    dq_kernel(const BackwardParams p) {
  using Pass = QueryPass<kDim, kRowTiles, kTileSize>;
  using Tile = device::Tile<kDim>;
  using Parts = Pass::Parts;
  constexpr int kKeys = Pass::kKeys, kPart = Pass::kPart;
  constexpr int kColumns = Parts::kColumns, kCopyThreads = Parts::kThreads;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ KeyTiles<kKeys> tiles;
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = Parts::row_warp(), column_part = Parts::part();
  {
    const BlockPlace place;
    const int first = place.x * Pass::kRows;
    const int rows = static_cast<int>(p.shape.chunk) - first;
    load_rows<kDim, Pass::kRows, kCopyThreads>(
        shared + Pass::kQueries,
        static_cast<const T*>(p.q) + place.batch * p.q_strides.batch +
            place.head * p.q_strides.head + first * p.q_strides.token,
        p.q_strides.token, rows);
    load_rows<kDim, Pass::kRows, kCopyThreads>(
        shared + Pass::kQueries + Pass::kQueryBytes,
        static_cast<const T*>(p.d_o) + place.batch * p.do_strides.batch +
            place.head * p.do_strides.head + first * p.do_strides.token,
        p.do_strides.token, rows);
    device::commit_copies();
    tiles.start(p, place.batch,
                place.head / static_cast<int>(p.shape.query_heads / p.shape.kv_heads), first,
                Pass::kRows);
  }

  const auto start_copies = [&](int index) {
    const KeyTile& tile = tiles.ring[index % 4];
    if (tile.rows == 0) return;
    const uint32_t target = shared + Pass::kStages + index % 2 * Pass::kStageBytes;
    load_rows<kDim, kKeys, kCopyThreads>(target, static_cast<const T*>(tile.k), tile.k_stride,
                                         tile.rows);
    load_rows<kDim, kKeys, kCopyThreads>(target + Pass::kMatrixBytes, static_cast<const T*>(tile.v),
                                         tile.v_stride, tile.rows);
  };
  start_copies(0);
  device::commit_copies();

  // Fragments of the warp's rows of Q and dO, from registers or from shared memory.
  const uint32_t query_base =
      (shared + Pass::kQueries + Tile::block_a(lane) + warp * kRowTiles * 16 * Tile::kRowBytes) ^
      column_part * Parts::kPartBytes;
  uint32_t q[Pass::kInRegisters ? kDim / 16 : 1][4], d_o[Pass::kInRegisters ? kDim / 16 : 1][4];
  if constexpr (Pass::kInRegisters) {
    device::wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      device::load_matrices(q[k], query_base ^ (k * 32));
      device::load_matrices(d_o[k], (query_base ^ (k * 32)) + Pass::kQueryBytes);
    }
  }

  // Lane's rows: row(m, r) = row0 + m * 16 + r * 8.
  float lse[kRowTiles][2], delta[kRowTiles][2];
  float dq[kRowTiles][kColumns / 8][4];
  {
    const BlockPlace place;
    const int row0 = place.x * Pass::kRows + warp * kRowTiles * 16 + lane / 4;
    const int64_t state_row = (place.batch * p.shape.query_heads + place.head) * p.shape.chunk;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + m * 16 + r * 8;
        const bool inside = row < p.shape.chunk;
        const int64_t index = state_row + (inside ? row : 0);
        const float value = inside ? static_cast<const float*>(p.lse)[index] : INFINITY;
        lse[m][r] = value == -INFINITY ? INFINITY : value * kLog2E;  // nothing seen: P = 0
        delta[m][r] = static_cast<const float*>(p.delta)[index];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          float2 pair = make_float2(0.0f, 0.0f);
          if (!p.first_wave) {
            pair = *reinterpret_cast<const float2*>(static_cast<const float*>(p.dq_acc) +
                                                    index * kDim + column_part * kColumns + n * 8 +
                                                    (lane % 4) * 2);
          }
          dq[m][n][2 * r] = pair.x;
          dq[m][n][2 * r + 1] = pair.y;
        }
      }
    }
  }

  const float scale = exponent_scale(p);
  for (int index = 0; tiles.ring[index % 4].rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    if (lane == 0 && column_part == 0 && warp == index % Parts::kWarps)
      tiles.template describe<true>(p, index + 2);
    device::commit_copies();
    const uint32_t stage = shared + Pass::kStages + index % 2 * Pass::kStageBytes;
    const uint32_t key_base = (stage + Tile::block_b(lane)) ^ column_part * Parts::kPartBytes;
    const uint32_t key_columns = (stage + Tile::block_a(lane)) ^ column_part * Parts::kPartBytes;

#pragma unroll
    for (int part = 0; part < kKeys / kPart; ++part) {
      float s[kRowTiles][kPart / 8][4], dp[kRowTiles][kPart / 8][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) s[m][n][c] = dp[m][n][c] = 0.0f;
        }
      }
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
        for (int product = 0; product < 2; ++product) {  // S, then dP
          uint32_t a[kRowTiles][4];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            if constexpr (Pass::kInRegisters) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[m][i] = product == 0 ? q[k][i] : d_o[k][i];
            } else {
              device::load_matrices(a[m], (query_base ^ (k * 32)) + product * Pass::kQueryBytes +
                                              m * 16 * Tile::kRowBytes);
            }
          }
#pragma unroll
          for (int n = 0; n < kPart / 16; ++n) {
            uint32_t b[4];
            device::load_matrices(b, (key_base ^ (k * 32)) + product * Pass::kMatrixBytes +
                                         (part * kPart + n * 16) * Tile::kRowBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              auto& target = product == 0 ? s : dp;
              device::multiply<T>(target[m][2 * n], a[m], b[0], b[1]);
              device::multiply<T>(target[m][2 * n + 1], a[m], b[2], b[3]);
            }
          }
        }
      }
      if constexpr (Parts::kParts > 1) {
        static_assert(kRowTiles == 1 && kPart == kKeys);
        const PartExchange<2 * kPart / 8, Parts::kWarps> exchange(shared + Pass::kExchange);
        exchange.send(s[0]);
        exchange.send(dp[0], kPart / 8);
        exchange.meet();
        exchange.add(s[0]);
        exchange.add(dp[0], kPart / 8);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        cap_scores(p, s[m]);
        cap_by_row(p, s[m], dp[m], delta[m]);
      }
      if (tiles.ring[index % 4].masked) {
        const KeyTile& tile = tiles.ring[index % 4];
        const BlockPlace place;
        const int row0 = place.x * Pass::kRows + warp * kRowTiles * 16 + lane / 4;
        const int key = tile.first + part * kPart + (lane % 4) * 2;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const auto range =
                device::visible_keys(p.shape, p.visibility, static_cast<int>(p.past.num_tokens),
                                     place.batch, row0 + m * 16 + r * 8);
#pragma unroll
            for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const int column = key + n * 8 + c;
                if (column < range.begin || column >= min(range.end, tile.end)) {
                  s[m][n][2 * r + c] = -INFINITY;
                }
              }
            }
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kPart / 16; ++k) {
        uint32_t ds[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int n = 2 * k + i / 2, r = i % 2;
            const float p0 = device::exp2_fast(fmaf(s[m][n][2 * r], scale, -lse[m][r]));
            const float p1 = device::exp2_fast(fmaf(s[m][n][2 * r + 1], scale, -lse[m][r]));
            ds[m][i] = device::pack<T>(p0 * (dp[m][n][2 * r] - delta[m][r]),
                                       p1 * (dp[m][n][2 * r + 1] - delta[m][r]));
          }
        }
#pragma unroll
        for (int n = 0; n < kColumns / 16; ++n) {
          uint32_t b[4];
          device::load_matrices_transposed(
              b, (key_columns ^ (n * 32)) + (part * kPart + k * 16) * Tile::kRowBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            device::multiply<T>(dq[m][2 * n], ds[m], b[0], b[1]);
            device::multiply<T>(dq[m][2 * n + 1], ds[m], b[2], b[3]);
          }
        }
      }
    }
  }

  const BlockPlace place;
  const int row0 = place.x * Pass::kRows + warp * kRowTiles * 16 + lane / 4;
  const int64_t state_row = (place.batch * p.shape.query_heads + place.head) * p.shape.chunk;
  const float out_scale = static_cast<float>(p.scale);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + m * 16 + r * 8;
      if (row >= p.shape.chunk) continue;
      if (p.last_wave) {
        T* target = static_cast<T*>(p.dq) + place.batch * p.dq_strides.batch +
                    place.head * p.dq_strides.head + row * p.dq_strides.token +
                    column_part * kColumns + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          *reinterpret_cast<uint32_t*>(target + n * 8) =
              device::pack<T>(dq[m][n][2 * r] * out_scale, dq[m][n][2 * r + 1] * out_scale);
        }
      } else {
        float* target = static_cast<float*>(p.dq_acc) + (state_row + row) * kDim +
                        column_part * kColumns + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          *reinterpret_cast<float2*>(target + n * 8) =
              make_float2(dq[m][n][2 * r], dq[m][n][2 * r + 1]);
        }
      }
    }
  }
}

template <typename T, int kDim, int kRowTiles, TileSize kTileSize>
void launch_dq(const BackwardParams& params) {
  using Pass = QueryPass<kDim, kRowTiles, kTileSize>;
  const auto kernel = dq_kernel<T, kDim, kRowTiles, kTileSize>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Pass::kSharedBytes),
      "cudaFuncSetAttribute");
  const dim3 grid(ceil_div(params.shape.chunk, Pass::kRows), params.shape.query_heads,
                  params.shape.batch);
  kernel<<<grid, Pass::Parts::kThreads, Pass::kSharedBytes,
           static_cast<cudaStream_t>(params.stream)>>>(params);
  check_launch("attention_backward dQ (sm80)");
}

// A tile of queries must not cross a query block where each block has its own page list.
template <typename T, int kDim>
void launch_dq(const BackwardParams& params) {
  if (params.past.selection != nullptr && params.shape.page_size < 128) {
    launch_dq<T, kDim, 1, TileSize::kLarge>(params);
  } else {
    launch_dq<T, kDim, 2, TileSize::kLarge>(params);
  }
}

template <typename T, int kDim>
void launch_wide_dq(const BackwardParams& params, TileSize size) {
  if (size == TileSize::kSmall) {
    launch_dq<T, kDim, 1, TileSize::kSmall>(params);
  } else {
    launch_dq<T, kDim, 1, TileSize::kLarge>(params);
  }
}

}  // namespace oomb::attention::sm80

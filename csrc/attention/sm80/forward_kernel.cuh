#pragma once

// Forward. A block of four warps owns kRowTiles * 64 queries of one head, a warp kRowTiles * 16 of
// them. Keys and values stream through two stages of shared memory, 64 keys at a time:
//
//   shared: | Q | K0 V0 | K1 V1 |          one barrier per tile: tile j has arrived and tile j - 1
//   is tile j: wait, start copying j + 1,     done with, so its stage may be overwritten
//           S = Q K^T, softmax, O += P V
//
// The probabilities never leave registers: the accumulators of S, rounded, are the A operand of P
// V. A tile's keys may be parted among several blocks, one after the other (forward_plan.h).
//
//   KiB    large: | Q | K0 V0 | K1 V1 |         small: | Q | K0 V0 | K1 V1 |
//   256           | 32 | 64 | 64 |                     | 32 | 32 | 32 |
//   512           | 64 | 64 | 64 | exchange 16 |       | 64 | 32 | 32 | exchange 8 |

#include "attention/device/device_attribute.h"
#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/column_parts.cuh"
#include "attention/sm80/forward_plan.h"
#include "attention/sm80/forward_unit.cuh"
#include "attention/sm80/key_tiles.cuh"
#include "attention/sm80/loads.cuh"
#include "attention/sm80/soft_cap.cuh"
#include "attention/sm80/tile_size.h"
#include "attention/sm80/turns.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // maximum of a row that has seen nothing: finite, see softmax

template <int kDim, int kRowTiles, TileSize kTileSize>
struct ForwardShape {
  using Tile = device::Tile<kDim>;
  using Parts = ColumnParts<kDim>;
  static constexpr int kKeys =
      64 / Parts::kParts / (kTileSize == TileSize::kSmall ? 2 : 1);  // of one
  static constexpr int kRows = kRowTiles * 64;
  static constexpr int kMatrixBytes = Tile::bytes(kKeys);
  static constexpr int kQueryBytes = Tile::bytes(kRows);
  static constexpr int kStageBytes = 2 * kMatrixBytes;
  static constexpr int kExchange = kQueryBytes + 2 * kStageBytes;  // where it begins
  static constexpr int kSharedBytes = kExchange + Parts::exchange_bytes(kKeys / 8);
  static constexpr int kBlocksPerProcessor = Parts::kParts == 1 ? 2 : 1;
  static_assert(fits(kSharedBytes, kDim, kTileSize));
};

// Grid: plan.units.
template <typename T, int kDim, int kRowTiles, TileSize kTileSize>
__global__ void __launch_bounds__(ColumnParts<kDim>::kThreads,
                                  (ForwardShape<kDim, kRowTiles, kTileSize>::kBlocksPerProcessor))
    forward_kernel(const ForwardParams p, const ForwardPlan plan) {
  using F = ForwardShape<kDim, kRowTiles, kTileSize>;
  using Parts = ColumnParts<kDim>;
  constexpr int kKeys = F::kKeys, kColumns = Parts::kColumns, kCopyThreads = Parts::kThreads;
  using Tile = device::Tile<kDim>;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ KeyTiles<kKeys> tiles;
  __shared__ ForwardUnit unit;
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = Parts::row_warp(), part = Parts::part();
  if (threadIdx.x == 0) {
    const int index = plan.turns != nullptr ? atomicAdd(plan.next_unit, 1) : blockIdx.x;
    unit.choose(p, plan, index, F::kRows);
  }
  __syncthreads();
  const int batch = unit.batch, head = unit.head;
  const int kv_head = head / static_cast<int>(p.shape.query_heads / p.shape.kv_heads);
  const int chunk = static_cast<int>(p.shape.chunk);
  const int query_first = unit.query_first;

  load_rows<kDim, F::kRows, kCopyThreads>(shared,
                                          static_cast<const T*>(p.q) + batch * p.q_strides.batch +
                                              head * p.q_strides.head +
                                              query_first * p.q_strides.token,
                                          p.q_strides.token, chunk - query_first);
  if (unit.piece > 0 && threadIdx.x == 0) {
    wait_for_turn(plan.turns + unit.tile - plan.whole, unit.piece);
  }
  tiles.start(p, batch, kv_head, query_first, F::kRows, unit.piece, unit.pieces);

  // Lane's rows: row(m, r) = row0 + m * 16 + r * 8 of the tile.
  float acc[kRowTiles][kColumns / 8][4];
  float highest[kRowTiles][2], total[kRowTiles][2];
  if (p.first_wave && unit.piece == 0) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) highest[m][r] = kLowest, total[m][r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[m][n][c] = 0.0f;
      }
    }
  } else {
    const int row0 = warp * kRowTiles * 16 + lane / 4;
    const StatePlace state =
        unit.piece == 0 ? StatePlace(p, unit) : StatePlace(plan, unit, F::kRows);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + m * 16 + r * 8;
        const bool inside = query_first + row < chunk;
        const int64_t index = state.row + (inside ? row : 0);
        highest[m][r] = state.max[index];
        total[m][r] = state.sum[index];
        const float* source = state.acc + index * kDim + part * kColumns + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const float2 pair = *reinterpret_cast<const float2*>(source + n * 8);
          acc[m][n][2 * r] = pair.x;
          acc[m][n][2 * r + 1] = pair.y;
        }
      }
    }
  }

  const float scale = exponent_scale(p);
  const auto start_copies = [&](int index) {
    const KeyTile& tile = tiles.ring[index % 4];
    if (tile.rows == 0) return;
    const uint32_t target = shared + F::kQueryBytes + index % 2 * F::kStageBytes;
    load_rows<kDim, kKeys, kCopyThreads>(target, static_cast<const T*>(tile.k), tile.k_stride,
                                         tile.rows);
    load_rows<kDim, kKeys, kCopyThreads>(target + F::kMatrixBytes, static_cast<const T*>(tile.v),
                                         tile.v_stride, tile.rows);
  };

  start_copies(0);
  device::commit_copies();
  for (int index = 0; tiles.ring[index % 4].rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    if (lane == 0 && part == 0 && warp == index % 4) tiles.describe<true>(p, index + 2);
    device::commit_copies();
    const uint32_t stage = shared + F::kQueryBytes + index % 2 * F::kStageBytes;

    // S = Q K^T
    float scores[kRowTiles][kKeys / 8][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[m][n][c] = 0.0f;
      }
    }
    const uint32_t query_base =
        (shared + Tile::block_a(lane) + warp * kRowTiles * 16 * Tile::kRowBytes) ^
        part * Parts::kPartBytes;
    const uint32_t key_base = (stage + Tile::block_b(lane)) ^ part * Parts::kPartBytes;
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        device::load_matrices(a[m], (query_base ^ (k * 32)) + m * 16 * Tile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        device::load_matrices(b, (key_base ^ (k * 32)) + n * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          device::multiply<T>(scores[m][2 * n], a[m], b[0], b[1]);
          device::multiply<T>(scores[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }

    if constexpr (Parts::kParts > 1) {
      static_assert(kRowTiles == 1);
      const PartExchange<kKeys / 8> exchange(shared + F::kExchange);
      exchange.send(scores[0]);
      exchange.meet();
      exchange.add(scores[0]);
    }

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) cap_scores(p, scores[m]);

    // What a row must not see. Most tiles need nothing.
    if (tiles.ring[index % 4].masked) {
      const int first = tiles.ring[index % 4].first, end = tiles.ring[index % 4].end;
      const int row0 = unit.query_first + warp * kRowTiles * 16 + lane / 4;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto keys =
              device::visible_keys(p.shape, p.visibility, static_cast<int>(p.past.num_tokens),
                                   unit.batch, row0 + m * 16 + r * 8);
          const int low = keys.begin - first - (lane % 4) * 2;
          const int high = min(keys.end, end) - first - (lane % 4) * 2;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (n * 8 + c < low || n * 8 + c >= high) scores[m][n][2 * r + c] = -INFINITY;
            }
          }
        }
      }
    }

    // Online softmax in base 2. A row without a key so far has the finite maximum kLowest, so that
    // differences are never -inf - -inf, and 2^(-inf - kLowest) = 0.
    bool moved = false;
    float factor[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = scores[m][0][2 * r];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          top = fmaxf(top, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(top * scale, highest[m][r]);
        factor[m][r] = device::exp2_fast(highest[m][r] - top);
        moved |= top != highest[m][r];
        highest[m][r] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = scores[m][n][2 * r + c];
            score = device::exp2_fast(fmaf(score, scale, -top));
            sum += score;
          }
        }
        // Summed over the row's four lanes here, not at the end: the carried sum must not depend on
        // where a wave ends.
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        total[m][r] = fmaf(total[m][r], factor[m][r], sum);
      }
    }
    // Multiplying by one changes nothing, so a warp whose maxima all stay may skip it.
    if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[m][n][c] *= factor[m][c / 2];
        }
      }
    }

    // O += P V
    const uint32_t value_base =
        (stage + F::kMatrixBytes + Tile::block_a(lane)) ^ part * Parts::kPartBytes;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        a[m][0] = device::pack<T>(scores[m][2 * k][0], scores[m][2 * k][1]);
        a[m][1] = device::pack<T>(scores[m][2 * k][2], scores[m][2 * k][3]);
        a[m][2] = device::pack<T>(scores[m][2 * k + 1][0], scores[m][2 * k + 1][1]);
        a[m][3] = device::pack<T>(scores[m][2 * k + 1][2], scores[m][2 * k + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b, (value_base ^ (n * 32)) + k * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          device::multiply<T>(acc[m][2 * n], a[m], b[0], b[1]);
          device::multiply<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  const bool last = unit.piece == unit.pieces - 1;
  const int row0 = warp * kRowTiles * 16 + lane / 4;
  const StatePlace state = last ? StatePlace(p, unit) : StatePlace(plan, unit, F::kRows);
  const int rows = static_cast<int>(p.shape.chunk) - unit.query_first;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + m * 16 + r * 8;
      if (row >= rows) continue;
      if (last && p.last_wave) {
        const float sum = total[m][r];
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        T* o = static_cast<T*>(p.o) + unit.batch * p.o_strides.batch +
               unit.head * p.o_strides.head + (unit.query_first + row) * p.o_strides.token +
               part * kColumns + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          *reinterpret_cast<uint32_t*>(o + n * 8) =
              device::pack<T>(acc[m][n][2 * r] * inverse, acc[m][n][2 * r + 1] * inverse);
        }
        if (lane % 4 == 0 && part == 0) {
          static_cast<float*>(p.lse)[state.row + row] =
              sum > 0.0f ? highest[m][r] * kLn2 + logf(sum) : -INFINITY;
        }
      } else {
        float* target = state.acc + (state.row + row) * kDim + part * kColumns + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          *reinterpret_cast<float2*>(target + n * 8) =
              make_float2(acc[m][n][2 * r], acc[m][n][2 * r + 1]);
        }
        if (lane % 4 == 0 && part == 0) {
          state.max[state.row + row] = highest[m][r];
          state.sum[state.row + row] = total[m][r];
        }
      }
    }
  }
  if (last) return;
  __syncthreads();
  if (threadIdx.x == 0) set_turn(plan.turns + unit.tile - plan.whole, unit.piece + 1);
}

// One element type, head dim and tile height of the kernel.
template <typename T, int kDim, int kRowTiles, TileSize kTileSize = TileSize::kLarge>
struct Forward {
  using Shape = ForwardShape<kDim, kRowTiles, kTileSize>;
  static constexpr auto kKernel = forward_kernel<T, kDim, kRowTiles, kTileSize>;
  static constexpr int kThreads = Shape::Parts::kThreads;

  static ForwardPlan plan(const ForwardParams& params) {
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Shape::kSharedBytes),
               "cudaFuncSetAttribute");
    int blocks = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, kThreads,
                                                             Shape::kSharedBytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return ForwardPlan(params, Shape::kRows,
                       blocks * device::device_attribute(cudaDevAttrMultiProcessorCount));
  }

  static void launch(const ForwardParams& params) {
    ForwardPlan plan = Forward::plan(params);
    if (params.workspace == nullptr) {
      plan.keep_whole();
    } else {
      expect(params.workspace_bytes >= plan.bytes, "workspace",
             concat("at least ", plan.bytes, " bytes"), params.workspace_bytes);
    }
    const auto stream = static_cast<cudaStream_t>(params.stream);
    if (plan.turns != nullptr) {
      check_cuda(cudaMemsetAsync(plan.next_unit, 0, plan.clear_bytes, stream), "cudaMemsetAsync");
    }
    kKernel<<<plan.units, kThreads, Shape::kSharedBytes, stream>>>(params, plan);
    check_launch("attention_forward (sm80)");
  }
};

// Calls function(Forward<...>{}) with the kernel to use. A tile of queries must not cross a query
// block where each block has its own page list.
template <typename T, typename Function>
auto with_forward(const ForwardParams& params, TileSize size, Function&& function) {
  if (size == TileSize::kSmall) {
    return params.shape.head_dim == 256 ? function(Forward<T, 256, 1, TileSize::kSmall>{})
                                        : function(Forward<T, 512, 1, TileSize::kSmall>{});
  }
  const bool low = params.past.selection != nullptr && params.shape.page_size < 128;
  switch (params.shape.head_dim) {
    case 64: return low ? function(Forward<T, 64, 1>{}) : function(Forward<T, 64, 2>{});
    case 256: return function(Forward<T, 256, 1>{});  // sums of 128 registers a row tile
    case 512: return function(Forward<T, 512, 1>{});
    case 96: return low ? function(Forward<T, 96, 1>{}) : function(Forward<T, 96, 2>{});
    default: return low ? function(Forward<T, 128, 1>{}) : function(Forward<T, 128, 2>{});
  }
}

template <typename T>
void launch_forward(const ForwardParams& params, TileSize size) {
  with_forward<T>(params, size, [&](auto forward) { forward.launch(params); });
}

template <typename T>
int64_t forward_workspace(const ForwardParams& params, TileSize size) {
  return with_forward<T>(params, size, [&](auto forward) { return forward.plan(params).bytes; });
}

}  // namespace oomb::attention::sm80

#pragma once

// The whole gradient in one pass of five products. A block of eight warps owns 128 keys of one kv
// head, their K and V in shared memory; queries and dO of all heads of the group stream through two
// stages. A warp has 16 of the keys; per step of 64 queries it computes, transposed as in the dK,
// dV pass,
//
//   S^T = K Q^T, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q
//
// and dQ = dS K of the step before, 32 queries x a quarter of the columns, from the dS^T that all
// warps left in shared memory: so one barrier per step is enough, and between two of them warps
// drift apart, until one's exponentials run beside the other's products.
//
//   | K 128 | V 128 | Q0 dO0 64 | Q1 dO1 64 | dS0 dS1 |
//
// dQ is added up in fp32 in memory. Where the order is fixed, a block's part waits for its turn
// (QueryStep::dq_order); blocks side by side trail each other by some steps. Units are handed out
// in an order in which every wait is for an earlier unit. Neither a look at a turn nor passing it
// on may hold up the warps, which meet at every step: one of them looks while there is still all of
// the step to do, and passes a turn on when the sums it stands for have long arrived.

#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/dq_tile.cuh"
#include "attention/sm80/key_block.cuh"
#include "attention/sm80/loads.cuh"
#include "attention/sm80/one_pass.h"
#include "attention/sm80/query_steps.cuh"
#include "attention/sm80/soft_cap.cuh"
#include "attention/sm80/turns.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

template <int kDim>
struct OnePass {
  using Tile = device::Tile<kDim>;
  using ScoreTile = device::Tile<kQueries>;  // of dS^T: a row is a key
  static constexpr int kThreads = 32 * kOnePassWarps;
  static constexpr int kKeyBytes = Tile::bytes(kOnePassKeys);
  static constexpr int kMatrixBytes = Tile::bytes(kQueries);
  static constexpr int kStages = 2 * kKeyBytes;  // where the stages begin
  static constexpr int kLse = 2 * kMatrixBytes;  // within a stage
  static constexpr int kDelta = kLse + kQueries * 4;
  static constexpr int kStageBytes = kDelta + kQueries * 4;
  static constexpr int kScores = kStages + 2 * kStageBytes;
  static constexpr int kScoreBytes = ScoreTile::bytes(kOnePassKeys);
  static_assert(kScores + 2 * kScoreBytes == kOnePassSharedBytes<kDim>);
};

// Grid: own key tiles and pages, of every kv head and sequence.
template <typename T, int kDim>
__global__ void __launch_bounds__(OnePass<kDim>::kThreads, 1)
    one_pass_kernel(const BackwardParams p, const BackwardPlan plan, const OnePassGrid grid) {
  using Pass = OnePass<kDim>;
  using Tile = device::Tile<kDim>;
  constexpr int kKeys = kOnePassKeys;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ QuerySteps<kKeys> steps;
  __shared__ KeyBlock unit;  // leaves the registers to the main loop
  __shared__ int ready;      // a step whose turn has come
  const uint32_t shared = device::shared_address(shared_memory);

  {
    if (threadIdx.x == 0) {
      ready = -1;
      const int index = plan.turns != nullptr ? atomicAdd(plan.next_unit, 1) : blockIdx.x;
      const int tiles = grid.own_tiles + grid.pages;
      const int first_head = index / (tiles * grid.heads_together) * grid.heads_together;
      const int head = first_head + index % grid.heads_together;
      const int tile = index / grid.heads_together % tiles;
      const int kv_heads = static_cast<int>(p.shape.kv_heads);
      unit.batch = head / kv_heads;
      unit.kv_head = head % kv_heads;
      unit.own = tile < grid.own_tiles;
      unit.row0 = unit.own ? (grid.own_tiles - 1 - tile) * kKeys : 0;
      unit.page = unit.own ? -1 : tile - grid.own_tiles;
    }
    __syncthreads();
  }
  KeyBlock block = unit;
  KeySource<T> keys;
  if (!find_keys<T, kDim, kKeys>(p, plan, block, keys)) return;

  load_rows<kDim, kKeys, Pass::kThreads>(shared, keys.k, keys.k_stride, keys.rows);
  load_rows<kDim, kKeys, Pass::kThreads>(shared + Pass::kKeyBytes, keys.v, keys.v_stride,
                                         keys.rows);
  __syncthreads();  // everybody has read the unit
  if (threadIdx.x == 0) {
    unit.page = block.page;
    steps.start(p, plan, block.batch, block.kv_head, keys.first, keys.end,
                block.own ? block.row0 / kQueries : 0, keys.query_blocks);
  }
  __syncthreads();

  const auto step_at = [&](int index) -> const QueryStep& {
    return steps.ring[index % steps.kRing];
  };
  const auto start_copies = [&](int index) {
    const QueryStep& step = step_at(index);
    if (step.rows == 0) return;
    const int thread = thread_index();
    const int offset = Pass::kStages + index % 2 * Pass::kStageBytes;
    load_rows<kDim, kQueries, Pass::kThreads>(shared + offset, static_cast<const T*>(step.q),
                                              p.q_strides.token, step.rows, thread);
    load_rows<kDim, kQueries, Pass::kThreads>(shared + offset + Pass::kMatrixBytes,
                                              static_cast<const T*>(step.d_o), p.do_strides.token,
                                              step.rows, thread);
    if (thread >= 2 * kQueries) return;
    const int row = thread % kQueries;
    const bool is_lse = thread < kQueries;
    const bool inside = row < step.rows;
    const float* source = (is_lse ? plan.lse : static_cast<const float*>(p.delta)) + step.row;
    copy_word(shared_memory + offset + (is_lse ? Pass::kLse : Pass::kDelta) + row * 4,
              source + (inside ? row : 0), inside);
  };

  // dQ of a step whose dS^T lies in shared memory.
  const auto add_dq = [&](int index) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    constexpr int kColumns = DqTile<kDim>::kColumns;
    const uint32_t score_base =
        shared + Pass::kScores + index % 2 * Pass::kScoreBytes + Pass::ScoreTile::block_b(lane);
    const int query = DqTile<kDim>::first_row(warp) * 2;
    const uint32_t key_base = shared + Tile::block_a(lane);
    const int column = DqTile<kDim>::first_column(warp) * 2;
    float dq[2][kColumns / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        device::load_matrices_transposed(
            a[m], (score_base ^ (query + m * 32)) + i * 16 * Pass::ScoreTile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b,
                                         (key_base ^ (column + n * 32)) + i * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          device::multiply<T>(dq[m][2 * n], a[m], b[0], b[1]);
          device::multiply<T>(dq[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    const QueryStep& step = step_at(index);
    if (plan.turns != nullptr) {
      if (lane == 0 && load_acquire_shared(&ready) != index) {
        wait_for_turn(plan.turns + step.dq_tile, step.dq_order);
      }
      __syncwarp();
    }
    DqTile<kDim>::add(plan.dq + step.row * kDim, warp, lane, step.rows, dq);
  };
  // One thread calls these: the one early in the step that adds, the other when everybody's part is
  // under way.
  const auto look_at_turn = [&](int index) {
    const QueryStep& step = step_at(index);
    if (turn_of(plan.turns + step.dq_tile) >= step.dq_order) store_release_shared(&ready, index);
  };
  const auto pass_turn = [&](int index) {
    const QueryStep& step = step_at(index);
    set_turn(plan.turns + step.dq_tile, step.dq_order + 1);
  };

  start_copies(0);
  device::commit_copies();

  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  const float scale = exponent_scale(p);
  int index = 0;
  for (; step_at(index).rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    if (lane == 0 && warp == index % kOnePassWarps) steps.describe(p, plan, index + 2);
    if (plan.turns != nullptr && index >= 1 && lane == 0 && warp == (index + 2) % kOnePassWarps) {
      look_at_turn(index - 1);
    }
    device::commit_copies();
    const uint32_t stage = shared + Pass::kStages + index % 2 * Pass::kStageBytes;
    const uint32_t query_base = stage + Tile::block_b(lane);
    const uint32_t query_columns = stage + Tile::block_a(lane);
    const uint32_t key_base = shared + Tile::block_a(lane) + warp * 16 * Tile::kRowBytes;

    float s[kQueries / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t a[4];
      device::load_matrices(a, key_base ^ (i * 32));
#pragma unroll
      for (int n = 0; n < kQueries / 16; ++n) {
        uint32_t b[4];
        device::load_matrices(b, (query_base ^ (i * 32)) + n * 16 * Tile::kRowBytes);
        device::multiply<T>(s[2 * n], a, b[0], b[1]);
        device::multiply<T>(s[2 * n + 1], a, b[2], b[3]);
      }
    }
    cap_scores(p, s);
    if (step_at(index).masked) {
      const int key = steps.key_first + warp * 16 + lane / 4;
      const int query = step_at(index).first + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const auto range =
              device::visible_keys(p.shape, p.visibility, static_cast<int>(p.past.num_tokens),
                                   steps.batch, query + n * 8 + c);
          const int end = min(range.end, steps.key_end);
          if (key < range.begin || key >= end) s[n][c] = -INFINITY;
          if (key + 8 < range.begin || key + 8 >= end) s[n][2 + c] = -INFINITY;
        }
      }
    }
    uint32_t probabilities[kQueries / 16][4], ds[kQueries / 16][4];
    const uint32_t score_words = shared + Pass::kScores + index % 2 * Pass::kScoreBytes +
                                 Pass::ScoreTile::offset(warp * 16 + lane / 4, 0) + (lane % 4) * 4;
    float dp[kQueries / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t a[4];
      device::load_matrices(a, (key_base ^ (i * 32)) + Pass::kKeyBytes);
#pragma unroll
      for (int n = 0; n < kQueries / 16; ++n) {
        uint32_t b[4];
        device::load_matrices(
            b, (query_base ^ (i * 32)) + Pass::kMatrixBytes + n * 16 * Tile::kRowBytes);
        device::multiply<T>(dp[2 * n], a, b[0], b[1]);
        device::multiply<T>(dp[2 * n + 1], a, b[2], b[3]);
      }
    }
    cap_by_column(p, s, dp, stage + Pass::kDelta + (lane % 4) * 8);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      // The pair of queries that this lane's columns belong to.
      const uint32_t pair = stage + (n * 8 + (lane % 4) * 2) * 4;
      const float2 lse = device::load_pair(pair + Pass::kLse);
      const float2 delta = device::load_pair(pair + Pass::kDelta);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float p0 = device::exp2_fast(fmaf(s[n][2 * r], scale, -lse.x));
        const float p1 = device::exp2_fast(fmaf(s[n][2 * r + 1], scale, -lse.y));
        const uint32_t packed =
            device::pack<T>(p0 * (dp[n][2 * r] - delta.x), p1 * (dp[n][2 * r + 1] - delta.y));
        probabilities[n / 2][n % 2 * 2 + r] = device::pack<T>(p0, p1);
        ds[n / 2][n % 2 * 2 + r] = packed;
        device::store_word((score_words ^ (n * 16)) + r * 8 * Pass::ScoreTile::kRowBytes, packed);
      }
    }
#pragma unroll
    for (int part = 0; part < kQueries / 16; ++part) {
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(
            b, (query_columns ^ (n * 32)) + part * 16 * Tile::kRowBytes + Pass::kMatrixBytes);
        device::multiply<T>(dv[2 * n], probabilities[part], b[0], b[1]);
        device::multiply<T>(dv[2 * n + 1], probabilities[part], b[2], b[3]);
      }
    }
#pragma unroll
    for (int part = 0; part < kQueries / 16; ++part) {
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b,
                                         (query_columns ^ (n * 32)) + part * 16 * Tile::kRowBytes);
        device::multiply<T>(dk[2 * n], ds[part], b[0], b[1]);
        device::multiply<T>(dk[2 * n + 1], ds[part], b[2], b[3]);
      }
    }
    if (plan.turns != nullptr && index >= 2 && lane == 0 && warp == (index + 4) % kOnePassWarps) {
      pass_turn(index - 2);
    }
    if (index > 0) add_dq(index - 1);
  }
  if (index > 0) {
    __syncthreads();
    if (plan.turns != nullptr && index >= 2 && threadIdx.x == 0) pass_turn(index - 2);
    add_dq(index - 1);
    if (plan.turns != nullptr) {
      __syncthreads();
      if (threadIdx.x == 0) pass_turn(index - 1);
    }
  }

  write_gradient<T, kDim>(p, unit, steps.key_end, dk, dv);
}

template <typename T, int kDim>
void launch_one_pass(const BackwardParams& params, const BackwardPlan& plan) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const OnePassGrid grid(params, plan);
  if (grid.units > 0) {
    const auto kernel = one_pass_kernel<T, kDim>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kOnePassSharedBytes<kDim>),
               "cudaFuncSetAttribute");
    kernel<<<grid.units, OnePass<kDim>::kThreads, kOnePassSharedBytes<kDim>, stream>>>(params, plan,
                                                                                       grid);
    check_launch("attention_backward in one pass (sm80)");
  }
  if (!params.last_wave) return;
  const dim3 tiles(plan.query_tiles, params.shape.query_heads, params.shape.batch);
  finish_dq_kernel<T, kDim><<<tiles, 32 * kOnePassWarps, 0, stream>>>(params, plan.dq);
  check_launch("attention_backward dQ (sm80)");
}

}  // namespace oomb::attention::sm80

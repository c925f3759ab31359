#pragma once

// A computing warpgroup of the backward's main kernel.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_rows.cuh"
#include "attention/sm90/backward_shared.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/wgmma.h"

namespace oomb::attention::sm90 {

// dQ (64 queries x half of the head dimension) = dS K.
template <int kDim, int kKeys>
__device__ __forceinline__ void multiply_dq(float (&dq)[kDim / 4], const __nv_bfloat16* ds,
                                            const __nv_bfloat16* k, int half) {
  const uint64_t a = operand_mn_major(ds, kKeys * 128);
  if constexpr (kDim == 128) {
    const uint64_t b = operand_mn_major(k + half * kKeys * 64, kKeys * 128);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      wgmma_ss<64, true, true>(dq, operand_advance(a, i * 2048), operand_advance(b, i * 2048),
                               i > 0);
    }
  } else {
    const uint64_t b = operand_mn_major(k + half * 32, kKeys * 128);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      wgmma_ss_n32_transposed(dq, operand_advance(a, i * 2048), operand_advance(b, i * 2048),
                              i > 0);
    }
  }
}

// One of the two computing warpgroups.
template <int kDim, int kKeys, bool kSums>
struct Computer {
  using Shared = BackwardShared<kDim, kKeys, kSums>;

  const BackwardKernelArgs& args;
  Shared& shared;
  const int half;  // which 64 of the key rows, and which columns of dQ
  int dq_count = 0;
  int step = 0;

  __device__ Computer(const BackwardKernelArgs& args, Shared& shared, int half)
      : args(args), shared(shared), half(half) {}

  // Hands a dQ tile to the adding warp: boxes of 32 floats x 64 rows, swizzled.
  __device__ void hand_over(const float (&dq)[kDim / 4], const StepInfo& info) {
    barrier_wait(&shared.dq_empty[half], (dq_count & 1) ^ 1);
    ++dq_count;
    const Place at;
    const int row = at.row();
    char* base = reinterpret_cast<char*>(shared.dq[half]) + row * 128 + (at.lane & 1) * 8;
    const int piece = at.lane % 4 / 2;
    // Odd rows go through the columns in another order, so that the rows of a half warp fall on
    // different banks.
    const bool odd = row & 1;
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      const int other = j ^ 2;
      char* place = base + j / 4 * (kQueryRows * 128) +
                    ((((odd ? other : j) % 4 * 2 + piece) ^ (row & 7)) << 4);
      *reinterpret_cast<float2*>(place) =
          make_float2(odd ? dq[4 * other] : dq[4 * j], odd ? dq[4 * other + 1] : dq[4 * j + 1]);
      *reinterpret_cast<float2*>(place + 8 * 128) = make_float2(
          odd ? dq[4 * other + 2] : dq[4 * j + 2], odd ? dq[4 * other + 3] : dq[4 * j + 3]);
    }
    if (at.warp == 0 && at.lane == 0) shared.dq_info[half] = info;
    fence_async_shared();
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&shared.dq_full[half]);
  }

  // Writes this warpgroup's part of dS^T: 64 key rows of 64 queries, swizzled.
  __device__ void share_ds(const uint32_t (&packed)[16], int stage) {
    // Lane l writes row l % 8 of matrix l / 8; the matrices of a 16 x 16 block are (rows 0,
    // columns 0), (8, 0), (0, 8), (8, 8).
    const Place at;
    const int row = half * 64 + at.warp * 16 + at.lane % 16;
    const uint32_t target = shared_address(shared.ds[stage]) + row * 128;
    if constexpr (kSums) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_matrices(target + (((2 * i + at.lane / 16) ^ (at.lane & 7)) << 4), packed[4 * i],
                       packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
      }
      fence_async_shared();
    }
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&shared.ds_full[stage]);
  }

  __device__ void wait_ds(int step) {
    barrier_wait(&shared.ds_full[step & (kDsStages - 1)], step / kDsStages & 1);
  }

  // All steps of a unit. False if there are none.
  __device__ __forceinline__ bool walk(const Unit& unit, float (&dk)[kDim / 2],
                                       float (&dv)[kDim / 2]) {
    const uint64_t k_rows = operand_k_major(shared.k + half * 64 * 64);
    const uint64_t v_rows = operand_k_major(shared.v + half * 64 * 64);

    bool lagging = false;  // whether a dS waits to be multiplied
    while (true) {
      const int stage = step % kStages;
      const uint32_t parity = step / kStages & 1;
      barrier_wait(&shared.q_full[stage], parity);
      const StepInfo& info = shared.steps[step % kSteps];
      if (info.row < 0) break;

      // Declared here, so that none of them lives on into the next step.
      float s[32];
      float dp[32];
      float dq[kDim / 4];
      uint32_t packed_p[16];
      uint32_t packed_ds[16];

      const uint64_t q_rows = operand_k_major(shared.q[stage]);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        wgmma_ss<64>(s, operand_advance(k_rows, operand_k_step(d, kKeys)),
                     operand_advance(q_rows, operand_k_step(d, kQueryRows)), d > 0);
      }
      wgmma_commit();
      barrier_wait(&shared.do_full[stage], parity);
      const uint64_t do_rows = operand_k_major(shared.d_o[stage]);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        wgmma_ss<64>(dp, operand_advance(v_rows, operand_k_step(d, kKeys)),
                     operand_advance(do_rows, operand_k_step(d, kQueryRows)), d > 0);
      }
      wgmma_commit();

      wgmma_wait<1>();  // S, and dK of the step before
      if (lagging && Place().lane == 0) barrier_arrive(&shared.q_empty[stage ^ 1]);
      if (info.key_range & kMasked) mask_scores<kKeys>(s, args, info, unit, half * 64);
      const int column0 = Place().column();
      make_probabilities(s, shared.lse[stage], args, column0);
      // Here, although dS is multiplied later: ptxas moves the exponentials behind the wait for dP
      // if nothing but arithmetic lies between, and then nothing runs beside that product.
      if constexpr (kSums) {
        if (lagging) wait_ds(step - 1);
      } else {
        barrier_wait(&shared.q_full[stage], parity);  // passes at once
      }
      wgmma_wait<0>();  // dP
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.delta[stage][8 * j + column0]);
        packed_p[2 * j] = pack_bf16(s[4 * j], s[4 * j + 1]);
        packed_p[2 * j + 1] = pack_bf16(s[4 * j + 2], s[4 * j + 3]);
        packed_ds[2 * j] =
            pack_bf16(s[4 * j] * (dp[4 * j] - delta.x), s[4 * j + 1] * (dp[4 * j + 1] - delta.y));
        packed_ds[2 * j + 1] = pack_bf16(s[4 * j + 2] * (dp[4 * j + 2] - delta.x),
                                         s[4 * j + 3] * (dp[4 * j + 3] - delta.y));
      }
      share_ds(packed_ds, step % kDsStages);

      if constexpr (kSums) {
        // The first step has no dS before it; its product is not used.
        wgmma_fence();
        multiply_dq<kDim, kKeys>(dq, shared.ds[(step - 1) & (kDsStages - 1)], shared.k, half);
        wgmma_commit();
      } else {
        wgmma_fence();
      }
      const uint64_t do_columns = operand_mn_major(shared.d_o[stage], kQueryRows * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_rs<kDim, true>(dv, packed_p[4 * i], packed_p[4 * i + 1], packed_p[4 * i + 2],
                             packed_p[4 * i + 3], operand_advance(do_columns, i * 2048), 1);
      }
      wgmma_commit();
      const uint64_t q_columns = operand_mn_major(shared.q[stage], kQueryRows * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_rs<kDim, true>(dk, packed_ds[4 * i], packed_ds[4 * i + 1], packed_ds[4 * i + 2],
                             packed_ds[4 * i + 3], operand_advance(q_columns, i * 2048), 1);
      }
      wgmma_commit();
      if constexpr (kSums) {
        wgmma_wait<2>();  // dQ
        if (lagging) hand_over(dq, shared.steps[(step - 1) & (kSteps - 1)]);
      }
      wgmma_wait<1>();  // dV
      if (Place().lane == 0) barrier_arrive(&shared.do_empty[stage]);

      lagging = true;
      ++step;
    }

    // End of the unit: V is free, the last dQ is due.
    const int stage = step % kStages;
    barrier_wait(&shared.do_full[stage], step / kStages & 1);
    const int lane = Place().lane;
    if (lane == 0) barrier_arrive(&shared.v_empty);
    float dq[kDim / 4];
    if constexpr (kSums) {
      if (lagging) wait_ds(step - 1);
      wgmma_fence();
      multiply_dq<kDim, kKeys>(dq, shared.ds[(step - 1) & (kDsStages - 1)], shared.k, half);
      wgmma_commit();
    }
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(&shared.k_empty);
      if (lagging) barrier_arrive(&shared.q_empty[stage ^ 1]);
    }
    if constexpr (kSums) {
      if (lagging) hand_over(dq, shared.steps[(step - 1) & (kSteps - 1)]);
    }
    if (lane == 0) {
      barrier_arrive(&shared.q_empty[stage]);
      barrier_arrive(&shared.do_empty[stage]);
      barrier_arrive(&shared.ds_full[step % kDsStages]);
    }
    ++step;
    return lagging;
  }

  __device__ void run() {
    float dk[kDim / 2];
    float dv[kDim / 2];
    for (int count = 0;; ++count) {
      barrier_wait(&shared.k_full, count & 1);
      const Unit& unit = shared.units[count & 1];
      if (unit.own < 0) break;
      barrier_wait(&shared.v_full, count & 1);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.0f;
      const bool any = walk(unit, dk, dv);
      const BackwardParams& params = args.params;
      const GradientRows<kDim> rows{params, unit, half * 64};
      const float scale = static_cast<float>(params.scale);
      if (unit.own) {
        rows.template write_own<kKeys>(params.dk, params.dk_strides, dk, scale);
        rows.template write_own<kKeys>(params.dv, params.dv_strides, dv, 1.0f);
      } else {
        const PageTurn turn(args, unit, half);
        if (any) {
          rows.add_page(0, dk, scale);
          rows.add_page(1, dv, 1.0f);
        }
      }
    }
    if constexpr (kSums) {
      barrier_wait(&shared.dq_empty[half], (dq_count & 1) ^ 1);
      const Place at;
      if (at.warp == 0 && at.lane == 0) shared.dq_info[half].row = -1;
      __syncwarp();
      if (at.lane == 0) barrier_arrive(&shared.dq_full[half]);
    }
  }
};

}  // namespace oomb::attention::sm90

#pragma once

// The two computing warpgroups of the backward's main kernel at head dim 256; see
// backward_wide_kernel.cuh.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_rows.cuh"
#include "attention/sm90/backward_wide_shared.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/wgmma.h"

namespace oomb::attention::sm90 {

// 64 keys x 64 queries = A B^T over the head dimension, both with rows of it.
__device__ __forceinline__ void wide_product(float (&d)[32], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < kWideDim; i += 16) {
    wgmma_ss<64>(d, operand_advance(a, operand_k_step(i, 64)),
                 operand_advance(b, operand_k_step(i, 64)), i > 0);
  }
  wgmma_commit();
}

// 64 keys x head dimension += A B: A 64 keys x 64 queries in registers, B the queries' rows.
__device__ __forceinline__ void wide_sum(float (&d)[kWideDim / 2], const uint32_t (&a)[16],
                                         const __nv_bfloat16* rows) {
  const uint64_t b = operand_mn_major(rows, kQueryRows * 128);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wgmma_rs<kWideDim, true>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                             operand_advance(b, i * 2048), 1);
  }
  wgmma_commit();
}

// kValues: the warpgroup that owns dV and makes P; otherwise the one that owns dK.
template <bool kValues>
struct WideComputer {
  const BackwardKernelArgs& args;
  WideShared& shared;
  uint32_t step = 0;    // of all, with those that end units
  uint32_t passed = 0;  // P handed over

  __device__ WideComputer(const BackwardKernelArgs& args, WideShared& shared)
      : args(args), shared(shared) {}

  // One arrival per warp, after all its lanes are done.
  __device__ __forceinline__ void release(uint64_t* barrier) const {
    __syncwarp();
    if (Place().lane == 0) barrier_arrive(barrier);
  }

  // P of a step as an operand, and handed to the other warpgroup in fp32.
  __device__ __forceinline__ void make_p(uint32_t (&packed)[16], float (&s)[32],
                                         const StepInfo& info, const Unit& unit, int stage) {
    if (info.key_range & kMasked) mask_scores<kWideKeys>(s, args, info, unit, 0);
    make_probabilities(s, shared.lse[stage], args, Place().column());
    release(&shared.q_empty[stage]);  // S and lse are read
    const int buffer = passed % 2;
    barrier_wait(&shared.p_empty[buffer], (passed / 2 & 1) ^ 1);
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      shared.p[buffer][j][thread] = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
    }
    release(&shared.p_full[buffer]);
    ++passed;
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  // dS of a step as an operand.
  __device__ __forceinline__ void make_ds(uint32_t (&packed)[16], const float (&dp)[32],
                                          int stage) {
    const int buffer = passed % 2;
    barrier_wait(&shared.p_full[buffer], passed / 2 & 1);
    const int thread = threadIdx.x % 128;
    const int column0 = Place().column();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 p = shared.p[buffer][j][thread];
      const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][8 * j + column0]);
      packed[2 * j] = pack_bf16(p.x * (dp[4 * j] - delta.x), p.y * (dp[4 * j + 1] - delta.y));
      packed[2 * j + 1] =
          pack_bf16(p.z * (dp[4 * j + 2] - delta.x), p.w * (dp[4 * j + 3] - delta.y));
    }
    release(&shared.p_empty[buffer]);
    release(&shared.do_empty[stage]);  // dP and delta are read
    ++passed;
  }

  // All steps of a unit. False if there are none.
  __device__ __forceinline__ bool walk(const Unit& unit, float (&sum)[kWideDim / 2]) {
    const uint64_t own_rows = operand_k_major(kValues ? shared.k : shared.v);
    // Whose stage of the step before is free once the sum has it.
    uint64_t* const summed = kValues ? shared.do_empty : shared.q_empty;
    bool lagging = false;  // whether the last step's sum may still be under way
    uint32_t stage;
    while (true) {
      stage = step % kStages;
      const uint32_t parity = step / kStages & 1;
      barrier_wait(&shared.q_full[stage], parity);
      const StepInfo& info = shared.steps[step % kSteps];
      if (info.row < 0) break;
      if constexpr (!kValues) barrier_wait(&shared.do_full[stage], parity);

      // Declared here, so that none of them lives on into the next step.
      float s[32];  // S or dP
      uint32_t packed[16];
      wgmma_fence();
      wide_product(s, own_rows, operand_k_major(kValues ? shared.q[stage] : shared.d_o[stage]));
      wgmma_wait<1>();  // the sum of the step before
      if (lagging) release(&summed[stage ^ 1]);
      wgmma_wait<0>();
      pin_registers(s);
      if constexpr (kValues) {
        make_p(packed, s, info, unit, stage);
        barrier_wait(&shared.do_full[stage], parity);
      } else {
        make_ds(packed, s, stage);
      }
      wgmma_fence();
      wide_sum(sum, packed, kValues ? shared.d_o[stage] : shared.q[stage]);
      lagging = true;
      ++step;
    }
    wgmma_wait<0>();
    pin_registers(sum);
    barrier_wait(&shared.do_full[stage], step / kStages & 1);
    if (lagging) release(&summed[stage ^ 1]);
    release(&shared.k_empty);
    release(&shared.v_empty);
    release(&shared.q_empty[stage]);
    release(&shared.do_empty[stage]);
    ++step;
    return lagging;
  }

  __device__ __forceinline__ void run() {
    const BackwardParams& params = args.params;
    const float scale = kValues ? 1.0f : static_cast<float>(params.scale);
    float sum[kWideDim / 2];
    for (uint32_t count = 0;; ++count) {
      barrier_wait(&shared.k_full, count & 1);
      const Unit& unit = shared.units[count & 1];
      if (unit.own < 0) break;
      if constexpr (!kValues) barrier_wait(&shared.v_full, count & 1);
#pragma unroll
      for (int i = 0; i < kWideDim / 2; ++i) sum[i] = 0.0f;
      const bool any = walk(unit, sum);
      const GradientRows<kWideDim> rows{params, unit, 0};
      if (unit.own) {
        rows.template write_own<kWideKeys>(kValues ? params.dv : params.dk,
                                           kValues ? params.dv_strides : params.dk_strides, sum,
                                           scale);
      } else {
        const PageTurn turn(args, unit, kValues ? 1 : 0);
        if (any) rows.add_page(kValues ? 1 : 0, sum, scale);
      }
    }
  }
};

}  // namespace oomb::attention::sm90

#pragma once

// Shared memory of the backward's main kernel at head dim 256; see backward_wide_kernel.cuh.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_shared.cuh"
#include "attention/sm90/ptx/barrier.h"

namespace oomb::attention::sm90 {

inline constexpr int kWideDim = 256;
inline constexpr int kWideKeys = 64;  // of a unit

//   k, v            32 KiB each                64
//   q, d_o          2 stages of 32 KiB each   128
//   p               2 of 16 KiB                32    224 of 227 KiB
//   lse, delta      2 of 256 B each             1
// Who writes and who reads:
//   units                planner -> both
//   steps                planner -> loader, both
//   k · v                planner -> values' warpgroup · keys' warpgroup
//   q, d_o               loader -> both
//   lse · delta          loader -> values' warpgroup · keys' warpgroup
//   p                    values' warpgroup -> keys' warpgroup
template <>
struct BackwardShared<kWideDim, kWideKeys, false> {
  static constexpr int kTile = 64 * kWideDim;
  static constexpr int kWarps = 8;  // that compute; all of them leave everything

  alignas(1024) __nv_bfloat16 k[kTile];
  alignas(1024) __nv_bfloat16 v[kTile];
  alignas(1024) __nv_bfloat16 q[kStages][kTile];
  alignas(1024) __nv_bfloat16 d_o[kStages][kTile];
  float4 p[2][8][128];  // as a thread holds it: columns 8j .. of both its rows, by thread
  alignas(16) float lse[kStages][kQueryRows];
  alignas(16) float delta[kStages][kQueryRows];
  Unit units[2];  // the older one is still being written out while the next one starts
  StepInfo steps[kSteps];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t keys_settled, queries_settled;  // see hidden_rows.cuh
  uint64_t step_full[kSteps], step_empty[kSteps];
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
  uint64_t p_full[2], p_empty[2];
};

using WideShared = BackwardShared<kWideDim, kWideKeys, false>;

__device__ inline void init_barriers(WideShared& shared) {
  barrier_init(&shared.k_full, 1);
  barrier_init(&shared.v_full, 1);
  barrier_init(&shared.k_empty, WideShared::kWarps);
  barrier_init(&shared.v_empty, WideShared::kWarps);
  barrier_init(&shared.keys_settled, 1);
  barrier_init(&shared.queries_settled, 1);
  for (int i = 0; i < kStages; ++i) {
    barrier_init(&shared.q_full[i], 1);
    barrier_init(&shared.do_full[i], 1);
    barrier_init(&shared.q_empty[i], WideShared::kWarps);
    barrier_init(&shared.do_empty[i], WideShared::kWarps);
  }
  for (int i = 0; i < kSteps; ++i) {
    barrier_init(&shared.step_full[i], 1);
    barrier_init(&shared.step_empty[i], 1);
  }
  for (int i = 0; i < 2; ++i) {
    barrier_init(&shared.p_full[i], 4);
    barrier_init(&shared.p_empty[i], 4);
  }
}

}  // namespace oomb::attention::sm90

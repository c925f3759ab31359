#pragma once

// What the warpgroups of the backward's main kernel agree on: steps and shared memory.
// backward_kernel.cuh says how they work together.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "attention/sm90/ptx/barrier.h"

namespace oomb::attention::sm90 {

inline constexpr int kBackwardThreads = 384;
inline constexpr int kStages = 2;  // of Q and of dO
inline constexpr int kSteps = 8;   // records of steps: four in use, four ahead
inline constexpr int kDsStages =
    4;  // one warpgroup may write dS while the other reads the last two

// A step: one query tile of one head.
struct StepInfo {
  int32_t row;  // first query row; or one of the marks below
  int32_t head;
  int32_t batch;
  int32_t rank;        // parts of this dQ tile that come before
  uint32_t key_range;  // begin | end << 8 | kMasked .. of the unit's rows that may be seen
};
inline constexpr int32_t kUnitEnds = -1;
inline constexpr int32_t kAllDone = -2;
inline constexpr uint32_t kMasked = 1u << 16;  // some element is hidden
inline constexpr uint32_t kCausal = 1u << 17;
inline constexpr uint32_t kLower = 1u << 18;      // a window or a document begins inside the tile
inline constexpr uint32_t kEmptyRows = 1u << 19;  // some query sees nothing at all

// What one pipeline has in shared memory. Who writes and who reads:
//   units               planner -> computers
//   steps               planner -> loader, computers
//   k, v                planner -> computers
//   q, lse, d_o, delta  loader -> computers
//   ds                  computers -> computers
//   dq, dq_info         computers -> adders
template <int kDim, int kKeys, bool kSums>
struct BackwardShared {
  static constexpr int kKeyTile = kKeys * kDim;
  static constexpr int kQueryTile = kQueryRows * kDim;
  static constexpr int kWarps = kKeys / 16;  // that compute
  // Without sums nobody needs dS and dQ.
  static constexpr int kDsTile = kSums ? kKeys * kQueryRows : 1;
  static constexpr int kDqTile = kSums ? kQueryRows * kDim / 2 : 1;

  alignas(1024) __nv_bfloat16 k[kKeyTile];
  alignas(1024) __nv_bfloat16 v[kKeyTile];
  alignas(1024) __nv_bfloat16 q[kStages][kQueryTile];
  alignas(1024) __nv_bfloat16 d_o[kStages][kQueryTile];
  alignas(1024) __nv_bfloat16 ds[kDsStages][kDsTile];
  alignas(1024) float dq[2][kDqTile];  // per warpgroup: half of the columns
  alignas(16) float lse[kStages][kQueryRows];
  alignas(16) float delta[kStages][kQueryRows];
  Unit units[2];  // the older one is still being written out while the next one starts
  StepInfo steps[kSteps];
  StepInfo dq_info[2];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t keys_settled, queries_settled;  // see hidden_rows.cuh
  uint64_t step_full[kSteps], step_empty[kSteps];
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
  uint64_t ds_full[kDsStages];
  uint64_t dq_full[2], dq_empty[2];
};

template <int kDim, int kKeys, bool kSums>
__device__ inline void init_barriers(BackwardShared<kDim, kKeys, kSums>& shared) {
  constexpr int kWarps = BackwardShared<kDim, kKeys, kSums>::kWarps;
  barrier_init(&shared.k_full, 1);
  barrier_init(&shared.v_full, 1);
  barrier_init(&shared.k_empty, kWarps);
  barrier_init(&shared.v_empty, kWarps);
  barrier_init(&shared.keys_settled, 1);
  barrier_init(&shared.queries_settled, 1);
  for (int i = 0; i < kStages; ++i) {
    barrier_init(&shared.q_full[i], 1);
    barrier_init(&shared.do_full[i], 1);
    barrier_init(&shared.q_empty[i], kWarps);
    barrier_init(&shared.do_empty[i], kWarps);
  }
  for (int i = 0; i < kSteps; ++i) {
    barrier_init(&shared.step_full[i], 1);
    barrier_init(&shared.step_empty[i], 1);
  }
  for (int i = 0; i < kDsStages; ++i) barrier_init(&shared.ds_full[i], kWarps);
  for (int i = 0; i < 2; ++i) {
    barrier_init(&shared.dq_full[i], 4);
    barrier_init(&shared.dq_empty[i], 1);
  }
}

}  // namespace oomb::attention::sm90

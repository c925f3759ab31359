#pragma once

// The threads of the backward's main kernel that only copy: queries in, dQ out.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_shared.cuh"
#include "attention/sm90/hidden_rows.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"

namespace oomb::attention::sm90 {

// Loads each step's queries. One thread.
template <int kDim, typename Shared>
__device__ inline void load_queries(const BackwardKernelArgs& args, Shared& shared) {
  constexpr uint32_t kBytes = sizeof(shared.q[0]) + sizeof(shared.lse[0]);
  // Rows that see nothing become zeros. Each such step settles twice: queries, then gradients.
  const auto settle = [&](__nv_bfloat16* tile, const float* lse, uint64_t* full, uint32_t parity) {
    barrier_wait(&shared.queries_settled, parity);
#pragma unroll 1
    for (int row = 0; row < kQueryRows; ++row) {
      if (lse[row] == INFINITY) zero_row<kQueryRows, kDim>(tile, row, 0, 1);
    }
    fence_async_shared();
    barrier_arrive(full);
  };
  for (uint32_t step = 0;; ++step) {
    const uint32_t stage = step % kStages;
    const uint32_t free_parity = (step / kStages & 1) ^ 1;
    barrier_wait(&shared.step_full[step % kSteps], step / kSteps & 1);
    const StepInfo& info = shared.steps[step % kSteps];
    const int row = info.row;
    if (row == kAllDone) break;
    barrier_wait(&shared.q_empty[stage], free_parity);
    // The step two before has left its stage, so dQ of the one before that has been handed over:
    // nobody looks at the records of still earlier steps any more.
    if (step >= 2 * kStages) barrier_arrive(&shared.step_empty[(step - 2 * kStages) % kSteps]);
    if (row == kUnitEnds) {
      barrier_wait(&shared.do_empty[stage], free_parity);
      barrier_arrive(&shared.q_full[stage]);
      barrier_arrive(&shared.do_full[stage]);
      continue;
    }
    const int head = info.head;
    const int batch = info.batch;
    const bool hides = info.key_range & kEmptyRows;
    uint64_t* q_arrives = hides ? &shared.queries_settled : &shared.q_full[stage];
    uint64_t* do_arrives = hides ? &shared.queries_settled : &shared.do_full[stage];
    const int64_t offset =
        (static_cast<int64_t>(batch * static_cast<int>(args.params.shape.query_heads) + head) *
             args.query_tiles +
         row / kQueryRows) *
        kQueryRows;
    barrier_arrive_expect(q_arrives, kBytes);
    for (int d = 0; d < kDim; d += 64) {
      tma_load_4d(shared.q[stage] + d * kQueryRows, args.q, q_arrives, d, row, head, batch);
    }
    bulk_load(shared.lse[stage], args.workspace.lse + offset, q_arrives, sizeof(shared.lse[0]));
    if (hides) {
      settle(shared.q[stage], shared.lse[stage], &shared.q_full[stage], 0);
    }
    barrier_wait(&shared.do_empty[stage], free_parity);
    barrier_arrive_expect(do_arrives, kBytes);
    for (int d = 0; d < kDim; d += 64) {
      tma_load_4d(shared.d_o[stage] + d * kQueryRows, args.d_o, do_arrives, d, row, head, batch);
    }
    bulk_load(shared.delta[stage], args.workspace.delta + offset, do_arrives,
              sizeof(shared.delta[0]));
    if (hides) {
      settle(shared.d_o[stage], shared.lse[stage], &shared.do_full[stage], 1);
    }
  }
}

// Adds the dQ tiles of one warpgroup to memory. One thread.
template <int kDim, typename Shared>
__device__ inline void add_queries(const BackwardKernelArgs& args, Shared& shared, int half) {
  const CacheHint hint = args.tiling.sums_stay ? CacheHint::kEvictLast : CacheHint::kNormal;
  for (uint32_t count = 0;; ++count) {
    barrier_wait(&shared.dq_full[half], count & 1);
    const int row = shared.dq_info[half].row;
    if (row < 0) break;
    const int head = shared.dq_info[half].batch * static_cast<int>(args.params.shape.query_heads) +
                     shared.dq_info[half].head;
    const int rank = shared.dq_info[half].rank;
    int32_t* counter = args.workspace.counters +
                       (static_cast<int64_t>(head) * args.query_tiles + row / kQueryRows) * 2 +
                       half;
    if (args.params.deterministic) {
      while (load_acquire(counter) != rank) {
      }
      fence_async();
    }
    for (int d = 0; d < kDim / 2; d += 32) {
      tma_reduce_add_3d(args.dq, shared.dq[half] + d * kQueryRows, half * (kDim / 2) + d, row, head,
                        hint);
    }
    bulk_commit();
    bulk_wait_read<0>();
    barrier_arrive(&shared.dq_empty[half]);
    if (args.params.deterministic) {
      bulk_wait<0>();
      fence_async();
      store_release(counter, rank + 1);
    }
  }
  bulk_wait<0>();
}

}  // namespace oomb::attention::sm90

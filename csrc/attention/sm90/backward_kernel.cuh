#pragma once

// The fused backward of one key tile at a time; see backward_plan.h for units and ordering.
//
// Three warpgroups. Of the first, warp 0 plans units and steps and loads keys and values, warp 1
// loads queries, warps 2 and 3 add dQ to memory. The other two compute: each owns 64 of the unit's
// 128 key rows. With units of 64 rows (lists of pages of 64) the two work on a unit each and have
// nothing in common: two pipelines, the second one planned and loaded by warps 2 and 3.
//
//   kKeys = 128   planner 0, loader 1, adders 2, 3   computing warpgroups 1 and 2 share a unit
//   kKeys = 64    planner 0, loader 1                computing warpgroup 1
//                 planner 2, loader 3                computing warpgroup 2
//
// A step is one query tile of one head; in a step each of them does, with everything but dS in
// registers,
//
//   S^T  = K Q^T          64 keys x 64 queries
//   dP^T = V dO^T         beside it S^T becomes P^T, then dS^T = P^T (dP^T - delta)
//   dQ   = dS K           64 queries x D / 2, of the step before: dS passes through shared memory
//   dV  += P^T dO         beside it dQ is handed to the adding warp
//   dK  += dS^T Q         the same
//
// dQ lags a step behind so that no warpgroup waits for the other one's dS, and the two drift apart
// until one's exponentials run beside the other's matrix products. Without kSums there is no dQ
// (see backward_query.cuh).

#include <cstdint>

#include "attention/sm90/backward_computer.cuh"
#include "attention/sm90/backward_copies.cuh"
#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_planner.cuh"
#include "attention/sm90/backward_shared.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm90 {

template <int kDim, int kKeys, bool kSums>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_kernel(const __grid_constant__ BackwardKernelArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = BackwardShared<kDim, kKeys, kSums>;
  constexpr int kPipelines = 128 / kKeys;
  static_assert(!kSums || kPipelines == 1);
  Shared* shared = reinterpret_cast<Shared*>(memory);
  const int warpgroup = threadIdx.x / 128;
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kPipelines; ++i) init_barriers(shared[i]);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    registers_shrink<24>();
    const int pipeline = warp / 2 % kPipelines;
    if (warp % (4 / kPipelines) == 0) {
      Planner<kDim, kKeys, kSums>(args, shared[pipeline]).run();
    } else if (threadIdx.x % 32 == 0) {
      if (warp % (4 / kPipelines) == 1) {
        load_queries<kDim>(args, shared[pipeline]);
      } else if constexpr (kSums) {
        add_queries<kDim>(args, *shared, warp - 2);
      }
    }
  } else {
    registers_grow<240>();
    // The same in all lanes, also to the compiler.
    const int index = __shfl_sync(0xffffffff, warpgroup - 1, 0);
    Computer<kDim, kKeys, kSums>(args, shared[index % kPipelines], index / kPipelines).run();
  }
}

template <int kDim, int kKeys, bool kSums>
void launch_backward(const BackwardKernelArgs& args, int blocks) {
  constexpr int kBytes = 128 / kKeys * sizeof(BackwardShared<kDim, kKeys, kSums>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = backward_kernel<kDim, kKeys, kSums>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
  kernel<<<blocks, kBackwardThreads, kBytes, static_cast<cudaStream_t>(args.params.stream)>>>(args);
  check_launch("attention backward");
}

template <int kDim>
void launch_backward(const BackwardKernelArgs& args, int blocks) {
  if (!queries_apart(args.params)) {
    launch_backward<kDim, 128, true>(args, blocks);
  } else if (args.tiling.key_rows == 128) {
    launch_backward<kDim, 128, false>(args, blocks);
  } else {
    launch_backward<kDim, 64, false>(args, blocks);
  }
}

}  // namespace oomb::attention::sm90

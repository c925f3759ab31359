#pragma once

// The backward of keys and values at head dim 256, one key tile of 64 rows at a time; see
// backward_plan.h for units. dQ comes from the query kernel (backward_query.cuh), whose order is
// fixed.
//
// dK and dV of 64 keys take 128 registers of a thread each, so a warpgroup can hold one of them and
// no more. The first warpgroup plans (warp 0) and loads queries (warp 1); the other two share a
// unit by what they sum, and P goes from one to the other through shared memory. In a step, 64
// queries of one head:
//
//   values' warpgroup   S^T  = K Q^T    P^T = exp(..) ──┐   dV += P^T dO
//   keys' warpgroup     dP^T = V dO^T                   └▶  dS^T = P^T (dP^T - delta)   dK += dS^T
//   Q
//
// Each has two products a step, and its exponentials or the wait for them run beside the other's
// products. P^T and dS^T lie in registers as the products take them.

#include <cstdint>

#include "attention/sm90/backward_copies.cuh"
#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_planner.cuh"
#include "attention/sm90/backward_wide_computer.cuh"
#include "attention/sm90/backward_wide_shared.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm90 {

__global__ void __launch_bounds__(kBackwardThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardKernelArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  WideShared& shared = *reinterpret_cast<WideShared*>(memory);
  const int warpgroup = threadIdx.x / 128;
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    init_barriers(shared);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    registers_shrink<24>();
    if (warp == 0) {
      Planner<kWideDim, kWideKeys, false>(args, shared).run();
    } else if (threadIdx.x == 32) {
      load_queries<kWideDim>(args, shared);
    }
  } else {
    registers_grow<240>();
    // The same in all lanes, also to the compiler.
    if (__shfl_sync(0xffffffff, warpgroup, 0) == 1) {
      WideComputer<true>(args, shared).run();
    } else {
      WideComputer<false>(args, shared).run();
    }
  }
}

inline void launch_wide_backward(const BackwardKernelArgs& args, int blocks) {
  constexpr int kBytes = sizeof(WideShared);
  static_assert(kBytes <= 227 * 1024);
  check_cuda(cudaFuncSetAttribute(wide_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kBytes),
             "cudaFuncSetAttribute");
  wide_backward_kernel<<<blocks, kBackwardThreads, kBytes,
                         static_cast<cudaStream_t>(args.params.stream)>>>(args);
  check_launch("attention backward");
}

}  // namespace oomb::attention::sm90

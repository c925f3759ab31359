#pragma once

// Attention forward on sm_90a.
//
// A task is 64 query rows of one head against every tile of keys they may see: the own chunk from
// right to left, then past pages in ascending order, one page a tile. The order and the tiles
// depend on absolute positions alone, and the state after a tile is exactly what a wave carries
// (acc, max, sum in fp32), so waves may end at any page.
//
// A thread block works through units. A unit is one task per consumer warpgroup, all of one kv
// head, and as tasks are ordered by query block, nearly always of one query block, thus of one page
// list. With groups of 7 and 2 consumers:
//
//   pages of 128   block 0: [head 0 rows 0-63, head 0 rows 64-127] [head 1 ...] ...
//   pages of 64    block 0: [head 0, head 1] [2, 3] [4, 5] [6, and head 0 of block 1] ...
//
// A unit across two lists visits their union; each consumer passes over what it does not see.
//
//   warpgroup 0        one warp finds the tiles and loads Q, K, V; registers go to the others
//   warpgroup 1, 2..   consumers
//
//   consumer 0   | S1 PV0 |  softmax 1  | S2 PV1 |  softmax 2  | ...      S = Q K^T, PV = P V
//   consumer 1            | S1 PV0 |  softmax 1  | S2 PV1 |  ...
//
// S of a tile is issued together with P V of the tile before, so the tensor cores have work during
// the softmax, and named barriers make the consumers take turns in issuing.
//
// Shared memory: Q, then stages of K and of V, each with a full and an empty barrier. A stage of K
// carries a TileNote: which keys these are and how to treat them. A note kEnd closes a unit.

#include <cstdint>

#include "attention/sm90/forward_args.h"
#include "attention/sm90/forward_consumer.cuh"
#include "attention/sm90/forward_producer.cuh"
#include "attention/sm90/forward_shared.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::sm90 {

template <int kHeadDim, int kPageSize>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim, kPageSize>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shared = ForwardShared<kHeadDim, kPageSize>;
  using Config = ForwardConfig<kHeadDim, kPageSize>;
  extern __shared__ char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);

  const int32_t warpgroup = __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.settled, 1);
    shared.settled_phase = 0;
    barrier_init(&shared.q_empty, kConsumerWarps);
    for (int i = 0; i < Shared::kStages; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.k_empty[i], kConsumerWarps);
      barrier_init(&shared.v_empty[i], kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    registers_shrink<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      Producer<kHeadDim, kPageSize>{args, shared, static_cast<int32_t>(threadIdx.x)}.run();
    }
  } else {
    registers_grow<Config::kConsumerRegisters>();
    Consumer<kHeadDim, kPageSize>(args, shared, warpgroup - 1).run();
  }
}

template <int kHeadDim, int kPageSize>
void launch_forward(ForwardArgs args, void* stream) {
  using Config = ForwardConfig<kHeadDim, kPageSize>;
  const auto kernel = forward_kernel<kHeadDim, kPageSize>;
  constexpr int kBytes = sizeof(ForwardShared<kHeadDim, kPageSize>) + 1024;
  int device = 0, processors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
  const int64_t tasks = int64_t{args.blocks} * Config::kTasksPerBlock * args.group;
  args.units =
      static_cast<int32_t>(ceil_div(tasks, Config::kConsumers)) * args.batch * args.kv_heads;
  const int blocks = args.units < processors ? args.units : processors;
  kernel<<<blocks, Config::kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("sm90 attention forward");
}

}  // namespace oomb::attention::sm90

#pragma once

// What the forward's producer and consumers agree on: sizes, shared memory, and which rows a thread
// block has when. forward_kernel.cuh says how they work together.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/forward_args.h"

namespace oomb::attention::sm90 {

inline constexpr int kTaskRows = 64;
inline constexpr uint32_t kAllLanes = 0xffffffff;

template <int kHeadDim, int kPageSize>
struct ForwardConfig {
  // A page is a tile; at head dim 256 two, as the sums of a row alone take 128 registers a thread.
  static constexpr int kTileKeys = kHeadDim == 256 ? 64 : kPageSize;
  // Head dim 64 has half the matrix work per exponential: a third consumer hides more of them.
  static constexpr int kConsumers = kHeadDim == 64 ? 3 : 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // What the producer gives away must cover what the consumers take, or they wait for ever.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : kTileKeys == 64 ? 56 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kTileKeys == 64 ? 152 : 160;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * kLaunchRegisters);
  // 2 stages at head dim 256: Q 2 x 32 KiB, K 2 x 32 KiB, V 2 x 32 KiB, of 227 KiB.
  static constexpr int kStages = kTileKeys * kHeadDim >= 128 * 128 ? 2 : 4;
  // Reading Q from shared memory again for every tile costs power, and at 64 keys half the
  // bandwidth. At head dim 256 Q would take 64 registers more than there are.
  static constexpr bool kQueriesInRegisters =
      kHeadDim == 128 || (kHeadDim == 64 && kTileKeys == 64);
  // Where the tensor cores are not the limit, testing for factors of 1 is cheaper than multiplying.
  static constexpr bool kTestFactors = kHeadDim == 64 || kTileKeys == 64;
  static constexpr int kTasksPerBlock = kPageSize / kTaskRows;  // and head
  static constexpr int kLists = kTasksPerBlock % kConsumers == 0 ? 1 : kConsumers;
};

struct TileNote {
  int32_t key;  // absolute index of the tile's first key
  int32_t flags;
};

inline constexpr int kSeen = 1;  // by some row of consumer 0; kSeen << i: of consumer i
inline constexpr int kSeenByAny = 7;
inline constexpr int kMasked = 8;  // some key of it is hidden from some row
inline constexpr int kOwn = 16;    // of the own chunk
inline constexpr int kEnd = 32;    // no tile: the unit is complete

template <int kHeadDim, int kPageSize>
struct ForwardShared {
  using Config = ForwardConfig<kHeadDim, kPageSize>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kStages = Config::kStages;
  static constexpr int kTileElements = kTileKeys * kHeadDim;
  static constexpr uint32_t kTileBytes = kTileElements * 2;
  static constexpr int kTaskElements = kTaskRows * kHeadDim;

  __nv_bfloat16 q[Config::kConsumers][kTaskElements];
  __nv_bfloat16 k[kStages][kTileElements];
  __nv_bfloat16 v[kStages][kTileElements];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t settled;        // see hidden_rows.cuh
  uint32_t settled_phase;  // here, as the producer has no register to spare
  TileNote notes[kStages];
};

// Position in a ring of stages.
template <int kStages>
struct Ring {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

struct Task {
  int32_t head, row;  // first query row; at or past the chunk's end: no task
};

template <typename Config>
struct Unit {
  int32_t batch, kv_head;
  int32_t first_task;  // among those of this kv head

  // Longest first: late rows see more of the own chunk. With heads_outermost all thread blocks
  // stream the same kv head at a time.
  __device__ __forceinline__ Unit(const ForwardArgs& args, int32_t index) {
    const int32_t heads = args.batch * args.kv_heads;
    const int32_t per_head = args.units / heads;
    const int32_t flat = args.heads_outermost ? index / per_head : index % heads;
    first_task = (args.heads_outermost ? index % per_head : index / heads) * Config::kConsumers;
    batch = flat / args.kv_heads;
    kv_head = flat % args.kv_heads;
  }

  __device__ __forceinline__ int32_t block(const ForwardArgs& args, int consumer) const {
    constexpr int kHalves = Config::kTasksPerBlock;
    return args.blocks - 1 - (first_task + consumer) / (args.group * kHalves);
  }

  // Order: query block (descending), head, half of the block.
  __device__ __forceinline__ Task task(const ForwardArgs& args, int consumer) const {
    constexpr int kHalves = Config::kTasksPerBlock;
    const int32_t index = first_task + consumer;
    const int32_t own_block = block(args, consumer);
    const int32_t inner = index % (args.group * kHalves);
    const int32_t row = (own_block * kHalves + inner % kHalves) * kTaskRows;
    return {kv_head * args.group + inner / kHalves, own_block < 0 ? args.chunk : row};
  }
};

// Unit of a thread block's turn: forth and back over the blocks, so that no block always draws the
// longest of a round. May lie past the last unit.
__device__ __forceinline__ int32_t unit_of_turn(int32_t turn) {
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  return turn * blocks + (turn % 2 ? blocks - 1 - block : block);
}

// First key a row may see by documents and window.
__device__ __forceinline__ int32_t first_visible_key(const ForwardArgs& args, int32_t batch,
                                                     int32_t row) {
  int32_t first = 0;
  if (args.window > 0) first = max(first, args.num_past + row - args.window + 1);
  if (args.first_key != nullptr) {
    first = max(first, args.first_key[int64_t{batch} * args.chunk + row]);
  }
  return first;
}

// One past the last key any row of a sequence may see.
__device__ __forceinline__ int32_t visible_key_end(const ForwardArgs& args, int32_t batch) {
  const int32_t end = args.num_past + args.chunk;
  return args.num_keys == nullptr ? end : min(end, args.num_keys[batch]);
}

}  // namespace oomb::attention::sm90

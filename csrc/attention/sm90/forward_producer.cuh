#pragma once

// The forward's producer: one warp that finds the tiles of each unit and loads Q, K and V.

#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

#include "attention/sm90/forward_args.h"
#include "attention/sm90/forward_pages.cuh"
#include "attention/sm90/forward_shared.cuh"
#include "attention/sm90/hidden_rows.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"

namespace oomb::attention::sm90 {

template <int kHeadDim, int kPageSize>
struct Producer {
  using Shared = ForwardShared<kHeadDim, kPageSize>;
  using Config = ForwardConfig<kHeadDim, kPageSize>;
  using Reader = PageReader<kPageSize, Config::kLists>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kConsumers = Config::kConsumers;
  static constexpr uint32_t kAllConsumers = (1u << kConsumers) - 1;
  static constexpr int kBoxes = kHeadDim / 64;
  static constexpr int kBoxElements = kTileKeys * 64;

  const ForwardArgs& args;
  Shared& shared;
  const int32_t lane;
  RowRange rows = {};  // of consumer `lane`
  uint32_t tile = 0;   // of all units
  uint32_t turn = 0;   // units that came to their end, each with a note in the ring of K

  __device__ __forceinline__ Ring<Shared::kStages> k_ring() const { return {tile + turn}; }
  __device__ __forceinline__ Ring<Shared::kStages> v_ring() const { return {tile}; }

  // Keys [key + from, key + to) of the tile are seen, the others of V become zeros; those of K only
  // make scores that are masked. load(destination, map is K's, barrier, box) is called by one lane.
  template <typename Load>
  __device__ __forceinline__ void put(int32_t key, int flags, int32_t from, int32_t to,
                                      const Load& load) {
    barrier_wait(&shared.k_empty[k_ring().stage()], k_ring().phase() ^ 1);
    if (lane == 0) {
      shared.notes[k_ring().stage()] = {key, flags};
      uint64_t* barrier = &shared.k_full[k_ring().stage()];
      barrier_arrive_expect(barrier, Shared::kTileBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        load(&shared.k[k_ring().stage()][box * kBoxElements], true, barrier, box);
      }
    }
    barrier_wait(&shared.v_empty[v_ring().stage()], v_ring().phase() ^ 1);
    const bool hides = from > 0 || to < kTileKeys;
    if (lane == 0) {
      uint64_t* barrier = hides ? &shared.settled : &shared.v_full[v_ring().stage()];
      barrier_arrive_expect(barrier, Shared::kTileBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        load(&shared.v[v_ring().stage()][box * kBoxElements], false, barrier, box);
      }
    }
    if (hides) {
      const uint32_t phase = shared.settled_phase;
      barrier_wait(&shared.settled, phase);
      zero_rows_outside<kTileKeys, kHeadDim>(shared.v[v_ring().stage()], from, to);
      if (lane == 0) {
        shared.settled_phase = phase ^ 1;
        barrier_arrive(&shared.v_full[v_ring().stage()]);
      }
    }
    ++tile;
    __syncwarp();
  }

  __device__ __forceinline__ void put_end() {
    barrier_wait(&shared.k_empty[k_ring().stage()], k_ring().phase() ^ 1);
    if (lane == 0) {
      shared.notes[k_ring().stage()] = {0, kEnd};
      barrier_arrive(&shared.k_full[k_ring().stage()]);
    }
    ++turn;
    __syncwarp();
  }

  // Lane i judges for consumer i, whose rows it holds. `first`: the first key that any of them
  // sees.
  __device__ __forceinline__ int flags_of(int32_t key, int32_t real_end, bool own,
                                          uint32_t listed_by, int32_t& first) const {
    int flags = rows.flags(key, key + kTileKeys, real_end, own, args.num_past, kSeen << lane);
    if (!(listed_by >> lane & 1)) flags = 0;
    first = __reduce_min_sync(kAllLanes, flags ? rows.key_min : INT_MAX);
    return __reduce_or_sync(kAllLanes, flags);
  }

  __device__ __forceinline__ void own_chunk(const Unit<Config>& unit, int32_t key_min,
                                            int32_t key_end) {
    const int32_t n = args.num_past;
    const int32_t row_end = __reduce_max_sync(kAllLanes, rows.last_row) + 1;
    const int32_t token_end = min(row_end, key_end - n);
    const int32_t token_begin = max(key_min - n, 0);
    if (token_end <= token_begin) return;
    for (int32_t own_tile = (token_end - 1) / kTileKeys; own_tile >= token_begin / kTileKeys;
         --own_tile) {
      const int32_t key = n + own_tile * kTileKeys;
      int32_t first;
      const int flags = flags_of(key, key_end, true, kAllConsumers, first);
      if (!(flags & kSeenByAny)) continue;
      // Past the chunk's end come zeros.
      const int32_t to = key_end < n + args.chunk ? key_end - key : kTileKeys;
      put(key, flags | kOwn, first - key, to,
          [&](void* to, bool is_key, uint64_t* barrier, int box) __attribute__((always_inline)) {
            tma_load_4d(to, is_key ? args.k_map : args.v_map, barrier, box * 64,
                        own_tile * kTileKeys, unit.kv_head, unit.batch);
          });
    }
  }

  __device__ __forceinline__ void put_page(const Unit<Config>& unit, int32_t page, int32_t slot,
                                           int32_t real_end, uint32_t listed_by) {
#pragma unroll 1
    for (int32_t begin = 0; begin < kPageSize; begin += kTileKeys) {
      const int32_t key = page * kPageSize + begin;
      if (key >= real_end) return;
      int32_t first;
      const int flags = flags_of(key, real_end, false, listed_by, first);
      if (!(flags & kSeenByAny)) continue;
      const int32_t row = slot * args.rows_per_slot + unit.kv_head * kPageSize + begin;
      put(key, flags, first - key, real_end - key,
          [&](void* to, bool is_key, uint64_t* barrier, int box) __attribute__((always_inline)) {
            tma_load_2d(to, args.pool_map, barrier, box * 64,
                        is_key ? row : row + args.kv_heads * kPageSize);
          });
    }
  }

  __device__ __forceinline__ void past_pages(const Unit<Config>& unit, int32_t key_min,
                                             int32_t key_end) {
    const int32_t n = args.num_past;
    const int32_t real_end = min(key_end, n);
    const int32_t page_begin = max(args.page_begin, key_min / kPageSize);
    if (args.page_begin >= args.page_end) return;

    Reader reader = lists(unit);
    if (args.selection == nullptr) reader = {Reader::kEveryPage, page_begin, kAllConsumers};
    while (true) {
      reader.refill(args, unit.batch, page_begin, real_end, lane);
      const int32_t page = reader.front(lane);
      if (page == INT_MAX) break;
      int32_t slot;
      uint32_t listed_by;
      reader.take(page, lane, slot, listed_by);
      put_page(unit, page, slot, real_end, listed_by);
    }
  }

  __device__ __forceinline__ Reader lists(const Unit<Config>& unit) const {
    constexpr int kWidth = 32 / Config::kLists;
    const int32_t index = lane / kWidth;
    const int32_t block = unit.block(args, index);
    uint32_t consumers = 0;
    bool mine = index < Config::kLists && block >= 0;
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      if (unit.block(args, i) != block) continue;
      if (i < index) mine = false;  // an earlier segment reads the list that they share
      consumers |= 1u << i;
    }
    const int32_t head = args.selection_heads == 1 ? 0 : unit.kv_head;
    const int32_t row = (unit.batch * args.blocks + block) * args.selection_heads + head;
    return {mine ? row * args.budget : Reader::kNoPage, 0, consumers};
  }

  __device__ __forceinline__ void run() {
    while (true) {
      const int32_t index = unit_of_turn(turn);
      if (index >= args.units) break;
      const Unit<Config> unit(args, index);

      barrier_wait(&shared.q_empty, turn % 2 ^ 1);
      if (lane == 0) barrier_arrive_expect(&shared.q_full, sizeof(shared.q));
      rows = RowRange{};
#pragma unroll 1
      for (int i = 0; i < kConsumers; ++i) {
        const Task task = unit.task(args, i);
        if (lane == 0) {
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            tma_load_4d(&shared.q[i][box * kTaskRows * 64], args.q_map, &shared.q_full, box * 64,
                        task.row, task.head, unit.batch, CacheHint::kEvictFirst);
          }
        }
        RowRange range;
        range.find(args, unit.batch, task.row, lane);
        if (lane == i) rows = range;
      }
      __syncwarp();

      const int32_t key_min = __reduce_min_sync(kAllLanes, rows.key_min);
      const int32_t key_end = visible_key_end(args, unit.batch);
      if (args.own_chunk) own_chunk(unit, key_min, key_end);
      past_pages(unit, key_min, key_end);
      put_end();
    }
  }
};

}  // namespace oomb::attention::sm90

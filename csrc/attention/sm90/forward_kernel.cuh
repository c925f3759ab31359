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

#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

#include "attention/sm90/forward_args.h"
#include "attention/sm90/hidden_rows.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/ldmatrix.h"
#include "attention/sm90/ptx/tma.h"
#include "attention/sm90/ptx/wgmma.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::sm90 {

inline constexpr int kTaskRows = 64;
inline constexpr uint32_t kAllLanes = 0xffffffff;

template <int kHeadDim, int kTileKeys>
struct ForwardConfig {
  // Head dim 64 has half the matrix work per exponential: a third consumer hides more of them.
  static constexpr int kConsumers = kHeadDim == 64 ? 3 : 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // What the producer gives away must cover what the consumers take, or they wait for ever.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : kTileKeys == 64 ? 56 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kTileKeys == 64 ? 152 : 160;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * kLaunchRegisters);
  static constexpr int kStages = kTileKeys == 128 && kHeadDim == 128 ? 2 : 4;
  // Reading Q from shared memory again for every tile costs power, and at 64 keys half the
  // bandwidth.
  static constexpr bool kQueriesInRegisters = kHeadDim == 128 || kTileKeys == 64;
  // Where the tensor cores are not the limit, testing for factors of 1 is cheaper than multiplying.
  static constexpr bool kTestFactors = kHeadDim == 64 || kTileKeys == 64;
  static constexpr int kTasksPerBlock = kTileKeys / kTaskRows;  // and head; a page is a tile
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

template <int kHeadDim, int kTileKeys>
struct ForwardShared {
  using Config = ForwardConfig<kHeadDim, kTileKeys>;
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

// ---------------------------------------------------------------------------------------- producer

// What the rows of a task may see.
struct RowRange {
  int32_t last_row = -1;                   // the first is the multiple of 64 below; -1: no rows
  int32_t key_min = INT_MAX, key_max = 0;  // range of first_visible_key over the rows

  __device__ __forceinline__ void find(const ForwardArgs& args, int32_t batch, int32_t row,
                                       int32_t lane) {
    if (row >= args.chunk) return;
    last_row = min(row + kTaskRows, args.chunk) - 1;
    for (int32_t r = row + lane; r <= last_row; r += 32) {
      const int32_t first = first_visible_key(args, batch, r);
      key_min = min(key_min, first);
      key_max = max(key_max, first);
    }
    key_min = __reduce_min_sync(kAllLanes, key_min);
    key_max = __reduce_max_sync(kAllLanes, key_max);
  }

  // Flags of a tile of keys [begin, end) for these rows; keys from real_end on are hidden from all.
  __device__ __forceinline__ int flags(int32_t begin, int32_t end, int32_t real_end, bool own,
                                       int32_t num_past, int seen) const {
    if (last_row < 0 || end <= key_min) return 0;
    if (own && begin > num_past + last_row) return 0;
    const int32_t first_row = last_row / kTaskRows * kTaskRows;
    const bool masked =
        begin < key_max || end > real_end || (own && end - 1 > num_past + first_row);
    return seen | (masked ? kMasked : 0);
  }
};

// Walks the union of up to kLists ascending page lists. Lanes are divided into segments, one per
// list; a lane holds one page of its segment's list, with its slot.
//
//   kLists = 2   [ list 0: 3 7 8 12 .. ][ list 1: 0 3 9 .. ]    left: lanes with a page to come
template <int kPageSize, int kLists>
struct PageReader {
  static constexpr int32_t kEveryPage = -1, kNoPage = -2;
  int32_t list;  // of this lane's segment: its first position in args.selection, or one of these
  int32_t next;  // position to read; without a list, page
  uint32_t consumers;  // who reads this segment's list, a bit each
  int32_t page = 0, slot = 0;
  uint32_t left = 0;

  // Reads on where a segment has no page left.
  __device__ __forceinline__ void refill(const ForwardArgs& args, int32_t batch, int32_t page_begin,
                                         int32_t real_end, int32_t lane) {
    const int32_t page_end = min(args.page_end, (real_end + kPageSize - 1) / kPageSize);
    while (true) {
      const int32_t width = list == kEveryPage ? 32 : 32 / kLists;
      const uint32_t segment = (kAllLanes >> (32 - width)) << lane / width * width;
      const int32_t end = list == kEveryPage ? page_end : list == kNoPage ? 0 : args.budget;
      const bool empty = (left & segment) == 0 && next < end;
      if (!__any_sync(kAllLanes, empty)) return;
      bool wanted = false;
      if (empty) {
        const int32_t position = next + lane % width;
        next += width;
        page = position >= end      ? -1
               : list == kEveryPage ? position
                                    : args.selection[list + position];
        wanted = page >= page_begin && page < page_end;
        slot = wanted ? args.block_table[batch * args.table_stride + page] : 0;
        // A page from the future or one that is not resident must never be read as something else.
        if (page >= args.num_pages ||
            static_cast<uint32_t>(slot) >= static_cast<uint32_t>(args.num_slots)) {
          __trap();
        }
      }
      left |= __ballot_sync(kAllLanes, wanted);
    }
  }

  // The lowest page left, INT_MAX when there is none; the same in all lanes, as everything below.
  __device__ __forceinline__ int32_t front(int32_t lane) const {
    return __reduce_min_sync(kAllLanes, left >> lane & 1 ? page : INT_MAX);
  }

  // Takes that page out of all lists: its slot and who listed it.
  __device__ __forceinline__ void take(int32_t front, int32_t lane, int32_t& front_slot,
                                       uint32_t& listed_by) {
    const bool found = (left >> lane & 1) && page == front;
    const uint32_t lanes = __ballot_sync(kAllLanes, found);
    listed_by = __reduce_or_sync(kAllLanes, found ? consumers : 0);
    front_slot = __shfl_sync(kAllLanes, slot, __ffs(lanes) - 1);
    left &= ~lanes;
  }
};

template <int kHeadDim, int kTileKeys>
struct Producer {
  using Shared = ForwardShared<kHeadDim, kTileKeys>;
  using Config = ForwardConfig<kHeadDim, kTileKeys>;
  using Reader = PageReader<kTileKeys, Config::kLists>;
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
    const int32_t key = page * kTileKeys;
    int32_t first;
    const int flags = flags_of(key, real_end, false, listed_by, first);
    if (!(flags & kSeenByAny)) return;
    const int32_t row = slot * args.rows_per_slot + unit.kv_head * kTileKeys;
    put(key, flags, first - key, real_end - key,
        [&](void* to, bool is_key, uint64_t* barrier, int box) __attribute__((always_inline)) {
          tma_load_2d(to, args.pool_map, barrier, box * 64,
                      is_key ? row : row + args.kv_heads * kTileKeys);
        });
  }

  __device__ __forceinline__ void past_pages(const Unit<Config>& unit, int32_t key_min,
                                             int32_t key_end) {
    const int32_t n = args.num_past;
    const int32_t real_end = min(key_end, n);
    const int32_t page_begin = max(args.page_begin, key_min / kTileKeys);
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

// ---------------------------------------------------------------------------------------- consumer

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// The same value in all four lanes: addition commutes.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Lane q of a quad gives words [i] of columns 8i + 2q and gets the four words of columns 8q .. 8q
// + 7.
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4], int32_t quad) {
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    const bool upper = quad & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + step], step);
      if (upper) {
        x[i] = got;
      } else {
        x[i + step] = got;
      }
    }
  }
}

template <int kHeadDim, int kTileKeys>
struct Consumer {
  using Shared = ForwardShared<kHeadDim, kTileKeys>;
  using Config = ForwardConfig<kHeadDim, kTileKeys>;
  static constexpr int kScores = kTileKeys / 2;  // registers of S per thread
  static constexpr int kOutputs = kHeadDim / 2;

  const ForwardArgs& args;
  Shared& shared;
  const int32_t consumer;
  const int32_t thread;  // in the warpgroup
  Ring<Shared::kStages> k_ring, v_ring;

  // Registers that wgmma works on; rows a = thread's first, b = 8 further down.
  uint32_t q[Config::kQueriesInRegisters ? kHeadDim / 16 : 1][4];
  float s[kScores];
  uint32_t p[kTileKeys / 4];
  float acc[kOutputs];
  float max_a, max_b, sum_a, sum_b;
  int32_t first_a, first_b, end_a, end_b;  // visible keys of the own chunk; past: end_past
  int32_t end_past;

  __device__ __forceinline__ Consumer(const ForwardArgs& args, Shared& shared, int32_t consumer)
      : args(args), shared(shared), consumer(consumer), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ int32_t quad() const { return thread % 4; }

  // One arrival per warp, after all its lanes are done.
  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(barrier);
  }

  // Taking turns: named barrier 1 + i admits consumer i to the tensor cores.
  __device__ __forceinline__ void turn_begin() { named_barrier_wait(1 + consumer, 256); }
  __device__ __forceinline__ void turn_end() {
    named_barrier_arrive(consumer + 1 == Config::kConsumers ? 1 : 2 + consumer, 256);
  }

  __device__ __forceinline__ TileNote wait_tile() {
    barrier_wait(&shared.k_full[k_ring.stage()], k_ring.phase());
    const TileNote note = shared.notes[k_ring.stage()];
    return {__shfl_sync(kAllLanes, note.key, 0), __shfl_sync(kAllLanes, note.flags, 0)};
  }

  __device__ __forceinline__ void load_queries() {
    const uint32_t warp_rows = shared_address(shared.q[consumer]) + thread / 32 * 16 * 128;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      load_operand_a(q[step], warp_rows + step / 4 * kTaskRows * 128, step % 4 * 16, thread % 32);
    }
    release(&shared.q_empty);
  }

  __device__ __forceinline__ void issue_scores() {
    const uint64_t k =
        operand_advance(operand_k_major(shared.k[0]), k_ring.stage() * Shared::kTileBytes);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      const uint64_t k_step = operand_advance(k, operand_k_step(d, kTileKeys));
      if constexpr (Config::kQueriesInRegisters) {
        const auto& a = q[d / 16];
        wgmma_rs<kTileKeys>(s, a[0], a[1], a[2], a[3], k_step, d > 0);
      } else {
        const uint64_t rows =
            operand_advance(operand_k_major(shared.q[0]), consumer * (Shared::kTaskElements * 2));
        wgmma_ss<kTileKeys>(s, operand_advance(rows, operand_k_step(d, kTaskRows)), k_step, d > 0);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output() {
    const uint64_t v = operand_advance(operand_mn_major(shared.v[0], kTileKeys * 128),
                                       v_ring.stage() * Shared::kTileBytes);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      wgmma_rs<kHeadDim, true>(acc, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                               operand_advance(v, step * 2048), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void scores_done() {
    release(&shared.k_empty[k_ring.stage()]);
    k_ring.advance();
  }

  __device__ __forceinline__ void output_done() {
    release(&shared.v_empty[v_ring.stage()]);
    v_ring.advance();
  }

  // Hides keys outside a row's range.
  __device__ __forceinline__ void mask(const TileNote& note) {
    const int32_t base = note.key + 2 * quad();
    const bool own = note.flags & kOwn;
    const int32_t from_a = first_a - base, to_a = (own ? end_a : end_past) - base;
    const int32_t from_b = first_b - base, to_b = (own ? end_b : end_past) - base;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = i / 4 * 8 + i % 2;
      const bool visible =
          i % 4 < 2 ? column >= from_a && column < to_a : column >= from_b && column < to_b;
      if (!visible) s[i] = -INFINITY;
    }
  }

  // s becomes exp(scale (s - max)); max and sum move on; the factors for acc are returned.
  template <bool kMayBeEmpty>
  __device__ __forceinline__ void softmax(float& factor_a, float& factor_b) {
    float top_a = fmaxf(s[0], s[1]), top_b = fmaxf(s[2], s[3]);
#pragma unroll
    for (int i = 4; i < kScores; i += 4) {
      top_a = fmaxf(top_a, fmaxf(s[i], s[i + 1]));
      top_b = fmaxf(top_b, fmaxf(s[i + 2], s[i + 3]));
    }
    const float old_a = max_a, old_b = max_b;
    max_a = fmaxf(old_a, quad_max(top_a));
    max_b = fmaxf(old_b, quad_max(top_b));
    float base_a = max_a, base_b = max_b;
    if constexpr (kMayBeEmpty) {
      if (base_a == -INFINITY) base_a = 0;
      if (base_b == -INFINITY) base_b = 0;
    }
    factor_a = exp2_approx(__fmul_rn(__fsub_rn(old_a, base_a), args.scale_log2));
    factor_b = exp2_approx(__fmul_rn(__fsub_rn(old_b, base_b), args.scale_log2));
    const float shift_a = __fmul_rn(-base_a, args.scale_log2);
    const float shift_b = __fmul_rn(-base_b, args.scale_log2);
    float part_a[2] = {0, 0}, part_b[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        s[i + j] = exp2_approx(__fmaf_rn(s[i + j], args.scale_log2, shift_a));
        s[i + 2 + j] = exp2_approx(__fmaf_rn(s[i + 2 + j], args.scale_log2, shift_b));
        part_a[j] = __fadd_rn(part_a[j], s[i + j]);
        part_b[j] = __fadd_rn(part_b[j], s[i + 2 + j]);
      }
    }
    sum_a = __fmaf_rn(sum_a, factor_a, quad_sum(__fadd_rn(part_a[0], part_a[1])));
    sum_b = __fmaf_rn(sum_b, factor_b, quad_sum(__fadd_rn(part_b[0], part_b[1])));
  }

  __device__ __forceinline__ void rescale_and_pack(float factor_a, float factor_b) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    // The maximum of a row rarely moves after its first tiles, and a product with 1 changes
    // nothing.
    if constexpr (Config::kTestFactors) {
      if (__all_sync(kAllLanes, factor_a == 1 && factor_b == 1)) return;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i += 4) {
      acc[i] = __fmul_rn(acc[i], factor_a);
      acc[i + 1] = __fmul_rn(acc[i + 1], factor_a);
      acc[i + 2] = __fmul_rn(acc[i + 2], factor_b);
      acc[i + 3] = __fmul_rn(acc[i + 3], factor_b);
    }
  }

  // A tile with no P V to overlap with.
  __device__ __forceinline__ void first_step(const TileNote& note) {
    turn_begin();
    wgmma_fence();
    issue_scores();
    turn_end();
    wgmma_wait<0>();
    pin_registers(s);
    scores_done();
    if (note.flags & kMasked) mask(note);
    float factor_a, factor_b;
    softmax<true>(factor_a, factor_b);
    rescale_and_pack(factor_a, factor_b);
  }

  // S of this tile together with P V of the one before.
  template <bool kMaskedTile>
  __device__ __forceinline__ void step(const TileNote& note) {
    turn_begin();
    wgmma_fence();
    issue_scores();
    barrier_wait(&shared.v_full[v_ring.stage()], v_ring.phase());
    issue_output();
    turn_end();
    wgmma_wait<1>();
    pin_registers(s);
    scores_done();
    if constexpr (kMaskedTile) mask(note);
    float factor_a, factor_b;
    softmax<kMaskedTile>(factor_a, factor_b);
    pin_registers(s);
    wgmma_wait<0>();
    pin_registers(acc);
    pin_registers(s);
    output_done();
    rescale_and_pack(factor_a, factor_b);
  }

  // P V of the last tile.
  __device__ __forceinline__ void last_output() {
    barrier_wait(&shared.v_full[v_ring.stage()], v_ring.phase());
    wgmma_fence();
    issue_output();
    wgmma_wait<0>();
    pin_registers(acc);
    output_done();
  }

  // A tile that these rows do not see: only keeps the rings and turns in step.
  __device__ __forceinline__ void skip() {
    turn_begin();
    turn_end();
    scores_done();
    barrier_wait(&shared.v_full[v_ring.stage()], v_ring.phase());
    output_done();
  }

  __device__ __forceinline__ void tiles() {
    const int seen = kSeen << consumer;
    TileNote note = wait_tile();
    while (true) {
      while (!(note.flags & (seen | kEnd))) {
        skip();
        note = wait_tile();
      }
      if (note.flags & kEnd) break;
      first_step(note);
      note = wait_tile();
      while (note.flags & seen) {
        while ((note.flags & (seen | kMasked)) == (seen | kMasked)) {
          step<true>(note);
          note = wait_tile();
        }
        while ((note.flags & (seen | kMasked)) == seen) {
          step<false>(note);
          note = wait_tile();
        }
      }
      // Before skipped tiles too: a stage of V held back could starve the producer.
      last_output();
    }
    scores_done();  // of the end note
    if constexpr (!Config::kQueriesInRegisters) release(&shared.q_empty);
  }

  __device__ __forceinline__ void begin(const Unit<Config>& unit, int32_t head, int32_t row_a,
                                        int32_t row_b) {
    const int32_t key_end = visible_key_end(args, unit.batch);
    end_past = min(key_end, args.num_past);
    end_a = min(key_end, args.num_past + row_a + 1);
    end_b = min(key_end, args.num_past + row_b + 1);
    first_a = row_a < args.chunk ? first_visible_key(args, unit.batch, row_a) : 0;
    first_b = row_b < args.chunk ? first_visible_key(args, unit.batch, row_b) : 0;

    max_a = max_b = -INFINITY;
    sum_a = sum_b = 0;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) acc[i] = 0;
    if (args.first_wave) return;
    const int64_t rows = (int64_t{unit.batch} * args.query_heads + head) * args.chunk;
    if (row_a < args.chunk) load_state(rows + row_a, 0, max_a, sum_a);
    if (row_b < args.chunk) load_state(rows + row_b, 2, max_b, sum_b);
  }

  __device__ __forceinline__ void load_state(int64_t row, int offset, float& max, float& sum) {
    max = args.max[row];
    sum = args.sum[row];
    const float2* from = reinterpret_cast<const float2*>(args.acc + row * kHeadDim) + quad();
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      const float2 pair = from[4 * i];
      acc[4 * i + offset] = pair.x;
      acc[4 * i + offset + 1] = pair.y;
    }
  }

  __device__ __forceinline__ void store_state(int64_t row, int offset, float max, float sum) {
    if (quad() == 0) {
      args.max[row] = max;
      args.sum[row] = sum;
    }
    float2* to = reinterpret_cast<float2*>(args.acc + row * kHeadDim) + quad();
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      to[4 * i] = {acc[4 * i + offset], acc[4 * i + offset + 1]};
    }
  }

  // All lanes take part; `inside` says whether the row exists.
  __device__ __forceinline__ void store_output(const Unit<Config>& unit, int32_t head, int32_t row,
                                               bool inside, int offset, float max, float sum) {
    const float factor = sum > 0 ? 1 / sum : 0;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(args.o) + unit.batch * args.o_strides.batch +
                        head * args.o_strides.head + row * args.o_strides.token;
#pragma unroll
    for (int block = 0; block < kHeadDim / 32; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * block + i) + offset;
        words[i] = pack_bf16(acc[at] * factor, acc[at + 1] * factor);
      }
      quad_transpose(words, quad());
      if (inside) {
        *reinterpret_cast<uint4*>(to + 32 * block + 8 * quad()) = {words[0], words[1], words[2],
                                                                   words[3]};
      }
    }
    if (inside && quad() == 0) {
      const int64_t rows = (int64_t{unit.batch} * args.query_heads + head) * args.chunk;
      args.lse[rows + row] = sum > 0 ? max * args.scale + logf(sum) : -INFINITY;
    }
  }

  __device__ __forceinline__ void end(const Unit<Config>& unit, int32_t head, int32_t row_a,
                                      int32_t row_b) {
    if (args.last_wave) {
      store_output(unit, head, row_a, row_a < args.chunk, 0, max_a, sum_a);
      store_output(unit, head, row_b, row_b < args.chunk, 2, max_b, sum_b);
      return;
    }
    const int64_t rows = (int64_t{unit.batch} * args.query_heads + head) * args.chunk;
    if (row_a < args.chunk) store_state(rows + row_a, 0, max_a, sum_a);
    if (row_b < args.chunk) store_state(rows + row_b, 2, max_b, sum_b);
  }

  __device__ __forceinline__ void run() {
    if (consumer == Config::kConsumers - 1) turn_end();  // admits the first
    for (int32_t turn = 0;; ++turn) {
      const int32_t index = unit_of_turn(turn);
      if (index >= args.units) break;
      const Unit<Config> unit(args, index);
      const Task task = unit.task(args, consumer);
      const int32_t row_a = task.row + thread / 32 * 16 + thread % 32 / 4;
      begin(unit, task.head, row_a, row_a + 8);
      barrier_wait(&shared.q_full, turn % 2);
      if constexpr (Config::kQueriesInRegisters) load_queries();
      tiles();
      end(unit, task.head, row_a, row_a + 8);
    }
  }
};

template <int kHeadDim, int kTileKeys>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim, kTileKeys>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shared = ForwardShared<kHeadDim, kTileKeys>;
  using Config = ForwardConfig<kHeadDim, kTileKeys>;
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
      Producer<kHeadDim, kTileKeys>{args, shared, static_cast<int32_t>(threadIdx.x)}.run();
    }
  } else {
    registers_grow<Config::kConsumerRegisters>();
    Consumer<kHeadDim, kTileKeys>(args, shared, warpgroup - 1).run();
  }
}

template <int kHeadDim, int kTileKeys>
void launch_forward(ForwardArgs args, void* stream) {
  using Config = ForwardConfig<kHeadDim, kTileKeys>;
  const auto kernel = forward_kernel<kHeadDim, kTileKeys>;
  constexpr int kBytes = sizeof(ForwardShared<kHeadDim, kTileKeys>) + 1024;
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

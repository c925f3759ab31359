#pragma once

// Attention forward on sm_90a.
//
// A thread block works through units; a unit is 128 query rows of one head against every tile of keys
// they may see: the own chunk from right to left, then past pages in ascending order, one page a
// tile. The order and the tiles depend on absolute positions alone, and the state after a tile is
// exactly what a wave carries (acc, max, sum in fp32), so waves may end at any page.
//
//   warp 0           finds the tiles, loads Q, K, V       (warps 1-3 only give their registers away)
//   warpgroup 1, 2   rows 0-63, 64-127 of the unit
//
//   warpgroup 1   | S1 PV0 |  softmax 1  | S2 PV1 |  softmax 2  | ...     S = Q K^T, PV = P V
//   warpgroup 2            | S1 PV0 |  softmax 1  | S2 PV1 |  ...
//
// S of a tile is issued together with P V of the tile before, so the tensor cores have work during
// the softmax, and two named barriers make the warpgroups take turns in issuing.
//
// Shared memory: Q, then stages of K and of V, each with a full and an empty barrier. A stage of K
// carries a TileNote: which keys these are and how to treat them. A note kEnd closes a unit.

#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

#include "attention/sm90/forward_args.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"
#include "attention/sm90/ptx/wgmma.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm90 {

inline constexpr int kTileRows = 128;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kForwardThreads = 128 * (1 + kConsumers);
inline constexpr uint32_t kAllLanes = 0xffffffff;

struct TileNote {
  int32_t key;  // absolute index of the tile's first key
  int32_t flags;
};

inline constexpr int kSeenByFirst = 1;  // by any row of warpgroup 1; the next bit: of warpgroup 2
inline constexpr int kMasked = 4;       // some key of it is hidden from some row
inline constexpr int kOwn = 8;          // of the own chunk
inline constexpr int kEnd = 16;         // no tile: the unit is complete

template <int kHeadDim, int kTileKeys>
struct ForwardShared {
  static constexpr int kStages = kTileKeys == 128 ? 2 : 4;
  static constexpr int kTileElements = kTileKeys * kHeadDim;
  static constexpr uint32_t kTileBytes = kTileElements * 2;
  static constexpr uint32_t kQueryBytes = kTileRows * kHeadDim * 2;

  __nv_bfloat16 q[kTileRows * kHeadDim];
  __nv_bfloat16 k[kStages][kTileElements];
  __nv_bfloat16 v[kStages][kTileElements];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  TileNote notes[kStages];
};

// Position in a ring of stages.
template <int kStages>
struct Ring {
  uint32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Unit {
  int32_t batch, head, kv_head, row;  // row: first query row

  // Longest first: late rows see more of the own chunk. With heads_outermost all thread blocks
  // stream the same kv head at a time.
  __device__ __forceinline__ Unit(const ForwardArgs& args, int32_t index) {
    const int32_t heads = args.heads_outermost ? args.group : args.batch * args.query_heads;
    const int32_t outer = index / (args.row_tiles * heads);  // 0 unless heads_outermost
    const int32_t inner = index % (args.row_tiles * heads);
    row = (args.row_tiles - 1 - inner / heads) * kTileRows;
    const int32_t flat = outer * heads + inner % heads;  // batch * query_heads + head
    batch = flat / args.query_heads;
    head = flat % args.query_heads;
    kv_head = head / args.group;
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

// What the rows of one consumer may see.
struct RowRange {
  int32_t first_row, last_row;   // last_row < first_row: no rows
  int32_t key_min, key_max;      // range of first_visible_key over the rows

  __device__ __forceinline__ RowRange(const ForwardArgs& args, int32_t batch, int32_t row,
                                      int32_t lane) {
    first_row = row;
    last_row = min(row + kTileRows / kConsumers, args.chunk) - 1;
    key_min = INT_MAX;
    key_max = 0;
    for (int32_t r = first_row + lane; r <= last_row; r += 32) {
      const int32_t first = first_visible_key(args, batch, r);
      key_min = min(key_min, first);
      key_max = max(key_max, first);
    }
    key_min = __reduce_min_sync(kAllLanes, key_min);
    key_max = __reduce_max_sync(kAllLanes, key_max);
  }

  // Flags of keys [begin, end) for these rows, of which the first `visible` are real.
  __device__ __forceinline__ int flags(int32_t begin, int32_t end, int32_t real_end, bool own,
                                       int32_t num_past, int seen) const {
    if (last_row < first_row || end <= key_min) return 0;
    if (own && begin > num_past + last_row) return 0;
    const bool masked =
        begin < key_max || end > real_end || (own && end - 1 > num_past + first_row);
    return seen | (masked ? kMasked : 0);
  }
};

// Walks page ids in ascending order, 32 at a time: one per lane, with its slot.
struct PageReader {
  const int32_t* list;  // null: every page
  int32_t next, end;    // positions in the list; without a list, pages
  int32_t page = 0, slot = 0;
  uint32_t left = 0;  // lanes that hold a page yet to come

  __device__ __forceinline__ int32_t front(const ForwardArgs& args, const int32_t* table,
                                           int32_t page_begin, int32_t page_end, int32_t num_pages,
                                           int32_t lane) {
    while (left == 0 && next < end) {
      const int32_t position = next + lane;
      next += 32;
      page = position >= end ? -1 : list == nullptr ? position : list[position];
      const bool wanted = page >= page_begin && page < page_end;
      slot = wanted ? table[page] : 0;
      // A page from the future or one that is not resident must never be read as something else.
      if (page >= num_pages || static_cast<uint32_t>(slot) >= static_cast<uint32_t>(args.num_slots))
        __trap();
      left = __ballot_sync(kAllLanes, wanted);
    }
    return left == 0 ? INT_MAX : __shfl_sync(kAllLanes, page, __ffs(left) - 1);
  }

  __device__ __forceinline__ int32_t front_slot() const {
    return __shfl_sync(kAllLanes, slot, __ffs(left) - 1);
  }
  __device__ __forceinline__ void pop() { left &= left - 1; }
};

template <int kHeadDim, int kTileKeys>
struct Producer {
  using Shared = ForwardShared<kHeadDim, kTileKeys>;
  static constexpr int kBoxes = kHeadDim / 64;
  static constexpr int kBoxElements = kTileKeys * 64;
  static constexpr int kLists = kTileRows / kTileKeys;  // query blocks in a unit

  const ForwardArgs& args;
  Shared& shared;
  const int32_t lane;
  Ring<Shared::kStages> k_ring, v_ring;

  // load(destination, map is K's, barrier, box) is called by one lane.
  template <typename Load>
  __device__ __forceinline__ void put(int32_t key, int flags, const Load& load) {
    barrier_wait(&shared.k_empty[k_ring.stage], k_ring.phase ^ 1);
    if (lane == 0) {
      shared.notes[k_ring.stage] = {key, flags};
      uint64_t* barrier = &shared.k_full[k_ring.stage];
      barrier_arrive_expect(barrier, Shared::kTileBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        load(&shared.k[k_ring.stage][box * kBoxElements], true, barrier, box);
      }
    }
    k_ring.advance();
    barrier_wait(&shared.v_empty[v_ring.stage], v_ring.phase ^ 1);
    if (lane == 0) {
      uint64_t* barrier = &shared.v_full[v_ring.stage];
      barrier_arrive_expect(barrier, Shared::kTileBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        load(&shared.v[v_ring.stage][box * kBoxElements], false, barrier, box);
      }
    }
    v_ring.advance();
    __syncwarp();
  }

  __device__ __forceinline__ void put_end() {
    barrier_wait(&shared.k_empty[k_ring.stage], k_ring.phase ^ 1);
    if (lane == 0) {
      shared.notes[k_ring.stage] = {0, kEnd};
      barrier_arrive(&shared.k_full[k_ring.stage]);
    }
    k_ring.advance();
    __syncwarp();
  }

  __device__ __forceinline__ void own_chunk(const Unit& unit, const RowRange& first,
                                            const RowRange& second, int32_t key_end) {
    const int32_t n = args.num_past;
    const int32_t token_end = min(min(unit.row + kTileRows, args.chunk), key_end - n);
    const int32_t token_begin = max(min(first.key_min, second.key_min) - n, 0);
    if (token_end <= token_begin) return;
    for (int32_t tile = (token_end - 1) / kTileKeys; tile >= token_begin / kTileKeys; --tile) {
      const int32_t key = n + tile * kTileKeys;
      const int flags =
          first.flags(key, key + kTileKeys, key_end, true, n, kSeenByFirst) |
          second.flags(key, key + kTileKeys, key_end, true, n, kSeenByFirst << 1);
      put(key, flags | kOwn,
          [&](void* to, bool is_key, uint64_t* barrier, int box) __attribute__((always_inline)) {
            tma_load_4d(to, is_key ? args.k_map : args.v_map, barrier, box * 64, tile * kTileKeys,
                        unit.kv_head, unit.batch);
          });
    }
  }

  __device__ __forceinline__ void put_page(const Unit& unit, int32_t page, int32_t slot,
                                           int flags) {
    const int32_t row = slot * args.rows_per_slot + unit.kv_head * kTileKeys;
    put(page * kTileKeys, flags,
        [&](void* to, bool is_key, uint64_t* barrier, int box) __attribute__((always_inline)) {
          tma_load_2d(to, args.pool_map, barrier, box * 64,
                      is_key ? row : row + args.kv_heads * kTileKeys);
        });
  }

  __device__ __forceinline__ void past_pages(const Unit& unit, const RowRange& first,
                                             const RowRange& second, int32_t key_end) {
    const int32_t n = args.num_past;
    const int32_t real_end = min(key_end, n);
    const int32_t num_pages = (n + kTileKeys - 1) / kTileKeys;
    const int32_t page_begin =
        max(args.page_begin, min(first.key_min, second.key_min) / kTileKeys);
    const int32_t page_end = min(args.page_end, (real_end + kTileKeys - 1) / kTileKeys);
    if (page_begin >= page_end) return;
    const int32_t* table = args.block_table + unit.batch * args.table_stride;

    const auto page_flags = [&](const RowRange& rows, int32_t page, int seen) {
      return rows.flags(page * kTileKeys, (page + 1) * kTileKeys, real_end, false, n, seen);
    };
    const auto emit = [&](PageReader& reader, int32_t page, int flags) {
      if (flags & (kSeenByFirst | kSeenByFirst << 1)) {
        put_page(unit, page, reader.front_slot(), flags);
      }
    };
    const auto front = [&](PageReader& reader) {
      return reader.front(args, table, page_begin, page_end, num_pages, lane);
    };

    if (args.selection == nullptr || kLists == 1) {
      PageReader reader{nullptr, page_begin, page_end};
      if (args.selection != nullptr) reader = list_of(unit, unit.row / kTileKeys);
      for (int32_t page; (page = front(reader)) != INT_MAX; reader.pop()) {
        emit(reader, page,
             page_flags(first, page, kSeenByFirst) | page_flags(second, page, kSeenByFirst << 1));
      }
    } else {
      // Two query blocks with a list each: the union, every page once, seen by whom it concerns.
      PageReader one = list_of(unit, unit.row / kTileKeys);
      PageReader two = list_of(unit, unit.row / kTileKeys + 1);
      while (true) {
        const int32_t page_one = front(one), page_two = front(two);
        const int32_t page = min(page_one, page_two);
        if (page == INT_MAX) break;
        int flags = 0;
        if (page_one == page) flags |= page_flags(first, page, kSeenByFirst);
        if (page_two == page) flags |= page_flags(second, page, kSeenByFirst << 1);
        emit(page_one == page ? one : two, page, flags);
        if (page_one == page) one.pop();
        if (page_two == page) two.pop();
      }
    }
  }

  __device__ __forceinline__ PageReader list_of(const Unit& unit, int32_t block) const {
    const int32_t blocks = (args.chunk + kTileKeys - 1) / kTileKeys;
    if (block >= blocks) return PageReader{args.selection, 0, 0};
    const int32_t head = args.selection_heads == 1 ? 0 : unit.kv_head;
    const int64_t row =
        (int64_t{unit.batch} * blocks + block) * args.selection_heads + head;
    return PageReader{args.selection + row * args.budget, 0, args.budget};
  }

  __device__ __forceinline__ void run() {
    uint32_t q_phase = 1;
    for (int32_t turn = 0;; ++turn) {
      const int32_t index = unit_of_turn(turn);
      if (index >= args.units) break;
      const Unit unit(args, index);

      barrier_wait(&shared.q_empty, q_phase);
      q_phase ^= 1;
      if (lane == 0) {
        barrier_arrive_expect(&shared.q_full, Shared::kQueryBytes);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          tma_load_4d(&shared.q[box * kTileRows * 64], args.q_map, &shared.q_full, box * 64,
                      unit.row, unit.head, unit.batch, CacheHint::kEvictFirst);
        }
      }
      __syncwarp();

      const RowRange first(args, unit.batch, unit.row, lane);
      const RowRange second(args, unit.batch, unit.row + kTileRows / kConsumers, lane);
      const int32_t key_end = visible_key_end(args, unit.batch);
      if (args.own_chunk) own_chunk(unit, first, second, key_end);
      past_pages(unit, first, second, key_end);
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

// Lane q of a quad gives words [i] of columns 8i + 2q and gets the four words of columns 8q .. 8q + 7.
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4], int32_t quad) {
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    const bool upper = quad & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got =
          __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + step], step);
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
  static constexpr int kScores = kTileKeys / 2;  // registers of S per thread
  static constexpr int kOutputs = kHeadDim / 2;

  const ForwardArgs& args;
  Shared& shared;
  const int32_t warpgroup;  // 0, 1
  const int32_t thread;     // in the warpgroup
  Ring<Shared::kStages> k_ring, v_ring;

  // Registers that wgmma works on; rows a = thread's first, b = 8 further down.
  float s[kScores];
  uint32_t p[kTileKeys / 4];
  float acc[kOutputs];
  float max_a, max_b, sum_a, sum_b;
  int32_t first_a, first_b, end_a, end_b;  // visible keys of the own chunk; past: end_past
  int32_t end_past;

  __device__ __forceinline__ Consumer(const ForwardArgs& args, Shared& shared, int32_t warpgroup)
      : args(args), shared(shared), warpgroup(warpgroup), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ int32_t quad() const { return thread % 4; }

  // One arrival per warp.
  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (thread % 32 == 0) barrier_arrive(barrier);
  }

  // Taking turns: barrier 1 admits the first warpgroup to the tensor cores, barrier 2 the second.
  __device__ __forceinline__ void turn_begin() { named_barrier_wait(1 + warpgroup, 256); }
  __device__ __forceinline__ void turn_end() { named_barrier_arrive(2 - warpgroup, 256); }

  __device__ __forceinline__ TileNote wait_tile() {
    barrier_wait(&shared.k_full[k_ring.stage], k_ring.phase);
    const TileNote note = shared.notes[k_ring.stage];
    return {__shfl_sync(kAllLanes, note.key, 0), __shfl_sync(kAllLanes, note.flags, 0)};
  }

  __device__ __forceinline__ void issue_scores() {
    const uint64_t q = operand_advance(operand_k_major(shared.q), warpgroup * (64 * 128));
    const uint64_t k =
        operand_advance(operand_k_major(shared.k[0]), k_ring.stage * Shared::kTileBytes);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      wgmma_ss<kTileKeys>(s, operand_advance(q, operand_k_step(d, kTileRows)),
                          operand_advance(k, operand_k_step(d, kTileKeys)), d > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output() {
    const uint64_t v = operand_advance(operand_mn_major(shared.v[0], kTileKeys * 128),
                                       v_ring.stage * Shared::kTileBytes);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      wgmma_rs<kHeadDim, true>(acc, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                               operand_advance(v, step * 2048), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void scores_done() {
    release(&shared.k_empty[k_ring.stage]);
    k_ring.advance();
  }

  __device__ __forceinline__ void output_done() {
    release(&shared.v_empty[v_ring.stage]);
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
    barrier_wait(&shared.v_full[v_ring.stage], v_ring.phase);
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
    barrier_wait(&shared.v_full[v_ring.stage], v_ring.phase);
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
    barrier_wait(&shared.v_full[v_ring.stage], v_ring.phase);
    output_done();
  }

  __device__ __forceinline__ void tiles() {
    const int seen = kSeenByFirst << warpgroup;
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
    release(&shared.q_empty);
  }

  __device__ __forceinline__ void begin(const Unit& unit, int32_t row_a, int32_t row_b) {
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
    const int64_t rows = (int64_t{unit.batch} * args.query_heads + unit.head) * args.chunk;
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
  __device__ __forceinline__ void store_output(const Unit& unit, int32_t row, bool inside,
                                               int offset, float max, float sum) {
    const float factor = sum > 0 ? 1 / sum : 0;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(args.o) + unit.batch * args.o_strides.batch +
                        unit.head * args.o_strides.head + row * args.o_strides.token;
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
      const int64_t rows = (int64_t{unit.batch} * args.query_heads + unit.head) * args.chunk;
      args.lse[rows + row] = sum > 0 ? max * args.scale + logf(sum) : -INFINITY;
    }
  }

  __device__ __forceinline__ void end(const Unit& unit, int32_t row_a, int32_t row_b) {
    if (args.last_wave) {
      store_output(unit, row_a, row_a < args.chunk, 0, max_a, sum_a);
      store_output(unit, row_b, row_b < args.chunk, 2, max_b, sum_b);
      return;
    }
    const int64_t rows = (int64_t{unit.batch} * args.query_heads + unit.head) * args.chunk;
    if (row_a < args.chunk) store_state(rows + row_a, 0, max_a, sum_a);
    if (row_b < args.chunk) store_state(rows + row_b, 2, max_b, sum_b);
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == 1) turn_end();  // admits the first warpgroup
    uint32_t q_phase = 0;
    for (int32_t turn = 0;; ++turn) {
      const int32_t index = unit_of_turn(turn);
      if (index >= args.units) break;
      const Unit unit(args, index);
      const int32_t row_a = unit.row + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
      begin(unit, row_a, row_a + 8);
      barrier_wait(&shared.q_full, q_phase);
      q_phase ^= 1;
      tiles();
      end(unit, row_a, row_a + 8);
    }
  }
};

template <int kHeadDim, int kTileKeys>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shared = ForwardShared<kHeadDim, kTileKeys>;
  extern __shared__ char raw[];
  Shared& shared =
      *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);

  const int32_t warpgroup = __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * kConsumers;
    barrier_init(&shared.q_full, 1);
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
    registers_shrink<40>();
    if (threadIdx.x < 32) {
      Producer<kHeadDim, kTileKeys>{args, shared, static_cast<int32_t>(threadIdx.x)}.run();
    }
  } else {
    registers_grow<232>();
    Consumer<kHeadDim, kTileKeys>(args, shared, warpgroup - 1).run();
  }
}

template <int kHeadDim, int kTileKeys>
void launch_forward(const ForwardArgs& args, void* stream) {
  const auto kernel = forward_kernel<kHeadDim, kTileKeys>;
  constexpr int kBytes = sizeof(ForwardShared<kHeadDim, kTileKeys>) + 1024;
  int device = 0, processors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
  const int blocks = args.units < processors ? args.units : processors;
  kernel<<<blocks, kForwardThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("sm90 attention forward");
}

}  // namespace oomb::attention::sm90

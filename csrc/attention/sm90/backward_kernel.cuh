#pragma once

// The fused backward of one key tile at a time; see backward_plan.h for units and ordering.
//
// Three warpgroups. Of the first, warp 0 plans units and steps and loads keys and values, warp 1
// loads queries, warps 2 and 3 add dQ to memory. The other two compute: each owns 64 of the unit's
// 128 key rows. A step is one query tile of one head; in a step each of them does, with everything
// but dS in registers,
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

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/device/gradient_page.cuh"
#include "attention/sm90/backward_plan.h"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"
#include "attention/sm90/ptx/wgmma.h"
#include "common/cuda_check.h"

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
inline constexpr uint32_t kLower = 1u << 18;  // a window or a document begins inside the tile

// Lies at the start of shared memory. Who writes and who reads:
//   units               planner -> computers
//   steps               planner -> loader, computers
//   k, v                planner -> computers
//   q, lse, d_o, delta  loader -> computers
//   ds                  computers -> computers
//   dq, dq_info         computers -> adders
template <int kDim>
struct BackwardShared {
  static constexpr int kKeyTile = kKeyRows * kDim;
  static constexpr int kQueryTile = kQueryRows * kDim;

  alignas(1024) __nv_bfloat16 k[kKeyTile];
  alignas(1024) __nv_bfloat16 v[kKeyTile];
  alignas(1024) __nv_bfloat16 q[kStages][kQueryTile];
  alignas(1024) __nv_bfloat16 d_o[kStages][kQueryTile];
  alignas(1024) __nv_bfloat16 ds[kDsStages][kKeyRows * kQueryRows];
  alignas(1024) float dq[2][kQueryRows * kDim / 2];  // per warpgroup: half of the columns
  alignas(16) float lse[kStages][kQueryRows];
  alignas(16) float delta[kStages][kQueryRows];
  Unit units[2];  // the older one is still being written out while the next one starts
  StepInfo steps[kSteps];
  StepInfo dq_info[2];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t step_full[kSteps], step_empty[kSteps];
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kStages], do_empty[kStages];
  uint64_t ds_full[kDsStages];
  uint64_t dq_full[2], dq_empty[2];
};

// Takes units, decides the order of steps, and loads keys and values. One warp; its lanes walk
// together and lane 0 issues. It has 24 registers: no 64-bit division, no unrolled loops.
template <int kDim>
struct Planner {
  const BackwardKernelArgs& args;
  BackwardShared<kDim>& shared;
  uint32_t step = 0;

  __device__ Planner(const BackwardKernelArgs& args, BackwardShared<kDim>& shared)
      : args(args), shared(shared) {}

  __device__ static bool leads() { return threadIdx.x % 32 == 0; }

  __device__ void run() {
    for (uint32_t count = 0;; ++count) {
      Unit& unit = shared.units[count & 1];
      // The computers have left the unit before this one.
      barrier_wait(&shared.k_empty, (count & 1) ^ 1);
      take_unit(unit);
      if (unit.own < 0) break;
      if (leads()) {
        barrier_arrive_expect(&shared.k_full, sizeof(shared.k));
        load_tile(unit, shared.k, args.k, 0, &shared.k_full);
      }
      barrier_wait(&shared.v_empty, (count & 1) ^ 1);
      if (leads()) {
        barrier_arrive_expect(&shared.v_full, sizeof(shared.v));
        load_tile(unit, shared.v, args.v, 1, &shared.v_full);
      }
      if (unit.row_begin < unit.row_end) walk(unit);
      mark(kUnitEnds);
    }
    mark(kAllDone);
    if (leads()) barrier_arrive(&shared.k_full);
  }

  // The next unit; past the last one own = -1.
  __device__ void take_unit(Unit& unit) {
    constexpr uint32_t kWords = sizeof(Unit) / 4;
    const uint32_t lane = threadIdx.x % 32;
    int index = 0;
    if (lane == 0) index = atomicAdd(args.workspace.next_unit, 1);
    index = __shfl_sync(0xffffffff, index, 0);
    const bool any = index < *args.workspace.num_units;
    if (lane < kWords) {
      reinterpret_cast<int32_t*>(&unit)[lane] =
          any ? reinterpret_cast<const int32_t*>(args.workspace.units + index)[lane] : -1;
    }
    __syncwarp();
  }

  // kind 0: keys, 1: values.
  __device__ void load_tile(const Unit& unit, __nv_bfloat16* target, const CUtensorMap& own_map,
                            int kind, uint64_t* barrier) {
    if (unit.own) {
      for (int d = 0; d < kDim; d += 64) {
        tma_load_4d(target + d * kKeyRows, own_map, barrier, d, unit.tile * kKeyRows, unit.kv_head,
                    unit.batch);
      }
      return;
    }
    const int page_size = static_cast<int>(args.params.shape.page_size);
    for (int row = 0; row < kKeyRows; row += page_size) {
      // Rows past the end of the pool arrive as zeros.
      int pool_row = 0x7fffff00;
      if (row < unit.row_end && row + page_size > unit.row_begin) {
        const int page = (unit.key_begin + row) / page_size;
        const int slot =
            args.params.past.block_table[unit.batch * args.params.past.table_stride + page];
        if (slot < 0) __trap();  // a page that is not resident must never be read as zeros
        pool_row = slot * args.pool_rows_per_slot +
                   (kind * static_cast<int>(args.params.shape.kv_heads) + unit.kv_head) * page_size;
      }
      for (int d = 0; d < kDim; d += 64) {
        tma_load_2d(target + d * kKeyRows + row * 64, args.pool, barrier, d, pool_row,
                    CacheHint::kEvictFirst);
      }
    }
  }

  // Every query tile that can see the unit, block by block and in a block head by head, so that the
  // group's heads stay close together. Without lists all blocks, else those that list the unit.
  __device__ void walk(const Unit& unit) {
    const bool listed = !unit.own && args.params.past.selection != nullptr;
    const bool halves = listed && args.params.shape.page_size == kKeyRows / 2;
    const int tiles_per_block = halves ? 1 : 2;
    int block = unit.own ? unit.tile : 0;
    while (true) {
      if (listed) block = next_reader(unit, block);
      if (block * tiles_per_block >= args.query_tiles) break;
      int row_begin = unit.row_begin;
      int row_end = unit.row_end;
      if (halves) {
        // Which of the unit's two pages does the block list?
        if (!lists(unit, block, 0)) row_begin = max(row_begin, kKeyRows / 2);
        if (!lists(unit, block, 1)) row_end = min(row_end, kKeyRows / 2);
      }
#pragma unroll 1
      for (int head = 0; head < args.group; ++head) {
#pragma unroll 1
        for (int i = 0; i < tiles_per_block; ++i) {
          emit(unit, block * tiles_per_block + i, head, row_begin, row_end);
        }
      }
      ++block;
    }
  }

  // The first query block from `block` on that lists the unit; some number past the last block if
  // there is none.
  __device__ int next_reader(const Unit& unit, int block) {
    const int words = static_cast<int>(args.workspace.reader_words);
    const uint32_t* readers = args.workspace.readers + static_cast<int64_t>(unit.entry) * words;
    for (; block / 32 < words; block = (block / 32 + 1) * 32) {
      const uint32_t bits = readers[block / 32] & (0xffffffffu << block % 32);
      if (bits != 0) return block / 32 * 32 + __ffs(bits) - 1;
    }
    return 1 << 24;
  }

  // Whether the block lists page 0 or 1 of the unit.
  __device__ bool lists(const Unit& unit, int block, int page) {
    const PastPages& past = args.params.past;
    const int blocks =
        (static_cast<int>(args.params.shape.chunk) + kKeyRows / 2 - 1) / (kKeyRows / 2);
    const int budget = static_cast<int>(past.budget);
    const int row =
        (unit.batch * blocks + block) * static_cast<int>(past.selection_heads) + unit.list;
    bool found = false;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < budget; i += 32) {
      if (past.selection[static_cast<int64_t>(row) * budget + i] == unit.tile * 2 + page) {
        found = true;
      }
    }
    return __any_sync(0xffffffff, found);
  }

  // One step, unless nothing of the unit is seen.
  __device__ void emit(const Unit& unit, int tile, int head, int row_begin, int row_end) {
    if (tile >= args.query_tiles) return;
    const QueryTile& seen = args.workspace.query_tiles[unit.batch * args.query_tiles + tile];
    int rank;
    uint32_t flags = 0;
    if (unit.own) {
      rank = seen.last_own - unit.tile;
      if (rank < 0 || unit.tile < seen.first_own) return;
      if (tile * kQueryRows < unit.tile * kKeyRows + kKeyRows - 1) flags = kCausal;
    } else {
      if (unit.tile < seen.first_past) return;
      rank = seen.past_rank + unit.tile;
    }
    if (seen.lower_max > unit.key_begin) flags |= kLower;
    if (flags != 0 || row_begin > 0 || row_end < kKeyRows) flags |= kMasked;
    barrier_wait(&shared.step_empty[step % kSteps], (step / kSteps & 1) ^ 1);
    if (leads()) {
      StepInfo& info = shared.steps[step % kSteps];
      info.row = tile * kQueryRows;
      info.head = unit.kv_head * args.group + head;
      info.batch = unit.batch;
      info.rank = rank;
      info.key_range = row_begin | max(row_end, 0) << 8 | flags;
      barrier_arrive(&shared.step_full[step % kSteps]);
    }
    ++step;
  }

  __device__ void mark(int what) {
    barrier_wait(&shared.step_empty[step % kSteps], (step / kSteps & 1) ^ 1);
    if (leads()) {
      shared.steps[step % kSteps].row = what;
      barrier_arrive(&shared.step_full[step % kSteps]);
    }
    ++step;
  }
};

// Loads each step's queries. One thread.
template <int kDim>
__device__ inline void load_queries(const BackwardKernelArgs& args, BackwardShared<kDim>& shared) {
  constexpr uint32_t kBytes = sizeof(shared.q[0]) + sizeof(shared.lse[0]);
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
    const int64_t offset =
        (static_cast<int64_t>(batch * static_cast<int>(args.params.shape.query_heads) + head) *
             args.query_tiles +
         row / kQueryRows) *
        kQueryRows;
    barrier_arrive_expect(&shared.q_full[stage], kBytes);
    for (int d = 0; d < kDim; d += 64) {
      tma_load_4d(shared.q[stage] + d * kQueryRows, args.q, &shared.q_full[stage], d, row, head,
                  batch);
    }
    bulk_load(shared.lse[stage], args.workspace.lse + offset, &shared.q_full[stage],
              sizeof(shared.lse[0]));
    barrier_wait(&shared.do_empty[stage], free_parity);
    barrier_arrive_expect(&shared.do_full[stage], kBytes);
    for (int d = 0; d < kDim; d += 64) {
      tma_load_4d(shared.d_o[stage] + d * kQueryRows, args.d_o, &shared.do_full[stage], d, row,
                  head, batch);
    }
    bulk_load(shared.delta[stage], args.workspace.delta + offset, &shared.do_full[stage],
              sizeof(shared.delta[0]));
  }
}

// Adds the dQ tiles of one warpgroup to memory. One thread.
template <int kDim>
__device__ inline void add_queries(const BackwardKernelArgs& args, BackwardShared<kDim>& shared,
                                   int half) {
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
      tma_reduce_add_3d(args.dq, shared.dq[half] + d * kQueryRows, half * (kDim / 2) + d, row,
                        head);
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

// dQ (64 queries x half of the head dimension) = dS K.
template <int kDim>
__device__ __forceinline__ void multiply_dq(float (&dq)[kDim / 4], const __nv_bfloat16* ds,
                                            const __nv_bfloat16* k, int half) {
  const uint64_t a = operand_mn_major(ds, kKeyRows * 128);
  if constexpr (kDim == 128) {
    const uint64_t b = operand_mn_major(k + half * kKeyRows * 64, kKeyRows * 128);
#pragma unroll
    for (int i = 0; i < kKeyRows / 16; ++i) {
      wgmma_ss<64, true, true>(dq, operand_advance(a, i * 2048), operand_advance(b, i * 2048),
                               i > 0);
    }
  } else {
    const uint64_t b = operand_mn_major(k + half * 32, kKeyRows * 128);
#pragma unroll
    for (int i = 0; i < kKeyRows / 16; ++i) {
      wgmma_ss_n32_transposed(dq, operand_advance(a, i * 2048), operand_advance(b, i * 2048),
                              i > 0);
    }
  }
}

// A thread's place in its warpgroup. Read anew where it is needed: kept across the loop, the
// addresses that follow from it would take registers that the accumulators need.
struct Place {
  int lane;
  int warp;

  __device__ __forceinline__ Place() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane = thread % 32;
    warp = thread / 32 % 4;
  }
  __device__ int row() const { return warp * 16 + lane / 4; }  // the second is 8 further
  __device__ int column() const { return lane % 4 * 2; }       // and 8 j further
};

// One of the two computing warpgroups.
template <int kDim, bool kSums>
struct Computer {
  using Shared = BackwardShared<kDim>;

  const BackwardKernelArgs& args;
  Shared& shared;
  const int half;  // which 64 key rows, and which columns of dQ
  int dq_count = 0;
  int step = 0;

  __device__ Computer(const BackwardKernelArgs& args, Shared& shared, int half)
      : args(args), shared(shared), half(half) {}

  // Hides what a query may not see.
  __device__ void mask(float (&s)[32], const StepInfo& info, const Unit& unit) const {
    const Place place;
    const int row0 = half * 64 + place.row();
    const int column0 = place.column();
    const Visibility& visibility = args.params.visibility;
    const int chunk = static_cast<int>(args.params.shape.chunk);
    const int past_tokens = static_cast<int>(args.params.past.num_tokens);
    const int range_begin = info.key_range & 0xff;
    const int range_end = info.key_range >> 8 & 0xff;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = info.row + 8 * j + column0 + e;
        int begin = range_begin;
        int end = range_end;
        if (info.key_range & kCausal) end = min(end, row - unit.tile * kKeyRows + 1);
        if (info.key_range & kLower) {
          int lower = 0;
          if (visibility.first_key != nullptr) {
            lower = visibility
                        .first_key[static_cast<int64_t>(unit.batch) * chunk + min(row, chunk - 1)];
          }
          if (visibility.window > 0) {
            lower = static_cast<int>(
                max(static_cast<int64_t>(lower), past_tokens + row - visibility.window + 1));
          }
          begin = max(begin, lower - unit.key_begin);
        }
        if (row0 < begin || row0 >= end) s[4 * j + e] = -INFINITY;
        if (row0 + 8 < begin || row0 + 8 >= end) s[4 * j + 2 + e] = -INFINITY;
      }
    }
  }

  // Hands a dQ tile to the adding warp: boxes of 32 floats x 64 rows, swizzled.
  __device__ void hand_over(const float (&dq)[kDim / 4], const StepInfo& info) {
    barrier_wait(&shared.dq_empty[half], (dq_count & 1) ^ 1);
    ++dq_count;
    const Place at;
    const int row = at.row();
    char* base = reinterpret_cast<char*>(shared.dq[half]) + row * 128 + (at.lane & 1) * 8;
    const int piece = at.lane % 4 / 2;
    // Odd rows go through the columns in another order, so that the rows of a half warp fall on
    // different banks.
    const bool odd = row & 1;
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      const int other = j ^ 2;
      char* place = base + j / 4 * (kQueryRows * 128) +
                    ((((odd ? other : j) % 4 * 2 + piece) ^ (row & 7)) << 4);
      *reinterpret_cast<float2*>(place) =
          make_float2(odd ? dq[4 * other] : dq[4 * j], odd ? dq[4 * other + 1] : dq[4 * j + 1]);
      *reinterpret_cast<float2*>(place + 8 * 128) = make_float2(
          odd ? dq[4 * other + 2] : dq[4 * j + 2], odd ? dq[4 * other + 3] : dq[4 * j + 3]);
    }
    if (at.warp == 0 && at.lane == 0) shared.dq_info[half] = info;
    fence_async_shared();
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&shared.dq_full[half]);
  }

  // Writes this warpgroup's half of dS^T: 128 key rows of 64 queries, swizzled.
  __device__ void share_ds(const uint32_t (&packed)[16], int stage) {
    // Lane l writes row l % 8 of matrix l / 8; the matrices of a 16 x 16 block are (rows 0,
    // columns 0), (8, 0), (0, 8), (8, 8).
    const Place at;
    const int row = half * 64 + at.warp * 16 + at.lane % 16;
    const uint32_t target = shared_address(shared.ds[stage]) + row * 128;
    if constexpr (kSums) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_matrices(target + (((2 * i + at.lane / 16) ^ (at.lane & 7)) << 4), packed[4 * i],
                       packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
      }
      fence_async_shared();
    }
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&shared.ds_full[stage]);
  }

  __device__ void wait_ds(int step) {
    barrier_wait(&shared.ds_full[step & (kDsStages - 1)], step / kDsStages & 1);
  }

  // All steps of a unit. False if there are none.
  __device__ __forceinline__ bool walk(const Unit& unit, float (&dk)[kDim / 2],
                                       float (&dv)[kDim / 2]) {
    const uint64_t k_rows = operand_k_major(shared.k + half * 64 * 64);
    const uint64_t v_rows = operand_k_major(shared.v + half * 64 * 64);

    bool lagging = false;  // whether a dS waits to be multiplied
    while (true) {
      const int stage = step % kStages;
      const uint32_t parity = step / kStages & 1;
      barrier_wait(&shared.q_full[stage], parity);
      const StepInfo& info = shared.steps[step % kSteps];
      if (info.row < 0) break;

      // Declared here, so that none of them lives on into the next step.
      float s[32];
      float dp[32];
      float dq[kDim / 4];
      uint32_t packed_p[16];
      uint32_t packed_ds[16];

      const uint64_t q_rows = operand_k_major(shared.q[stage]);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        wgmma_ss<64>(s, operand_advance(k_rows, operand_k_step(d, kKeyRows)),
                     operand_advance(q_rows, operand_k_step(d, kQueryRows)), d > 0);
      }
      wgmma_commit();
      barrier_wait(&shared.do_full[stage], parity);
      const uint64_t do_rows = operand_k_major(shared.d_o[stage]);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        wgmma_ss<64>(dp, operand_advance(v_rows, operand_k_step(d, kKeyRows)),
                     operand_advance(do_rows, operand_k_step(d, kQueryRows)), d > 0);
      }
      wgmma_commit();

      wgmma_wait<1>();  // S, and dK of the step before
      if (lagging && Place().lane == 0) barrier_arrive(&shared.q_empty[stage ^ 1]);
      if (info.key_range & kMasked) mask(s, info, unit);
      const int column0 = Place().column();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][8 * j + column0]);
        s[4 * j] = exp2_approx(fmaf(s[4 * j], args.scale_log2, -lse.x));
        s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], args.scale_log2, -lse.y));
        s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], args.scale_log2, -lse.x));
        s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], args.scale_log2, -lse.y));
      }
      // Here, although dS is multiplied later: ptxas moves the exponentials behind the wait for dP
      // if nothing but arithmetic lies between, and then nothing runs beside that product.
      if constexpr (kSums) {
        if (lagging) wait_ds(step - 1);
      } else {
        barrier_wait(&shared.q_full[stage], parity);  // passes at once
      }
      wgmma_wait<0>();  // dP
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.delta[stage][8 * j + column0]);
        packed_p[2 * j] = pack_bf16(s[4 * j], s[4 * j + 1]);
        packed_p[2 * j + 1] = pack_bf16(s[4 * j + 2], s[4 * j + 3]);
        packed_ds[2 * j] =
            pack_bf16(s[4 * j] * (dp[4 * j] - delta.x), s[4 * j + 1] * (dp[4 * j + 1] - delta.y));
        packed_ds[2 * j + 1] = pack_bf16(s[4 * j + 2] * (dp[4 * j + 2] - delta.x),
                                         s[4 * j + 3] * (dp[4 * j + 3] - delta.y));
      }
      share_ds(packed_ds, step % kDsStages);

      if constexpr (kSums) {
        // The first step has no dS before it; its product is not used.
        wgmma_fence();
        multiply_dq<kDim>(dq, shared.ds[(step - 1) & (kDsStages - 1)], shared.k, half);
        wgmma_commit();
      } else {
        wgmma_fence();
      }
      const uint64_t do_columns = operand_mn_major(shared.d_o[stage], kQueryRows * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_rs<kDim, true>(dv, packed_p[4 * i], packed_p[4 * i + 1], packed_p[4 * i + 2],
                             packed_p[4 * i + 3], operand_advance(do_columns, i * 2048), 1);
      }
      wgmma_commit();
      const uint64_t q_columns = operand_mn_major(shared.q[stage], kQueryRows * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_rs<kDim, true>(dk, packed_ds[4 * i], packed_ds[4 * i + 1], packed_ds[4 * i + 2],
                             packed_ds[4 * i + 3], operand_advance(q_columns, i * 2048), 1);
      }
      wgmma_commit();
      if constexpr (kSums) {
        wgmma_wait<2>();  // dQ
        if (lagging) hand_over(dq, shared.steps[(step - 1) & (kSteps - 1)]);
      }
      wgmma_wait<1>();  // dV
      if (Place().lane == 0) barrier_arrive(&shared.do_empty[stage]);

      lagging = true;
      ++step;
    }

    // End of the unit: V is free, the last dQ is due.
    const int stage = step % kStages;
    barrier_wait(&shared.do_full[stage], step / kStages & 1);
    const int lane = Place().lane;
    if (lane == 0) barrier_arrive(&shared.v_empty);
    float dq[kDim / 4];
    if constexpr (kSums) {
      if (lagging) wait_ds(step - 1);
      wgmma_fence();
      multiply_dq<kDim>(dq, shared.ds[(step - 1) & (kDsStages - 1)], shared.k, half);
      wgmma_commit();
    }
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(&shared.k_empty);
      if (lagging) barrier_arrive(&shared.q_empty[stage ^ 1]);
    }
    if constexpr (kSums) {
      if (lagging) hand_over(dq, shared.steps[(step - 1) & (kSteps - 1)]);
    }
    if (lane == 0) {
      barrier_arrive(&shared.q_empty[stage]);
      barrier_arrive(&shared.do_empty[stage]);
      barrier_arrive(&shared.ds_full[step % kDsStages]);
    }
    ++step;
    return lagging;
  }

  __device__ void run() {
    float dk[kDim / 2];
    float dv[kDim / 2];
    for (int count = 0;; ++count) {
      barrier_wait(&shared.k_full, count & 1);
      const Unit& unit = shared.units[count & 1];
      if (unit.own < 0) break;
      barrier_wait(&shared.v_full, count & 1);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.0f;
      const bool any = walk(unit, dk, dv);
      if (unit.own) {
        write_own(unit, dk, dv);
      } else if (any) {
        add_page(unit, dk, dv);
      }
    }
    if constexpr (kSums) {
      barrier_wait(&shared.dq_empty[half], (dq_count & 1) ^ 1);
      const Place at;
      if (at.warp == 0 && at.lane == 0) shared.dq_info[half].row = -1;
      __syncwarp();
      if (at.lane == 0) barrier_arrive(&shared.dq_full[half]);
    }
  }

  __device__ void write_own(const Unit& unit, const float (&dk)[kDim / 2],
                            const float (&dv)[kDim / 2]) const {
    const BackwardParams& params = args.params;
    const float scale = static_cast<float>(params.scale);
    const Place at;
    const int row0 = half * 64 + at.row();
    const int column0 = at.column();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = unit.tile * kKeyRows + row0 + 8 * i;
      if (token >= params.shape.chunk) continue;
      auto* dk_row = static_cast<__nv_bfloat16*>(params.dk) + unit.batch * params.dk_strides.batch +
                     unit.kv_head * params.dk_strides.head + token * params.dk_strides.token;
      auto* dv_row = static_cast<__nv_bfloat16*>(params.dv) + unit.batch * params.dv_strides.batch +
                     unit.kv_head * params.dv_strides.head + token * params.dv_strides.token;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const int column = 8 * j + column0;
        *reinterpret_cast<uint32_t*>(dk_row + column) =
            pack_bf16(dk[4 * j + 2 * i] * scale, dk[4 * j + 2 * i + 1] * scale);
        *reinterpret_cast<uint32_t*>(dv_row + column) =
            pack_bf16(dv[4 * j + 2 * i], dv[4 * j + 2 * i + 1]);
      }
    }
  }

  __device__ void add_page(const Unit& unit, const float (&dk)[kDim / 2],
                           const float (&dv)[kDim / 2]) const {
    const BackwardParams& params = args.params;
    const int page_size = static_cast<int>(params.shape.page_size);
    // All rows of a warpgroup lie in one page.
    const int page = (unit.key_begin + half * 64) / page_size;
    if (half * 64 >= unit.row_end || half * 64 + 64 <= unit.row_begin) return;
    const device::GradientPage dk_page(params.grads, params.past.table_stride, unit.batch, page, 0);
    const device::GradientPage dv_page(params.grads, params.past.table_stride, unit.batch, page, 1);
    const float scale = static_cast<float>(params.scale);
    if (dk_page.dtype == DType::kFloat32) {
      add_floats(dk_page, unit, dk, scale);
      add_floats(dv_page, unit, dv, 1.0f);
    } else {
      add_bfloat16s(dk_page, unit, dk, scale);
      add_bfloat16s(dv_page, unit, dv, 1.0f);
    }
  }

  // Calls visit(i, element) for the two rows of this thread, with its first element in the page.
  template <typename Visit>
  __device__ __forceinline__ void visit_rows(const device::GradientPage& page, const Unit& unit,
                                             const Visit& visit) const {
    if (page.data == nullptr) return;
    const Place at;
    const int page_size = static_cast<int>(args.params.shape.page_size);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = half * 64 + at.row() + 8 * i;
      if (row >= unit.row_end) continue;
      visit(i,
            (unit.kv_head * page_size + (unit.key_begin + row) % page_size) * kDim + at.column());
    }
  }

  __device__ __forceinline__ void add_floats(const device::GradientPage& page, const Unit& unit,
                                             const float (&values)[kDim / 2], float scale) const {
    visit_rows(page, unit, [&](int i, int element) {
      float* target = static_cast<float*>(page.data) + element;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        reduce_add_pair(target + 8 * j, values[4 * j + 2 * i] * scale,
                        values[4 * j + 2 * i + 1] * scale);
      }
    });
  }

  __device__ __forceinline__ void add_bfloat16s(const device::GradientPage& page, const Unit& unit,
                                                const float (&values)[kDim / 2],
                                                float scale) const {
    visit_rows(page, unit, [&](int i, int element) {
      // All loads of a row first, so that it waits for one flight.
      uint32_t* target = static_cast<uint32_t*>(page.data) + element / 2;
      uint32_t old[kDim / 8];
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) old[j] = target[4 * j];
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        target[4 * j] = page.added_pair(old[j], values[4 * j + 2 * i] * scale,
                                        values[4 * j + 2 * i + 1] * scale, element + 8 * j);
      }
    });
  }
};

template <int kDim, bool kSums>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_kernel(const __grid_constant__ BackwardKernelArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = BackwardShared<kDim>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = threadIdx.x / 128;
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    constexpr int kWarps = 8;  // of both computing warpgroups
    barrier_init(&shared.k_full, 1);
    barrier_init(&shared.v_full, 1);
    barrier_init(&shared.k_empty, kWarps);
    barrier_init(&shared.v_empty, kWarps);
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
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    registers_shrink<24>();
    if (warp == 0) {
      Planner<kDim>(args, shared).run();
    } else if (threadIdx.x % 32 == 0) {
      if (warp == 1) {
        load_queries<kDim>(args, shared);
      } else if constexpr (kSums) {
        add_queries<kDim>(args, shared, warp - 2);
      }
    }
  } else {
    registers_grow<240>();
    // The same in all lanes, also to the compiler.
    const int half = __shfl_sync(0xffffffff, warpgroup - 1, 0);
    Computer<kDim, kSums>(args, shared, half).run();
  }
}

template <int kDim, bool kSums>
void launch_backward(const BackwardKernelArgs& args, int blocks) {
  constexpr int kBytes = sizeof(BackwardShared<kDim>);
  static_assert(kBytes <= 227 * 1024);
  check_cuda(cudaFuncSetAttribute(backward_kernel<kDim, kSums>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
  backward_kernel<kDim, kSums>
      <<<blocks, kBackwardThreads, kBytes, static_cast<cudaStream_t>(args.params.stream)>>>(args);
  check_launch("attention backward");
}

}  // namespace oomb::attention::sm90

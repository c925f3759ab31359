#pragma once

// The planner of the backward's main kernel: which units and steps come next.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/device/gradient_page.cuh"
#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_shared.cuh"
#include "attention/sm90/hidden_rows.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"

namespace oomb::attention::sm90 {

// Takes units, decides the order of steps, and loads keys and values. One warp; its lanes walk
// together and lane 0 issues. It has 24 registers: no 64-bit division, no unrolled loops.
template <int kDim, int kKeys, bool kSums>
struct Planner {
  using Shared = BackwardShared<kDim, kKeys, kSums>;

  const BackwardKernelArgs& args;
  Shared& shared;
  uint32_t step = 0;

  __device__ Planner(const BackwardKernelArgs& args, Shared& shared) : args(args), shared(shared) {}

  __device__ static bool leads() { return threadIdx.x % 32 == 0; }

  __device__ void run() {
    for (uint32_t count = 0;; ++count) {
      Unit& unit = shared.units[count & 1];
      // Waits until the computers have left the unit before this one. A unit is taken meanwhile,
      // but not where others may wait for what it adds to dQ. For its pages they can wait that
      // long.
      if constexpr (kSums) barrier_wait(&shared.k_empty, (count & 1) ^ 1);
      const int32_t word = take_unit();
      if constexpr (!kSums) barrier_wait(&shared.k_empty, (count & 1) ^ 1);
      constexpr uint32_t kWords = sizeof(Unit) / 4;
      const uint32_t lane = threadIdx.x % 32;
      if (lane < kWords) reinterpret_cast<int32_t*>(&unit)[lane] = word;
      __syncwarp();
      if (unit.own < 0) break;
      load_tile(unit, shared.k, args.k, 0, &shared.k_full);
      barrier_wait(&shared.v_empty, (count & 1) ^ 1);
      load_tile(unit, shared.v, args.v, 1, &shared.v_full);
      if (unit.row_begin < unit.row_end) {
        walk(unit);
        if (leads()) prefetch_gradients(unit);
      }
      mark(kUnitEnds);
    }
    mark(kAllDone);
    if (leads()) barrier_arrive(&shared.k_full);
  }

  // The next unit, a word per lane; past the last one own = -1.
  __device__ int32_t take_unit() {
    const uint32_t lane = threadIdx.x % 32;
    int index = 0;
    if (lane == 0) index = atomicAdd(args.workspace.next_unit, 1);
    index = __shfl_sync(0xffffffff, index, 0);
    if (index >= *args.workspace.num_units || lane >= sizeof(Unit) / 4) return -1;
    return reinterpret_cast<const int32_t*>(args.workspace.units + index)[lane];
  }

  // kind 0: keys, 1: values.
  __device__ void load_tile(const Unit& unit, __nv_bfloat16* target, const CUtensorMap& own_map,
                            int kind, uint64_t* full) {
    const bool hides = hides_rows(unit);
    if (leads()) {
      uint64_t* barrier = hides ? &shared.keys_settled : full;
      barrier_arrive_expect(barrier, sizeof(shared.k));
      copy_tile(unit, target, own_map, kind, barrier);
    }
    if (!hides) return;
    barrier_wait(&shared.keys_settled, kind);  // keys, then values: phases 0 and 1
    zero_rows_outside<kKeys, kDim>(target, unit.row_begin, unit.row_end);
    if (leads()) barrier_arrive(full);
  }

  // Whether rows of the tile arrive that nobody sees. What is not there arrives as zeros.
  __device__ bool hides_rows(const Unit& unit) const {
    if (unit.row_begin >= unit.row_end) return false;  // nothing is multiplied
    if (unit.own) {
      const int rows = static_cast<int>(args.params.shape.chunk) - unit.tile * kKeys;
      return unit.row_begin > 0 || unit.row_end < min(kKeys, rows);
    }
    const int page_size = static_cast<int>(args.params.shape.page_size);
    return ((unit.row_begin | unit.row_end) & (min(page_size, kKeys) - 1)) != 0;
  }

  __device__ void copy_tile(const Unit& unit, __nv_bfloat16* target, const CUtensorMap& own_map,
                            int kind, uint64_t* barrier) {
    if (unit.own) {
      for (int d = 0; d < kDim; d += 64) {
        tma_load_4d(target + d * kKeys, own_map, barrier, d, unit.tile * kKeys, unit.kv_head,
                    unit.batch);
      }
      return;
    }
    const int page_size = static_cast<int>(args.params.shape.page_size);
    for (int row = 0; row < kKeys; row += page_size) {
      // Rows past the end of the pool arrive as zeros.
      int pool_row = 0x7fffff00;
      if (row < unit.row_end && row + page_size > unit.row_begin) {
        const int page = (unit.key_begin + row) / page_size;
        const int slot =
            args.params.past.block_table[unit.batch * args.params.past.table_stride + page];
        if (slot < 0) __trap();  // a page that is not resident must never be read as zeros
        pool_row =
            slot * args.pool_rows_per_slot +
            (kind * static_cast<int>(args.params.shape.kv_heads) + unit.kv_head) * page_size +
            (unit.key_begin + row) % page_size;
      }
      for (int d = 0; d < kDim; d += 64) {
        tma_load_2d(target + d * kKeys + row * 64, args.pool, barrier, d, pool_row,
                    CacheHint::kEvictFirst);
      }
    }
  }

  // Brings gradients that the computers will read and write into the L2 while they do the last
  // steps. Gradients in fp32 are added to where they lie; nobody waits for those.
  __device__ void prefetch_gradients(const Unit& unit) const {
    const BackwardParams& params = args.params;
    if (unit.own || params.grads.dtype != DType::kBFloat16) return;
    const int page_size = static_cast<int>(params.shape.page_size);
    const int rows = min(page_size, kKeys);
#pragma unroll 1
    for (int row = 0; row < kKeys; row += rows) {
      if (row >= unit.row_end || row + rows <= unit.row_begin) continue;
      const int key = unit.key_begin + row;
#pragma unroll 1
      for (int kind = 0; kind < 2; ++kind) {
        const device::GradientPage page(params.grads, params.past.table_stride, unit.batch,
                                        key / page_size, kind);
        if (page.data == nullptr) continue;
        const int first = unit.kv_head * page_size + key % page_size;
        bulk_prefetch(static_cast<__nv_bfloat16*>(page.data) + first * kDim,
                      rows * kDim * static_cast<uint32_t>(sizeof(__nv_bfloat16)));
      }
    }
  }

  // The query tiles of the unit's blocks that can see it, block by block and in a block head by
  // head, so that the group's heads stay close together. With lists those that list the unit.
  __device__ void walk(const Unit& unit) {
    const int tiles_per_block = kDim == 256 ? args.tiling.block_rows / kQueryRows  // pages of 128
                                            : kKeys / kQueryRows;
    const bool listed = !unit.own && args.params.past.selection != nullptr;
    const bool descends = unit.own && args.tiling.own_descends;
    int block = unit.block_begin;
    while (true) {
      if (listed) block = next_reader(unit, block);
      if (block >= unit.block_end) break;
      const int place = descends ? unit.block_begin + unit.block_end - 1 - block : block;
#pragma unroll 1
      for (int head = 0; head < args.group; ++head) {
#pragma unroll 1
        for (int i = 0; i < tiles_per_block; ++i) {
          emit(unit, place * tiles_per_block + i, head);
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

  // One step, unless nothing of the unit is seen.
  __device__ void emit(const Unit& unit, int tile, int head) {
    if (tile >= args.query_tiles) return;
    const QueryTile& seen = args.workspace.query_tiles[unit.batch * args.query_tiles + tile];
    int rank;
    uint32_t flags = 0;
    if (unit.own) {
      rank = seen.last_own - unit.tile;
      if (rank < 0 || unit.tile < seen.first_own) return;
      if (tile * kQueryRows < unit.tile * kKeys + kKeys - 1) flags = kCausal;
    } else {
      if (unit.tile < seen.first_past) return;
      rank = seen.past_rank + unit.tile;
    }
    if (seen.lower_max > unit.key_begin) flags |= kLower;
    if (flags != 0 || unit.row_begin > 0 || unit.row_end < kKeys) flags |= kMasked;
    if (seen.empty_rows) flags |= kEmptyRows;
    barrier_wait(&shared.step_empty[step % kSteps], (step / kSteps & 1) ^ 1);
    if (leads()) {
      StepInfo& info = shared.steps[step % kSteps];
      info.row = tile * kQueryRows;
      info.head = unit.kv_head * args.group + head;
      info.batch = unit.batch;
      info.rank = rank;
      info.key_range = unit.row_begin | unit.row_end << 8 | flags;
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

}  // namespace oomb::attention::sm90

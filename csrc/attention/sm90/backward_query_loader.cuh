#pragma once

// What the loading warp of the query kernel (backward_query.cuh) shares with the computing ones,
// and that warp: queries once, then the keys that they see.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "attention/sm90/hidden_rows.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"

namespace oomb::attention::sm90 {

// A stage's keys.
struct KeyInfo {
  int32_t key_begin;  // in the sequence; -1: no more
  int32_t row_begin;  // rows that exist
  int32_t row_end;
  int32_t masked;
};

// K is needed until the next step's S is there, V until dP is. At head dim 256 a tile is 32 KiB: Q
// and dO 4 of them, K 2, V 1, together 224 of 227 KiB.
template <int kDim>
struct QueryShared {
  static constexpr int kTile = 64 * kDim;
  static constexpr int kKeyStages = kDim == 256 ? 2 : 4;
  static constexpr int kValueStages = kDim == 256 ? 1 : 4;

  alignas(1024) __nv_bfloat16 k[kKeyStages][kTile];
  alignas(1024) __nv_bfloat16 v[kValueStages][kTile];
  alignas(1024) __nv_bfloat16 q[2][kTile];
  alignas(1024) __nv_bfloat16 d_o[2][kTile];
  KeyInfo keys[kKeyStages];
  uint64_t k_full[kKeyStages], k_empty[kKeyStages];
  uint64_t v_full[kValueStages], v_empty[kValueStages];
  uint64_t q_full;
  uint64_t settled;  // see hidden_rows.cuh
};

// What a warpgroup works on.
struct QueryUnit {
  int batch;
  int kv_head;
  int block;  // of page_size queries
  int tile;   // of 64 queries
  int head;
  bool valid;

  __device__ QueryUnit(const BackwardKernelArgs& args, int half) {
    const Shape& shape = args.params.shape;
    const int group = args.group;
    const int kv_heads = static_cast<int>(shape.kv_heads);
    const int page_size = static_cast<int>(shape.page_size);
    const int chunk = static_cast<int>(shape.chunk);
    const int blocks = (chunk + page_size - 1) / page_size;
    const bool two_tiles = page_size == 2 * kQueryRows;
    const int units = two_tiles ? group : (group + 1) / 2;
    int index = blockIdx.x;
    const int of_group = two_tiles ? index % units : 2 * (index % units) + half;
    index /= units;
    // Of a kv head, those that see most of the own chunk come first.
    block = blocks - 1 - index % blocks;
    index /= blocks;
    kv_head = index % kv_heads;
    batch = index / kv_heads;
    tile = two_tiles ? 2 * block + half : block;
    head = kv_head * group + of_group;
    valid = of_group < group && tile * kQueryRows < chunk;
  }
};

// Loads queries once, then keys and values. One warp; its lanes walk together and lane 0 issues.
template <int kDim>
__device__ inline void load_keys(const BackwardKernelArgs& args, QueryShared<kDim>& shared) {
  const BackwardParams& params = args.params;
  const PastPages& past = params.past;
  const QueryUnit unit(args, 0);
  const QueryUnit other(args, 1);
  const int chunk = static_cast<int>(params.shape.chunk);
  const int page_size = static_cast<int>(params.shape.page_size);
  const int past_tokens = static_cast<int>(past.num_tokens);
  const bool leads = threadIdx.x == 0;

  if (leads) barrier_arrive_expect(&shared.q_full, sizeof(shared.q) + sizeof(shared.d_o));
#pragma unroll
  for (int i = 0; i < 2 && leads; ++i) {
    // What does not exist arrives as zeros.
    const QueryUnit& half = i == 0 ? unit : other;
    const int row = half.valid ? half.tile * kQueryRows : chunk;
    const int head = half.valid ? half.head : 0;
    for (int d = 0; d < kDim; d += 64) {
      tma_load_4d(shared.q[i] + d * 64, args.q, &shared.q_full, d, row, head, unit.batch);
      tma_load_4d(shared.d_o[i] + d * 64, args.d_o, &shared.q_full, d, row, head, unit.batch);
    }
  }

  const QueryTile* tiles = args.workspace.query_tiles + unit.batch * args.query_tiles;
  int lower_min = tiles[unit.tile].lower_min;
  int lower_max = tiles[unit.tile].lower_max;
  if (other.valid) {
    lower_min = min(lower_min, tiles[other.tile].lower_min);
    lower_max = max(lower_max, tiles[other.tile].lower_max);
  }
  int num_keys = 0x7fffffff;
  if (params.visibility.num_keys != nullptr) num_keys = params.visibility.num_keys[unit.batch];

  using Shared = QueryShared<kDim>;
  int step = 0;
  uint32_t settled = 0;
  // Fills a stage with the keys [key_begin + row_begin, key_begin + row_end); `rows` of the tile
  // are there, the others arrive as zeros. copy(to, is K, barrier, first column) is called by one
  // lane.
  const auto put = [&](int key_begin, int row_end, int rows, bool masked, const auto& copy) {
    const int k_stage = step % Shared::kKeyStages;
    const int v_stage = step % Shared::kValueStages;
    const int row_begin = max(0, lower_min - key_begin);
    const bool hides = row_begin > 0 || row_end < rows;
    const auto load = [&](__nv_bfloat16* tile, bool is_key, uint64_t* full) {
      if (leads) {
        uint64_t* barrier = hides ? &shared.settled : full;
        barrier_arrive_expect(barrier, sizeof(shared.k[0]));
#pragma unroll 1
        for (int d = 0; d < kDim; d += 64) copy(tile + d * 64, is_key, barrier, d);
      }
      if (hides) {
        barrier_wait(&shared.settled, settled & 1);
        ++settled;
        zero_rows_outside<kQueryKernelKeys, kDim>(tile, row_begin, row_end);
        if (leads) barrier_arrive(full);
      }
    };
    barrier_wait(&shared.k_empty[k_stage], (step / Shared::kKeyStages & 1) ^ 1);
    if (leads) {
      KeyInfo& info = shared.keys[k_stage];
      info.key_begin = key_begin;
      info.row_begin = row_begin;
      info.row_end = row_end;
      info.masked = masked || row_begin > 0 || row_end < kQueryKernelKeys || lower_max > key_begin;
    }
    load(shared.k[k_stage], true, &shared.k_full[k_stage]);
    barrier_wait(&shared.v_empty[v_stage], (step / Shared::kValueStages & 1) ^ 1);
    load(shared.v[v_stage], false, &shared.v_full[v_stage]);
    ++step;
  };

  if (args.own_tiles > 0) {
    const int first = max(0, lower_min - past_tokens) / kQueryKernelKeys;
    const int last = other.valid ? other.tile : unit.tile;
#pragma unroll 1
    for (int tile = first; tile <= last; ++tile) {
      const int row = tile * kQueryKernelKeys;
      const int rows = min(kQueryKernelKeys, chunk - row);
      const int row_end = min(rows, num_keys - past_tokens - row);
      if (row_end <= 0) break;
      put(past_tokens + row, row_end, rows, tile >= unit.tile,
          [&](void* to, bool is_key, uint64_t* barrier, int d) {
            tma_load_4d(to, is_key ? args.k : args.v, barrier, d, row, unit.kv_head, unit.batch);
          });
    }
  }

  if (args.tiling.past_tiles > 0) {
    const int32_t* pages = nullptr;
    int i = max(static_cast<int>(past.page_begin), lower_min / page_size);
    int end = static_cast<int>(past.page_end);
    if (past.selection != nullptr) {
      const int lists = static_cast<int>(past.selection_heads);
      const int blocks = (chunk + page_size - 1) / page_size;
      const int64_t list = (static_cast<int64_t>(unit.batch) * blocks + unit.block) * lists +
                           (lists == 1 ? 0 : unit.kv_head);
      pages = past.selection + list * past.budget;
      i = 0;
      end = static_cast<int>(past.budget);
    }
    const int tokens = min(past_tokens, num_keys);
#pragma unroll 1
    for (; i < end; ++i) {
      const int page = pages == nullptr ? i : pages[i];
      if (page < 0 || page >= past.page_end) break;
      if (page * page_size >= tokens) break;  // a sequence that has ended has no page there
      if (page < past.page_begin) continue;
      if ((page + 1) * page_size <= lower_min) continue;
      const int slot = past.block_table[unit.batch * past.table_stride + page];
      if (slot < 0) __trap();  // a page that is not resident must never be read as zeros
#pragma unroll 1
      for (int row = 0; row < page_size; row += kQueryKernelKeys) {
        const int key_begin = page * page_size + row;
        const int row_end = min(kQueryKernelKeys, tokens - key_begin);
        if (row_end <= 0) break;
        const int k_row = slot * args.pool_rows_per_slot + unit.kv_head * page_size + row;
        const int v_row = k_row + static_cast<int>(params.shape.kv_heads) * page_size;
        put(key_begin, row_end, kQueryKernelKeys, false,
            [&](void* to, bool is_key, uint64_t* barrier, int d) {
              tma_load_2d(to, args.pool, barrier, d, is_key ? k_row : v_row);
            });
      }
    }
  }
  const int stage = step % Shared::kKeyStages;
  barrier_wait(&shared.k_empty[stage], (step / Shared::kKeyStages & 1) ^ 1);
  if (leads) {
    shared.keys[stage].key_begin = -1;
    barrier_arrive(&shared.k_full[stage]);
  }
}

}  // namespace oomb::attention::sm90

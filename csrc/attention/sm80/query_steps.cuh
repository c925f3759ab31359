#pragma once

// The sequence of (query tile, head) steps that a tile of keys goes through in the dK, dV pass:
// query tiles ascending, and for each the heads of the group. Walked as key_tiles.cuh walks keys:
// by one thread, two steps ahead, with its state in shared memory.

#include <cstdint>

#include "attention/sm80/backward_plan.h"
#include "attention/sm80/key_tiles.cuh"

namespace oomb::attention::sm80 {

constexpr int kKeys = 64;     // of a block
constexpr int kQueries = 64;  // of one step

struct QueryStep {
  const void *q, *d_o;
  const float *lse, *delta;
  int first;   // query of the chunk
  int rows;    // that exist; 0: no more steps
  int masked;  // some query does not see all of the keys
};

struct QuerySteps {
  QueryStep ring[4];

  int batch, kv_head;
  int key_first;  // the block's keys [key_first, key_first + kKeys), numbered as in the sequence
  int key_end;    // keys from here on are visible to nobody
  int tile;       // current query tile and head in the group
  int head;
  const uint32_t* blocks;  // query blocks that list the page; null: all
  int tiles_per_block;

  // One thread calls it.
  __device__ void start(const BackwardParams& p, const BackwardPlan& plan, int batch_index,
                        int kv_head_index, int first_key, int end_key, int first_tile,
                        const uint32_t* block_bits) {
    batch = batch_index;
    kv_head = kv_head_index;
    key_first = first_key;
    key_end = end_key;
    blocks = block_bits;
    tiles_per_block = static_cast<int>(p.shape.page_size) / kQueries;
    tile = first_tile - 1;
    head = static_cast<int>(p.shape.query_heads / p.shape.kv_heads) - 1;
    describe(p, plan, 0);
    describe(p, plan, 1);
  }

  __device__ void describe(const BackwardParams& p, const BackwardPlan& plan, int index) {
    QueryStep& step = ring[index % 4];
    const int group = static_cast<int>(p.shape.query_heads / p.shape.kv_heads);
    const int num_tiles = static_cast<int>(plan.query_tiles);
    if (++head == group) {
      head = 0;
      do {
        ++tile;
      } while (tile < num_tiles && !sees(p, plan));
    }
    step.rows = 0;
    if (tile >= num_tiles) return;
    step.first = tile * kQueries;
    step.rows = min(kQueries, static_cast<int>(p.shape.chunk) - step.first);
    const RowRange range = range_of(p, plan);
    step.masked = key_first < range.last_begin || key_first + kKeys > min(range.full_end, key_end);
    const int query_head = kv_head * group + head;
    step.q =
        static_cast<const char*>(p.q) + (batch * p.q_strides.batch + query_head * p.q_strides.head +
                                         step.first * p.q_strides.token) *
                                            kElementBytes;
    step.d_o = static_cast<const char*>(p.d_o) +
               (batch * p.do_strides.batch + query_head * p.do_strides.head +
                step.first * p.do_strides.token) *
                   kElementBytes;
    const int64_t row = (batch * p.shape.query_heads + query_head) * p.shape.chunk + step.first;
    step.lse = static_cast<const float*>(p.lse) + row;
    step.delta = static_cast<const float*>(p.delta) + row;
  }

 private:
  __device__ RowRange range_of(const BackwardParams& p, const BackwardPlan& plan) const {
    if (plan.ranges != nullptr) return plan.ranges[batch * plan.query_tiles + tile];
    return RowRange{0, 0, static_cast<int>(p.past.num_tokens) + tile * kQueries + 1, 0};
  }

  __device__ bool sees(const BackwardParams& p, const BackwardPlan& plan) const {
    if (blocks != nullptr) {
      const int block = tile / tiles_per_block;
      if ((blocks[block / 32] >> (block % 32) & 1) == 0) return false;
    }
    return plan.ranges == nullptr || range_of(p, plan).first_begin < key_first + kKeys;
  }
};

}  // namespace oomb::attention::sm80

#pragma once

// The sequence of (query tile, head) steps that a tile of keys goes through: query tiles ascending,
// and for each the heads of the group. Walked as key_tiles.cuh walks keys: by one thread, two steps
// ahead, with its state in shared memory.

#include <cstdint>

#include "attention/sm80/backward_plan.h"
#include "attention/sm80/key_tiles.cuh"

namespace oomb::attention::sm80 {

constexpr int kQueries = 64;  // of one step

struct QueryStep {
  const void *q, *d_o;
  int64_t row;   // its first row of what is laid out [B, Hq, C]
  int first;     // query of the chunk
  int rows;      // that exist; 0: no more steps
  int masked;    // some query does not see all of the keys
  int dq_tile;   // of the [B, Hq, query tiles]
  int dq_order;  // parts of this tile's dQ that come before this one, where the order is fixed
};

template <int kKeys>  // of a block
struct QuerySteps {
  static constexpr int kRing = 8;  // one in use, two ahead, two whose dQ is still under way
  QueryStep ring[kRing];

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
    QueryStep& step = ring[index % kRing];
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
    const int heads_before = batch * static_cast<int>(p.shape.query_heads) + query_head;
    step.row = heads_before * p.shape.chunk + step.first;
    step.dq_tile = heads_before * num_tiles + tile;
    step.dq_order = dq_order(p, range);
  }

 private:
  __device__ RowRange range_of(const BackwardParams& p, const BackwardPlan& plan) const {
    if (plan.ranges != nullptr) return plan.ranges[batch * plan.query_tiles + tile];
    return RowRange{0, 0, static_cast<int>(p.past.num_tokens) + tile * kQueries + 1, 0};
  }

  // Of the key tiles that the query tile sees in this wave, how many come before this one: the
  // chunk's own from the diagonal back to the first, then the past's from the first on.
  __device__ int dq_order(const BackwardParams& p, const RowRange& range) const {
    const int num_past = static_cast<int>(p.past.num_tokens);
    const int last_own = tile * kQueries / kKeys;
    if (key_first >= num_past) return last_own - (key_first - num_past) / kKeys;
    const int first_own = max(range.first_begin - num_past, 0) / kKeys;
    const int own = p.own_chunk ? max(last_own - first_own + 1, 0) : 0;
    const int tiles_per_page = static_cast<int>(p.shape.page_size) / kKeys;
    const int begin = static_cast<int>(p.past.page_begin) * tiles_per_page;
    return own + key_first / kKeys - max(begin, range.first_begin / kKeys);
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

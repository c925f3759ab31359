#pragma once

// What a thread block of the forward works on, and where its softmax state lies between waves and
// between pieces.

#include <cstdint>

#include "attention/params.h"
#include "attention/sm80/forward_plan.h"

namespace oomb::attention::sm80 {

// What a block works on: a piece of the keys of a tile of queries. In shared memory, so that the
// main loop, which has no register to spare, keeps nothing of it.
struct ForwardUnit {
  int query_first, head, batch;
  int tile;  // number of the tile
  int piece, pieces;

  __device__ void choose(const ForwardParams& p, const ForwardPlan& plan, int index, int rows) {
    const int parted = plan.tiles - plan.whole;
    const bool whole = index < plan.whole;
    pieces = whole ? 1 : plan.pieces;
    piece = whole ? 0 : (index - plan.whole) / parted;
    tile = whole ? index : plan.whole + (index - plan.whole) % parted;
    const int heads = static_cast<int>(p.shape.query_heads);
    query_first = (plan.query_tiles - 1 - tile % plan.query_tiles) * rows;  // most keys first
    head = tile / plan.query_tiles % heads;
    batch = tile / plan.query_tiles / heads;
  }
};

// Where the rows of a tile's softmax state lie: row i at place + i.
struct StatePlace {
  float *acc, *max, *sum;
  int64_t row;

  // Between waves.
  __device__ StatePlace(const ForwardParams& p, const ForwardUnit& unit)
      : acc(static_cast<float*>(p.state.acc)),
        max(static_cast<float*>(p.state.max)),
        sum(static_cast<float*>(p.state.sum)),
        row((unit.batch * p.shape.query_heads + unit.head) * p.shape.chunk + unit.query_first) {}
  // Between pieces.
  __device__ StatePlace(const ForwardPlan& plan, const ForwardUnit& unit, int rows)
      : acc(plan.acc), max(plan.max), sum(plan.sum), row(int64_t{unit.tile - plan.whole} * rows) {}
};

}  // namespace oomb::attention::sm80

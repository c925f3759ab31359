#pragma once

// What a pass over the keys needs to know before it starts, made on the device in the work space:
//
//   ranges   [B, query tiles of 64]  what each tile's rows see in common (only where documents,
//                                    windows or padding make it differ from plain causality)
//   blocks   [B, lists, pages, words] the transposed selection: a bit per query block that lists
//                                    the page. Set with atomicOr: the order cannot matter
//   work     [B, lists, capacity]    the wave's pages that any block lists and that want a
//                                    gradient (one pass: all that are listed), those with most
//                                    blocks first
//   counts   [B, lists]              entries of `work`
//
// and, where one pass does everything:
//
//   lse      [B, Hq, C]              times log2(e); +inf where a row sees nothing, so that P = 0
//   dq       [B, Hq, C, D]           the sum, see dq_tile.cuh; dq_acc where there is one
//   turns    [B, Hq, query tiles]    parts of a tile's dQ added so far; null: in any order
//   next_unit                        with turns: the thread blocks that have started

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm80 {

struct RowRange {
  int first_begin, last_begin, full_end, unused;
};

struct BackwardPlan {
  RowRange* ranges = nullptr;
  uint32_t* blocks = nullptr;
  int32_t* work = nullptr;
  int32_t* counts = nullptr;
  float* lse = nullptr;
  float* dq = nullptr;
  int32_t* turns = nullptr;
  int32_t* next_unit = nullptr;
  bool in_one_pass = false;
  int64_t query_tiles = 0;
  int64_t query_blocks = 0;
  int64_t pages = 0;     // of the wave
  int64_t words = 0;     // per page
  int64_t capacity = 0;  // of one work list
  int64_t bytes = 0;

  // Lays the plan out from `workspace` on (null: sizes only).
  BackwardPlan(const BackwardParams& params, void* workspace);
};

void make_plan(const BackwardParams& params, const BackwardPlan& plan);

}  // namespace oomb::attention::sm80

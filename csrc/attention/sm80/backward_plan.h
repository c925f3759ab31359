#pragma once

// What the dK, dV pass needs to know before it starts, made on the device in the work space:
//
//   ranges   [B, query tiles of 64]  what each tile's rows see in common (only where documents,
//                                    windows or padding make it differ from plain causality)
//   blocks   [B, lists, pages, words] the transposed selection: a bit per query block that lists
//   the
//                                    page. Bits are set with atomicOr: the order cannot matter
//   work     [B, lists, capacity]    the wave's pages that any block lists and that want a
//                                    gradient, those with most blocks first
//   counts   [B, lists]              entries of `work`

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

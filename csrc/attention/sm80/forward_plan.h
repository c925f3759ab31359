#pragma once

// How the forward's work is handed to thread blocks. Tiles of queries rarely fill the GPU a whole
// number of times: 28 heads of 4,096 queries are 896 tiles for the 264 blocks that an H200 runs at
// once, so that the fourth round would be 39 % full. Therefore the last one to two rounds of tiles
// are parted: each tile's keys go to several blocks, one after the other, and the softmax state
// from one to the next through memory. The order of the sums stays the same, and so do the bits.
//
//   | whole tiles | first pieces of the others | second pieces | ..
//
// A piece follows the one before at a distance of more blocks than run at once, so that it hardly
// ever waits.

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm80 {

struct ForwardPlan {
  int query_tiles = 0;  // of a head
  int tiles = 0;
  int whole = 0;   // the first tiles, done by one block each
  int pieces = 1;  // of every other tile
  int units = 0;   // blocks

  // In the work space, where tiles are parted; else null.
  int32_t* next_unit = nullptr;  // blocks that have started
  int32_t* turns = nullptr;      // [tiles - whole]: pieces done
  float* acc = nullptr;          // [tiles - whole, rows, D]: state between pieces
  float* max = nullptr;          // [tiles - whole, rows]
  float* sum = nullptr;
  int64_t clear_bytes = 0;  // from next_unit on, to be zero at the start
  int64_t bytes = 0;

  // A tile has `rows` queries; `at_once` blocks run at the same time.
  ForwardPlan(const ForwardParams& params, int rows, int at_once);

  // Without a work space.
  void keep_whole();
};

}  // namespace oomb::attention::sm80

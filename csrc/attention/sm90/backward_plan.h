#pragma once

// What the backward's kernels share: tile sizes, the workspace, and the main kernel's arguments.
//
// One fused pass. A unit of work is one key tile (128 rows: a page of 128, or the pages 2j and
// 2j + 1 of 64) of one kv head. A thread block keeps the unit's K and V in shared memory, walks the
// query tiles that see it for all heads of the group, and accumulates dK and dV in registers: every
// gradient page has one writer (but see below). dQ is added up in fp32 in memory by the copy
// engine.
//
// With lists of pages of 64 a key tile is one such page, as its neighbour has other readers, and a
// thread block has two units at work.
//
// At head dim 256 a key tile has 64 rows: a page of 64 or half a page of 128. dQ comes from a
// kernel of its own (backward_query.cuh) in every mode, so it has no order here.
//
// dQ and determinism. Each query tile has a counter. A unit adds its part when the counter has
// reached its rank, and then raises it, so the order of the sum is fixed:
//   own tiles from the diagonal down to the first one, then past tiles ascending.
// Units are handed out in an order in which every wait is for an earlier unit (own tiles last to
// first, then past tiles ascending), so nothing can wait forever; and blocks that run side by side
// trail each other by a step or two, so waits are short:
//
//   block 0   unit 0  | tile 0 | tile 1 | tile 2 | tile 3 | ...
//   block 1   unit 1           | tile 0 | tile 1 | tile 2 | ...
//   block 2   unit 2                    | tile 0 | tile 1 | ...
//
// Where walks of past tiles are long, the last query blocks are units of their own, which close the
// launch, all heads in turn. A gradient page is then added to twice, in this order:
//
//   head 0: own tiles, past tiles | head 1: ... | ... | past tile 0: heads 0, 1, .. | tile 1: ..
//           all blocks  all but the last                the last blocks
//
// Where no order binds dQ, units are arranged so that what blocks side by side read and add to lies
// in the L2:
//   dense   a head's queries come in stripes that fit; within one, every past tile is a unit, and
//           its gradient page is added to once per stripe. dQ is kept in the L2 by priority.
//   lists   own tiles come first, head by head and the longest first; past tiles follow, those with
//           more readers before others (by powers of two): a page that every block lists takes as
//           long as thirty that one lists, and blocks would wait for it at the end.
// Either way own tiles walk from the last query block, which all of them see: walked from their
// diagonals, blocks side by side would read different queries.

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm90 {

inline constexpr int kQueryRows = 64;        // of a query tile
inline constexpr int kQueryKernelKeys = 64;  // of a stage of the query kernel
inline constexpr int kReaderClasses = 6;     // of listed tiles: 1 reader, 2 or 3, .., 32 and more

// What a query tile sees, over its rows.
struct alignas(32) QueryTile {
  int32_t lower_min;  // smallest and largest first visible key
  int32_t lower_max;
  int32_t first_own;  // own tiles seen
  int32_t last_own;
  int32_t first_past;  // first past tile seen
  int32_t past_rank;   // plus a past tile's number: the parts of dQ that come before it in a wave
  int32_t empty_rows;  // 1: some row of some head sees nothing
};

// A unit of work.
struct Unit {
  int32_t own;  // own chunk or past; -1: no more units
  int32_t batch;
  int32_t kv_head;
  int32_t tile;         // key tile: of the chunk if own, else of the past
  int32_t entry;        // lists: of its readers
  int32_t block_begin;  // query blocks that may see it
  int32_t block_end;
  int32_t key_begin;  // first key, in the sequence
  int32_t row_begin;  // rows of the tile that some query may see
  int32_t row_end;
};

// Pointers into the workspace. Tc: query tiles, Cp = 64 Tc padded rows, j: past key tiles of the
// wave, S: selection heads.
struct BackwardWorkspace {
  float* lse = nullptr;              // [B Hq, Cp] times log2(e); +inf where a row sees nothing
  float* delta = nullptr;            // [B Hq, Cp]
  float* dq = nullptr;               // [B Hq, C, D], null where dq_acc is given
  QueryTile* query_tiles = nullptr;  // [B, Tc]
  int32_t* counters = nullptr;       // [B Hq, Tc, 2]: parts added to each half of a dQ tile
  int32_t* page_turns = nullptr;     // [B Hkv, j, 8]: query blocks that a warp has added to pages
  int32_t* next_unit = nullptr;      // the units handed out so far
  int32_t* num_units = nullptr;
  int32_t* empty_rows = nullptr;  // [B, Tc], becomes QueryTile::empty_rows
  Unit* units = nullptr;          // in the order in which they are handed out
  int64_t max_units = 0;

  // Lists, for entry (b, s, j).
  uint32_t* readers = nullptr;  // [entries, reader_words], bit i: query block i lists j
  int64_t reader_words = 0;
  int64_t list_tiles = 0;           // past key tiles of the wave
  int32_t* active = nullptr;        // the tiles with any reader, list after list, class by class
  int32_t* active_begin = nullptr;  // [B S kReaderClasses + 1], where those of a class begin

  int64_t zeroed_offset = 0;  // counters .. readers are zeroed before a launch
  int64_t zeroed_bytes = 0;
  int64_t bytes = 0;
};

// Lays the workspace out at `base` (null: only sizes it).
BackwardWorkspace plan_workspace(const BackwardParams& params, void* base);

// Key tiles and query blocks, and how units go through them.
struct Tiling {
  int32_t key_rows = 128;    // or 64
  int32_t block_rows = 128;  // of a query block; with lists a page's, else as many as a tile's
  int32_t tile_begin = 0;    // past key tiles of the wave
  int32_t past_tiles = 0;
  int32_t stripes = 1;  // of query blocks but the closing ones; a past tile is one unit per stripe
  int32_t stripe_blocks = 0;
  int32_t closing_blocks = 0;  // more than 0: units add to a gradient page in turn
  bool own_descends = false;   // own tiles walk the query blocks from the last one
  bool sums_stay = false;      // dQ keeps its priority in the L2
};

Tiling plan_tiling(const BackwardParams& params);

struct BackwardKernelArgs {
  CUtensorMap q, d_o, k, v, pool, dq;
  BackwardParams params;
  BackwardWorkspace workspace;
  Tiling tiling;
  int32_t pool_rows_per_slot;
  int32_t own_tiles;  // 0 where the wave leaves the own chunk out
  int32_t heads_together;
  int32_t query_tiles;  // of 64 rows
  int32_t group;        // query heads per kv head
  float scale_log2;     // scale times log2(e)
};

// Whether dQ comes from the query kernel (backward_query.cuh).
inline bool queries_apart(const BackwardParams& params) {
  if (params.shape.head_dim == 256) return true;
  return params.past.selection != nullptr && (params.deterministic || params.shape.page_size == 64);
}

// Whether units add to dQ in a fixed order.
inline bool adds_in_order(const BackwardParams& params) {
  return params.deterministic && !queries_apart(params);
}

// (Batch, kv head) pairs whose units alternate; those of the others come after.
int64_t heads_together(const BackwardParams& params);

// One translation unit per kernel and head dimension.
void launch_backward_d64(const BackwardKernelArgs& args, int blocks);
void launch_backward_d128(const BackwardKernelArgs& args, int blocks);
void launch_backward_d256(const BackwardKernelArgs& args, int blocks);
void launch_backward_query_d64(const BackwardKernelArgs& args);
void launch_backward_query_d128(const BackwardKernelArgs& args);
void launch_backward_query_d256(const BackwardKernelArgs& args);

// Before it: delta, lse and bounds, zeroed counters and sums; then units. After it: dq.
void launch_backward_prepare(const BackwardKernelArgs& args);
void launch_backward_units(const BackwardKernelArgs& args);
void launch_backward_finish(const BackwardParams& params, const BackwardWorkspace& workspace);

}  // namespace oomb::attention::sm90

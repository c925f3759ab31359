#pragma once

// The one-pass backward: when it is the one to use, and its grid. It needs a fixed place to add dQ
// to and more shared memory than every GPU has, so the two passes remain beside it.

#include <cstdint>

#include "attention/params.h"
#include "attention/sm80/backward_plan.h"

namespace oomb::attention::sm80 {

constexpr int kOnePassWarps = 8;
constexpr int kOnePassKeys = 128;  // of a block: one page

// K, V; two stages of Q and dO with their lse and delta; two tiles of dS.
template <int kDim>
constexpr int kOnePassSharedBytes =
    2 * kOnePassKeys * kDim * 2 + 2 * (2 * 64 * kDim * 2 + 512) + 2 * kOnePassKeys * 64 * 2;

// Whether dQ comes from the same pass as dK and dV. Not with page lists where the result has to be
// the same in every bit: the order of dQ's sum would then depend on which blocks are done when.
bool one_pass(const BackwardParams& params);

struct OnePassGrid {
  int own_tiles = 0;
  int pages = 0;
  // Heads whose units alternate; those of the others come after. The fewer, the better their
  // queries and dQ fit the L2. But blocks that wait for each other within a head trail by about two
  // steps, so that a head keeps no more blocks busy than half its steps.
  int heads_together = 1;
  int64_t units = 0;

  OnePassGrid(const BackwardParams& params, const BackwardPlan& plan);
};

}  // namespace oomb::attention::sm80

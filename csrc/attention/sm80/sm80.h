#pragma once

// Attention with the tensor-core instructions of sm_80 (mma.sync, cp.async, ldmatrix), for every
// GPU since then: bfloat16 and float16, head dim 64, 96 or 128, pages of 64 or 128 tokens; head
// dims 256 and 512 where shared memory allows, in tiles of two sizes (tile_size.h).
//
// The backward is one pass of five products where that gives what was asked for (one_pass.h): a
// thread block owns 128 keys, loops over the heads of the group, and adds dQ up in memory. Else it
// is two passes of seven without sums in memory: dK and dV with the keys in registers, then dQ with
// the queries in registers.

#include <cstdint>

#include "attention/params.h"
#include "attention/sm80/tile_size.h"

namespace oomb::attention::sm80 {

// Whether this implementation handles these shapes, types and alignments; says nothing of the GPU.
bool forward_supported(const ForwardParams& params);
bool backward_supported(const BackwardParams& params);

// Tiles are large for heads below 256.
void forward(const ForwardParams& params, TileSize size);
int64_t forward_workspace_bytes(const ForwardParams& params, TileSize size);
void backward(const BackwardParams& params, TileSize size);
int64_t backward_workspace_bytes(const BackwardParams& params);

}  // namespace oomb::attention::sm80

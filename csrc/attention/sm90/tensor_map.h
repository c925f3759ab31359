#pragma once

// Host side of the copy engine: descriptors of bf16 tensors, passed to kernels as __grid_constant__
// parameters. Encoding is plain host arithmetic (no device work), well under a microsecond.

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm90 {

// Boxes are (64 elements of the head dimension, box_rows rows), swizzled by 128 bytes: a tile of
// head dimension 128 takes two boxes, `box_rows * 128` bytes apart in shared memory.
inline constexpr int kBoxColumns = 64;

// [batch, heads, tokens, head_dim] with any strides; coordinates (d, token, head, batch).
CUtensorMap make_token_map(const char* argument, const void* data, const Strides& strides,
                           int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                           int box_rows);

// The page pool as rows of head_dim elements; coordinates (d, row). See page_row.
CUtensorMap make_pool_map(const PastPages& past, const Shape& shape, int box_rows);

// Rows from one slot to the next.
inline int64_t pool_rows_per_slot(const PastPages& past, const Shape& shape) {
  return past.kv_slot_bytes / (shape.head_dim * 2);
}

}  // namespace oomb::attention::sm90

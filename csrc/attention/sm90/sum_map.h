#pragma once

// Host side of the copy engine: the descriptor of fp32 sums that tiles are added to.

#include <cuda.h>

#include <cstdint>

namespace oomb::attention::sm90 {

// [planes, tokens, head_dim] contiguous fp32; boxes of 32 columns and box_rows rows, swizzled by
// 128 bytes; coordinates (d, token, plane).
CUtensorMap make_sum_map(const char* argument, float* data, int64_t planes, int64_t tokens,
                         int64_t head_dim, int box_rows);

}  // namespace oomb::attention::sm90

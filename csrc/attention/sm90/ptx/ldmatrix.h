#pragma once

// Shared memory -> registers in the layout of matrix operands. Device code only.

#include <cstdint>

#include "attention/sm90/ptx/barrier.h"

namespace oomb::attention::sm90 {

// The A operand of one k step (16 rows x 16 columns per warp), from a tile as the copy engine
// writes it: boxes of 64 columns, rows of 128 bytes, 16-byte units exclusive-ored with the row
// modulo 8. `box` is the box's first row of this warp, a multiple of 8 rows from its start;
// `column` counts within the box.
__device__ __forceinline__ void load_operand_a(uint32_t (&a)[4], uint32_t box, int32_t column,
                                               int32_t lane) {
  const int32_t row = lane % 16;
  const int32_t unit = column / 8 + lane / 16;
  const uint32_t address = box + row * 128 + ((unit ^ (row % 8)) * 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

}  // namespace oomb::attention::sm90

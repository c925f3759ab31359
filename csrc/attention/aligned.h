#pragma once

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention {

// Whether all rows of 16-bit values start at a multiple of 16 bytes, as wide copies want it.
inline bool aligned(const void* pointer, const Strides& strides) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && strides.batch % 8 == 0 &&
         strides.head % 8 == 0 && strides.token % 8 == 0;
}

}  // namespace oomb::attention

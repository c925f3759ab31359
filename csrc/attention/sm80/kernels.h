#pragma once

#include "attention/kernels.h"

namespace oomb::attention::sm80 {

extern const Kernels kKernels;

// The same kernels for heads of 256 and 512 in small tiles, where large ones find no room.
extern const Kernels kSmallKernels;

// On a GPU with room for them; see kernels.cpp.
constexpr bool takes_head_dim(int64_t dim) {
  return dim == 64 || dim == 96 || dim == 128 || dim == 256 || dim == 512;
}

}  // namespace oomb::attention::sm80

#pragma once

#include "attention/kernels.h"

namespace oomb::attention::sm80 {

extern const Kernels kKernels;

// On a GPU with room for them; see kernels.cpp.
constexpr bool takes_head_dim(int64_t dim) {
  return dim == 64 || dim == 96 || dim == 128 || dim == 256 || dim == 512;
}

}  // namespace oomb::attention::sm80

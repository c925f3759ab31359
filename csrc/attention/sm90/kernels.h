#pragma once

#include "attention/kernels.h"

namespace oomb::attention::sm90 {

extern const Kernels kKernels;

constexpr bool takes_head_dim(int64_t dim) { return dim == 64 || dim == 128 || dim == 256; }

}  // namespace oomb::attention::sm90

#pragma once

#include "attention/kernels.h"

namespace oomb::attention::plain {

extern const Kernels kKernels;

}  // namespace oomb::attention::plain

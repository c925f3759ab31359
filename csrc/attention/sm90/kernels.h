#pragma once

#include "attention/kernels.h"

namespace oomb::attention::sm90 {

extern const Kernels kKernels;

}  // namespace oomb::attention::sm90

#pragma once

// Attention on any CUDA GPU since sm_80, without tensor cores: any head dim up to 256, any page
// size, float64, float32, float16 and bfloat16. Chosen where no faster implementation fits;
// correct, deterministic, and slow.
//
// The tile grid is fixed (own chunk first, then pages in ascending order), and state carried
// between waves is raw, so that cutting the past into waves changes no bit.

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::plain {

void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);  // 0

}  // namespace oomb::attention::plain

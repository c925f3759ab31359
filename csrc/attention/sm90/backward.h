#pragma once

// Attention backward for sm_90a: bf16, head dim 64, 128 or 256, pages of 64 or 128 tokens.

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm90 {

// Whether this implementation handles these shapes, types and addresses of gradient pages; says
// nothing about the GPU.
bool backward_supported(const BackwardParams& params);

// Bytes of params.workspace. Depends on the shape, the wave and whether dq_acc is given.
int64_t backward_workspace_bytes(const BackwardParams& params);

void backward(const BackwardParams& params);

}  // namespace oomb::attention::sm90

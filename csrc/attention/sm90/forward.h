#pragma once

// Attention forward for sm_90a: bf16, head dim 64, 128 or 256, pages of 64 or 128 tokens.
//
// Shared device primitives of the kernels in this folder:
//   ptx/barrier.h   transaction barriers, named barriers, proxy fences, register hand-over
//   ptx/tma.h       the bulk copy engine: box loads and stores, reduce-add, L2 priorities
//   ptx/wgmma.h     warpgroup matrix products, operand descriptors, register layout
//   tensor_map.h    host: descriptors of [batch, heads, tokens, head_dim] tensors and the page pool

#include "attention/params.h"

namespace oomb::attention::sm90 {

// Whether this implementation handles these shapes and types; says nothing about the GPU.
bool forward_supported(const ForwardParams& params);

void forward(const ForwardParams& params);

}  // namespace oomb::attention::sm90

#pragma once

// The stages of the backward, each compiled on its own; sm80_cuda.cpp strings them together.

#include "attention/params.h"
#include "attention/sm80/backward_plan.h"
#include "attention/sm80/tile_size.h"

namespace oomb::attention::sm80 {

void delta_bfloat16(const BackwardParams& params);
void delta_float16(const BackwardParams& params);

void dq_bfloat16(const BackwardParams& params, TileSize size);
void dq_float16(const BackwardParams& params, TileSize size);

void dkv_bfloat16(const BackwardParams& params, const BackwardPlan& plan, TileSize size);
void dkv_float16(const BackwardParams& params, const BackwardPlan& plan, TileSize size);

// The same at head dims 256 and 512.
void wide_dkv_bfloat16(const BackwardParams& params, const BackwardPlan& plan, TileSize size);
void wide_dkv_float16(const BackwardParams& params, const BackwardPlan& plan, TileSize size);

void one_pass_bfloat16(const BackwardParams& params, const BackwardPlan& plan);
void one_pass_float16(const BackwardParams& params, const BackwardPlan& plan);

}  // namespace oomb::attention::sm80

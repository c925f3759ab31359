#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm80/tile_size.h"

namespace oomb::attention::sm80 {

void forward_bfloat16(const ForwardParams& params, TileSize size);
void forward_float16(const ForwardParams& params, TileSize size);

int64_t forward_workspace_bfloat16(const ForwardParams& params, TileSize size);
int64_t forward_workspace_float16(const ForwardParams& params, TileSize size);

}  // namespace oomb::attention::sm80

#pragma once

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm80 {

void forward_bfloat16(const ForwardParams& params);
void forward_float16(const ForwardParams& params);

int64_t forward_workspace_bfloat16(const ForwardParams& params);
int64_t forward_workspace_float16(const ForwardParams& params);

}  // namespace oomb::attention::sm80

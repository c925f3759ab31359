#pragma once

// Attention on a CUDA device: picks the kernels at run time, the first of these that take a call.
//
//   sm90    compute capability 9.x, bfloat16, head dim 64, 128 or 256, pages of 64 or 128
//           tokens
//   sm80    8.0 and newer, bfloat16 or float16, head dim 64, 96 or 128 (256 where shared memory
//           suffices), pages of 64 or 128 tokens
//   plain   8.0 and newer, everything else: correct and slow, announced by one warning
//
// force() or the environment variable OOMB_ATTENTION=sm90|sm80|plain overrides the choice; forcing
// those that cannot take a call is an error. In a build without CUDA every operation throws.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "attention/params.h"

namespace oomb::attention::cuda {

// By name; throws InvalidArgument for an unknown one. Empty: choose freely, whatever OOMB_ATTENTION
// says.
void force(const std::optional<std::string>& name);

// Tokens at whose multiples waves of pages must end, so that where they end changes no bit.
int64_t key_tile();

// Called with a text, once per process, when a call falls through to the plain kernels without
// being forced to. The default prints to standard error. It may be called from any thread, without
// the GIL; what it throws ends the call.
void set_warning_hook(std::function<void(const std::string&)> hook);

void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
int64_t forward_workspace_bytes(const ForwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);

void page_write(const PageWriteParams& params);
void page_gradient_read(const PageGradientReadParams& params);
void page_score(const PageScoreParams& params);
int64_t page_score_workspace_bytes(const PageScoreParams& params);
void page_select(const PageSelectParams& params);

}  // namespace oomb::attention::cuda

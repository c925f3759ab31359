#pragma once

// Attention on a CUDA device: picks the kernels at run time, the first that take a call of sm90,
// sm80, sm80-small and plain. Each folder's kernels.cpp says what it takes; plain takes everything
// on compute capability 8.0 and newer, correct and slow, announced by one warning.
//
// force() or the environment variable OOMB_ATTENTION overrides the choice by one of these names;
// forcing those that cannot take a call is an error. In a build without CUDA every operation
// throws.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/params.h"

namespace oomb::attention::cuda {

// By name; throws InvalidArgument for an unknown one. Empty: choose freely, whatever OOMB_ATTENTION
// says.
void force(const std::optional<std::string>& name);

// Tokens at whose multiples waves of pages must end, so that where they end changes no bit.
int64_t key_tile();

// Tokens of a page that every fast kernel takes.
std::vector<int64_t> fast_page_sizes();

// What kernels should be given in place of that head dim, with zeros behind each head.
int64_t padded_head_dim(int64_t head_dim, int capability);

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

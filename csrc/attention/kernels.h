#pragma once

// What a folder of attention kernels for CUDA devices declares, and the choice among them.
//
// A folder declares `const Kernels kKernels` in its kernels.cpp, and others where it has the same
// in several shapes; dispatch.cpp lists them in order of preference. Kernels for another GPU are a
// folder and a line there.
//
// A build for the CPU has the declarations without the functions, so that it can plan for a GPU.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/params.h"

namespace oomb::attention {

struct Kernels {
  const char* name;  // as OOMB_ATTENTION has it

  // Keys of the past that one step of the kernels takes, in tokens. Waves end at multiples of it,
  // so that where they end changes no bit. Steps that end with each page need no more than 1.
  int64_t key_tile;

  // "bfloat16, head dim 64 or 128, pages of 64 tokens", for people. Null: whatever comes, slowly;
  // worth a warning where they are chosen without being asked for.
  const char* fast_for = nullptr;

  // Tokens of a page that they take, ascending. Empty: any.
  std::span<const int64_t> page_sizes = {};

  // Whether they take heads of that size on a GPU of this compute capability (90 for 9.0), in a
  // dtype and pages that they take. Null: they are slow for all.
  bool (*fast_head_dim)(int64_t head_dim, int capability) = nullptr;

  // Whether they run such a call on a GPU of this compute capability.
  bool (*takes_forward)(const ForwardParams& params, int capability) = nullptr;
  bool (*takes_backward)(const BackwardParams& params, int capability) = nullptr;

  void (*forward)(const ForwardParams& params) = nullptr;
  void (*backward)(const BackwardParams& params) = nullptr;

  // Bytes of params.workspace; null: none.
  int64_t (*forward_workspace_bytes)(const ForwardParams& params) = nullptr;
  int64_t (*backward_workspace_bytes)(const BackwardParams& params) = nullptr;

  bool takes(const ForwardParams& params, int capability) const {
    return takes_forward(params, capability);
  }
  bool takes(const BackwardParams& params, int capability) const {
    return takes_backward(params, capability);
  }
  void run(const ForwardParams& params) const { forward(params); }
  void run(const BackwardParams& params) const { backward(params); }
  int64_t workspace_bytes(const ForwardParams& params) const {
    return forward_workspace_bytes == nullptr ? 0 : forward_workspace_bytes(params);
  }
  int64_t workspace_bytes(const BackwardParams& params) const {
    return backward_workspace_bytes == nullptr ? 0 : backward_workspace_bytes(params);
  }
};

using Preference = std::span<const Kernels* const>;  // the first that takes a call runs it

// Those of that name; throws InvalidArgument, naming all there are.
const Kernels& kernels_named(Preference all, const std::string& name);

// The key tile that suits all of them: whichever run a call, waves part none of their steps.
int64_t common_key_tile(Preference all);

// Page sizes that all of them take which are fast, ascending.
std::vector<int64_t> fast_page_sizes(Preference all);

// The smallest head dim of at least that size, and of twice that size at most, that some of them
// take fast on a GPU of this compute capability; the same one where there is none. Zeros behind a
// shorter head change no product.
int64_t padded_head_dim(Preference all, int64_t head_dim, int capability);

// "newer: bfloat16, head dim 64; older: …", of those that are fast.
std::string describe_fast(Preference all);

// Those that run a call. `forced` run it or throw InvalidArgument; null: the first that take it.
const Kernels& choose_kernels(Preference all, const ForwardParams& params, int capability,
                              const Kernels* forced);
const Kernels& choose_kernels(Preference all, const BackwardParams& params, int capability,
                              const Kernels* forced);

// "bfloat16, head dim 80, pages of 64 tokens, scores capped at 50"
std::string describe(const Shape& shape, DType dtype, double cap);

}  // namespace oomb::attention

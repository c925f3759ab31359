// What these kernels declare; see attention/kernels.h.

#include "attention/sm80/kernels.h"

#if OOMB_WITH_CUDA
#include "attention/sm80/sm80.h"
#endif

namespace oomb::attention::sm80 {

namespace {

// Head dim 256 takes 160 KiB of shared memory, 512 some 210; consumer GPUs have 99 KiB, an A100 has
// 163, data center GPUs since Hopper have 227.
bool has_room(int64_t head_dim, int capability) {
  const bool hopper = capability >= 90 && capability < 120;
  if (head_dim == 512) return hopper;
  return head_dim != 256 || hopper || capability == 80 || capability == 87 || capability == 88;
}

constexpr int64_t kPageSizes[] = {64, 128};
}  // namespace

constinit const Kernels kKernels = {
    .name = "sm80",
    .key_tile = 128,
    .fast_for =
        "bfloat16 or float16, head dim 64, 96 or 128 (256 on data center GPUs, 512 since Hopper),"
        " pages of 64 or 128 tokens",
    .page_sizes = kPageSizes,
    .fast_head_dim =
        [](int64_t head_dim, int capability) {
          return takes_head_dim(head_dim) && capability >= 80 && has_room(head_dim, capability);
        },
#if OOMB_WITH_CUDA
    .takes_forward =
        [](const ForwardParams& params, int capability) {
          return forward_supported(params) && has_room(params.shape.head_dim, capability);
        },
    .takes_backward =
        [](const BackwardParams& params, int capability) {
          return backward_supported(params) && has_room(params.shape.head_dim, capability);
        },
    .forward = forward,
    .backward = backward,
    .forward_workspace_bytes = forward_workspace_bytes,
    .backward_workspace_bytes = backward_workspace_bytes,
#endif
};

}  // namespace oomb::attention::sm80

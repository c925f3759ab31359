// What these kernels declare; see attention/kernels.h.

#include "attention/sm90/kernels.h"

#if OOMB_WITH_CUDA
#include "attention/sm90/backward.h"
#include "attention/sm90/forward.h"
#endif

namespace oomb::attention::sm90 {

namespace {
constexpr int64_t kPageSizes[] = {64, 128};
}  // namespace

constinit const Kernels kKernels = {
    .name = "sm90",
    .key_tile = 128,  // two pages of 64
    .fast_for =
        "bfloat16, head dim 64, 128 or 256, no soft cap, pages of 64 or 128 tokens, on "
        "compute capability 9.x",
    .page_sizes = kPageSizes,
    .fast_head_dim =
        [](int64_t head_dim, int capability) {
          return capability / 10 == 9 && takes_head_dim(head_dim);
        },
#if OOMB_WITH_CUDA
    .takes_forward =
        [](const ForwardParams& params, int capability) {
          return capability / 10 == 9 && forward_supported(params);
        },
    .takes_backward =
        [](const BackwardParams& params, int capability) {
          return capability / 10 == 9 && backward_supported(params);
        },
    .forward = forward,
    .backward = backward,
    .backward_workspace_bytes = backward_workspace_bytes,
#endif
};

}  // namespace oomb::attention::sm90

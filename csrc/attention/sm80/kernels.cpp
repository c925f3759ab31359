// What these kernels declare; see attention/kernels.h.

#include "attention/sm80/kernels.h"

#if OOMB_WITH_CUDA
#include "attention/sm80/sm80.h"
#endif

namespace oomb::attention::sm80 {

constinit const Kernels kKernels = {
    .name = "sm80",
    .key_tile = 128,
#if OOMB_WITH_CUDA
    .takes_forward = [](const ForwardParams& params, int) { return forward_supported(params); },
    .takes_backward = [](const BackwardParams& params, int) { return backward_supported(params); },
    .forward = forward,
    .backward = backward,
    .forward_workspace_bytes = forward_workspace_bytes,
    .backward_workspace_bytes = backward_workspace_bytes,
#endif
};

}  // namespace oomb::attention::sm80

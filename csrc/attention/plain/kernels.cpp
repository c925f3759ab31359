// What these kernels declare; see attention/kernels.h.

#include "attention/plain/kernels.h"

#if OOMB_WITH_CUDA
#include "attention/plain/plain.h"
#endif

namespace oomb::attention::plain {

constinit const Kernels kKernels = {
    .name = "plain",
    .key_tile = 1,
#if OOMB_WITH_CUDA
    .takes_forward = [](const ForwardParams&, int) { return true; },
    .takes_backward = [](const BackwardParams&, int) { return true; },
    .forward = forward,
    .backward = backward,
    .backward_workspace_bytes = backward_workspace_bytes,
#endif
};

}  // namespace oomb::attention::plain

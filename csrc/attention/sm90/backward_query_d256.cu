// dQ of its own for head dimension 256.

#include "attention/sm90/backward_query.cuh"

namespace oomb::attention::sm90 {

void launch_backward_query_d256(const BackwardKernelArgs& args) { launch_query_kernel<256>(args); }

}  // namespace oomb::attention::sm90

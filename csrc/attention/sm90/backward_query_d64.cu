// dQ over page lists for head dimension 64.

#include "attention/sm90/backward_query.cuh"

namespace oomb::attention::sm90 {

void launch_backward_query_d64(const BackwardKernelArgs& args) { launch_query_kernel<64>(args); }

}  // namespace oomb::attention::sm90

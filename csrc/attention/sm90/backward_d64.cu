// Backward for head dimension 64.

#include "attention/sm90/backward_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_backward_d64(const BackwardKernelArgs& args, int blocks) {
  launch_backward<64>(args, blocks);
}

}  // namespace oomb::attention::sm90

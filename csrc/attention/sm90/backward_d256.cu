// Backward of keys and values for head dimension 256.

#include "attention/sm90/backward_wide_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_backward_d256(const BackwardKernelArgs& args, int blocks) {
  launch_wide_backward(args, blocks);
}

}  // namespace oomb::attention::sm90

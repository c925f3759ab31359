// Backward for head dimension 128.

#include "attention/sm90/backward_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_backward_d128(const BackwardKernelArgs& args, int blocks) {
  launch_backward<128>(args, blocks);
}

}  // namespace oomb::attention::sm90

// Backward for head dimension 128.

#include "attention/sm90/backward_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_backward_d128(const BackwardKernelArgs& args, int blocks) {
  if (queries_apart(args.params)) {
    launch_backward<128, false>(args, blocks);
  } else {
    launch_backward<128, true>(args, blocks);
  }
}

}  // namespace oomb::attention::sm90

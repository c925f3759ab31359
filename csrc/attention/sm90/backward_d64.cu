// Backward for head dimension 64.

#include "attention/sm90/backward_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_backward_d64(const BackwardKernelArgs& args, int blocks) {
  if (queries_apart(args.params)) {
    launch_backward<64, false>(args, blocks);
  } else {
    launch_backward<64, true>(args, blocks);
  }
}

}  // namespace oomb::attention::sm90

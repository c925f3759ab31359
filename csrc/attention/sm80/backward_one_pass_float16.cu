#include "attention/sm80/backward.h"
#include "attention/sm80/backward_one_pass_kernel.cuh"

namespace oomb::attention::sm80 {

void one_pass_float16(const BackwardParams& params, const BackwardPlan& plan) {
  if (params.shape.head_dim == 64) {
    launch_one_pass<__half, 64>(params, plan);
  } else {
    launch_one_pass<__half, 128>(params, plan);
  }
}

}  // namespace oomb::attention::sm80

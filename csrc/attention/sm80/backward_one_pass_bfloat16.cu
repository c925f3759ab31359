#include "attention/sm80/backward.h"
#include "attention/sm80/backward_one_pass_kernel.cuh"

namespace oomb::attention::sm80 {

void one_pass_bfloat16(const BackwardParams& params, const BackwardPlan& plan) {
  if (params.shape.head_dim == 64) {
    launch_one_pass<__nv_bfloat16, 64>(params, plan);
  } else {
    launch_one_pass<__nv_bfloat16, 128>(params, plan);
  }
}

}  // namespace oomb::attention::sm80

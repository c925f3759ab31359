#include "attention/sm80/backward.h"
#include "attention/sm80/backward_wide_kernel.cuh"

namespace oomb::attention::sm80 {

void wide_dkv_bfloat16(const BackwardParams& params, const BackwardPlan& plan, TileSize size) {
  if (params.shape.head_dim == 256) {
    launch_wide_dkv<__nv_bfloat16, 256>(params, plan, size);
  } else {
    launch_wide_dkv<__nv_bfloat16, 512>(params, plan, size);
  }
}

}  // namespace oomb::attention::sm80

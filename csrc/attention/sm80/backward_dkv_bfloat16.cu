#include "attention/sm80/backward.h"
#include "attention/sm80/backward_dkv_kernel.cuh"

namespace oomb::attention::sm80 {

void dkv_bfloat16(const BackwardParams& params, const BackwardPlan& plan, TileSize size) {
  switch (params.shape.head_dim) {
    case 64: return launch_dkv<__nv_bfloat16, 64>(params, plan);
    case 256:
    case 512: return wide_dkv_bfloat16(params, plan, size);
    case 96: return launch_dkv<__nv_bfloat16, 96>(params, plan);
    default: return launch_dkv<__nv_bfloat16, 128>(params, plan);
  }
}

}  // namespace oomb::attention::sm80

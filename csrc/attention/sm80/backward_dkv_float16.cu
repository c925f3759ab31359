#include "attention/sm80/backward.h"
#include "attention/sm80/backward_dkv_kernel.cuh"

namespace oomb::attention::sm80 {

void dkv_float16(const BackwardParams& params, const BackwardPlan& plan, TileSize size) {
  switch (params.shape.head_dim) {
    case 64: return launch_dkv<__half, 64>(params, plan);
    case 256:
    case 512: return wide_dkv_float16(params, plan, size);
    case 96: return launch_dkv<__half, 96>(params, plan);
    default: return launch_dkv<__half, 128>(params, plan);
  }
}

}  // namespace oomb::attention::sm80

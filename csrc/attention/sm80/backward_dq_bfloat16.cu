#include "attention/device/delta.cuh"
#include "attention/sm80/backward.h"
#include "attention/sm80/backward_dq_kernel.cuh"

namespace oomb::attention::sm80 {

void delta_bfloat16(const BackwardParams& params) { device::compute_delta<__nv_bfloat16>(params); }

void dq_bfloat16(const BackwardParams& params, TileSize size) {
  switch (params.shape.head_dim) {
    case 64: return launch_dq<__nv_bfloat16, 64>(params);
    case 256: return launch_wide_dq<__nv_bfloat16, 256>(params, size);
    case 512: return launch_wide_dq<__nv_bfloat16, 512>(params, size);
    case 96: return launch_dq<__nv_bfloat16, 96>(params);
    default: return launch_dq<__nv_bfloat16, 128>(params);
  }
}

}  // namespace oomb::attention::sm80

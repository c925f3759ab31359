#include "attention/device/delta.cuh"
#include "attention/sm80/backward.h"
#include "attention/sm80/backward_dq_kernel.cuh"

namespace oomb::attention::sm80 {

void delta_float16(const BackwardParams& params) { device::compute_delta<__half>(params); }

void dq_float16(const BackwardParams& params, TileSize size) {
  switch (params.shape.head_dim) {
    case 64: return launch_dq<__half, 64>(params);
    case 256: return launch_wide_dq<__half, 256>(params, size);
    case 512: return launch_wide_dq<__half, 512>(params, size);
    case 96: return launch_dq<__half, 96>(params);
    default: return launch_dq<__half, 128>(params);
  }
}

}  // namespace oomb::attention::sm80

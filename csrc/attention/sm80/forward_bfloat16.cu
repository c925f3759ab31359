#include "attention/sm80/forward.h"
#include "attention/sm80/forward_kernel.cuh"

namespace oomb::attention::sm80 {

void forward_bfloat16(const ForwardParams& params, TileSize size) {
  launch_forward<__nv_bfloat16>(params, size);
}

int64_t forward_workspace_bfloat16(const ForwardParams& params, TileSize size) {
  return forward_workspace<__nv_bfloat16>(params, size);
}

}  // namespace oomb::attention::sm80

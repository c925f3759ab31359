#include "attention/sm80/forward.h"
#include "attention/sm80/forward_kernel.cuh"

namespace oomb::attention::sm80 {

void forward_float16(const ForwardParams& params, TileSize size) {
  launch_forward<__half>(params, size);
}

int64_t forward_workspace_float16(const ForwardParams& params, TileSize size) {
  return forward_workspace<__half>(params, size);
}

}  // namespace oomb::attention::sm80

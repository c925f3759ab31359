#include "attention/sm90/forward_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_forward_d256_p128(const ForwardArgs& args, void* stream) {
  launch_forward<256, 128>(args, stream);
}

}  // namespace oomb::attention::sm90

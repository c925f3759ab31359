#include "attention/sm90/forward_kernel.cuh"

namespace oomb::attention::sm90 {

void launch_forward_d128_p128(const ForwardArgs& args, void* stream) {
  launch_forward<128, 128>(args, stream);
}

}  // namespace oomb::attention::sm90

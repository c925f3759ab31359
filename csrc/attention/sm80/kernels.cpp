// What these kernels declare; see attention/kernels.h.

#include "attention/sm80/kernels.h"

#include "attention/sm80/tile_size.h"

#if OOMB_WITH_CUDA
#include "attention/sm80/sm80.h"
#endif

namespace oomb::attention::sm80 {

namespace {

// KiB of shared memory that a thread block may have.
int64_t room(int capability) {
  if (capability >= 90 && capability < 120) return 227;
  return capability == 80 || capability == 87 || capability == 88 ? 163 : 99;
}

bool has_room(int64_t head_dim, int capability, TileSize size) {
  const int64_t needed = needed_kib(head_dim, size);
  return needed > 0 && needed <= room(capability);
}

constexpr int64_t kPageSizes[] = {64, 128};

template <TileSize kSize>
constexpr Kernels declare(const char* name, const char* fast_for) {
  Kernels kernels{.name = name, .key_tile = 128, .fast_for = fast_for, .page_sizes = kPageSizes};
  kernels.fast_head_dim = [](int64_t head_dim, int capability) {
    return takes_head_dim(head_dim) && capability >= 80 && has_room(head_dim, capability, kSize);
  };
#if OOMB_WITH_CUDA
  kernels.takes_forward = [](const ForwardParams& params, int capability) {
    return forward_supported(params) && has_room(params.shape.head_dim, capability, kSize);
  };
  kernels.takes_backward = [](const BackwardParams& params, int capability) {
    return backward_supported(params) && has_room(params.shape.head_dim, capability, kSize);
  };
  kernels.forward = [](const ForwardParams& params) { forward(params, kSize); };
  kernels.backward = [](const BackwardParams& params) { backward(params, kSize); };
  kernels.forward_workspace_bytes = [](const ForwardParams& params) {
    return forward_workspace_bytes(params, kSize);
  };
  kernels.backward_workspace_bytes = backward_workspace_bytes;
#endif
  return kernels;
}

}  // namespace

constinit const Kernels kKernels = declare<TileSize::kLarge>(
    "sm80",
    "bfloat16 or float16, head dim 64, 96 or 128 (256 on data center GPUs, 512 since Hopper),"
    " pages of 64 or 128 tokens");

constinit const Kernels kSmallKernels = declare<TileSize::kSmall>(
    "sm80-small", "the same with head dim 256 on every GPU, 512 on data center GPUs");

}  // namespace oomb::attention::sm80

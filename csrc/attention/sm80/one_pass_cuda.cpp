#include <algorithm>

#include "attention/device/device_attribute.h"
#include "attention/sm80/one_pass.h"
#include "common/math.h"

namespace oomb::attention::sm80 {

bool one_pass(const BackwardParams& params) {
  const int64_t dim = params.shape.head_dim;
  if (params.deterministic && params.past.selection != nullptr) return false;
  if (params.shape.page_size != kOnePassKeys || (dim != 64 && dim != 128)) return false;
  constexpr int kStatic = 1024;  // at most, beside it
  const int needed = (dim == 64 ? kOnePassSharedBytes<64> : kOnePassSharedBytes<128>)+kStatic;
  return device::device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= needed;
}

OnePassGrid::OnePassGrid(const BackwardParams& params, const BackwardPlan& plan) {
  const Shape& shape = params.shape;
  own_tiles = params.own_chunk ? static_cast<int>(ceil_div(shape.chunk, kOnePassKeys)) : 0;
  pages = static_cast<int>(plan.work != nullptr ? plan.capacity : plan.pages);
  const int64_t heads = shape.batch * shape.kv_heads;
  units = (own_tiles + pages) * heads;
  if (plan.turns == nullptr) return;
  const int64_t steps = plan.query_tiles * (shape.query_heads / shape.kv_heads);
  const int64_t busy = 2 * int64_t{device::device_attribute(cudaDevAttrMultiProcessorCount)};
  heads_together = static_cast<int>(std::min(heads, ceil_div(busy, steps)));
  while (heads % heads_together != 0) ++heads_together;
}

}  // namespace oomb::attention::sm80

#include "adapters/row_factor.h"

#include <bit>

#include "common/error.h"
#include "common/rounding.h"

namespace oomb::adapters {

void row_factor(const RowFactorParams& params) {
  const int64_t rank = params.rank;
  for (int64_t row = 0; row < params.rows; ++row) {
    const float* halves = params.halves + row * 2 * rank;
    uint16_t* factor = params.factor + row * 3 * rank;
    for (int64_t i = 0; i < rank; ++i) {
      const float u = (halves[i] + halves[rank + i]) * params.scale;
      const uint16_t first = nearest_bits(u);
      factor[i] = factor[rank + i] = first;
      const float rounded = std::bit_cast<float>(static_cast<uint32_t>(first) << 16);
      factor[2 * rank + i] = nearest_bits(u - rounded);
    }
  }
}

#if !OOMB_WITH_CUDA
void cuda::row_factor(const RowFactorParams&) { throw Error("row_factor: this build has no CUDA"); }
#endif

}  // namespace oomb::adapters

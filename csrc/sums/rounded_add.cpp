#include "sums/rounded_add.h"

#include "common/error.h"
#include "common/rounding.h"

namespace oomb::sums {
namespace {

float value_at(const float* values, int64_t element) { return values[element]; }

float value_at(const uint16_t* values, int64_t element) {
  return std::bit_cast<float>(static_cast<uint32_t>(values[element]) << 16);
}

template <typename Addend>
void add(const RoundedAddParams& params) {
  auto* sum = static_cast<uint16_t*>(params.sum);
  const auto* addend = static_cast<const Addend*>(params.addend);
  const CounterNoise noise(spread(params.seed));
  for (int64_t i = 0; i < params.elements; ++i) {
    const uint32_t both = noise.pair(static_cast<uint32_t>(i / 2));
    const uint32_t own = i % 2 == 0 ? both & 0xffffu : both >> 16;
    const float total = value_at(sum, i) + value_at(addend, i);
    sum[i] = static_cast<uint16_t>(noisy_bits(total, own) >> 16);
  }
}

}  // namespace

void rounded_add(const RoundedAddParams& params) {
  (params.addend_dtype == DType::kFloat32 ? add<float> : add<uint16_t>)(params);
}

#if !OOMB_WITH_CUDA
void cuda::rounded_add(const RoundedAddParams&) {
  throw Error("rounded_add: this build has no CUDA");
}
#endif

}  // namespace oomb::sums

#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/storage.h"
#include "attention/params.h"
#include "common/error.h"

namespace oomb::attention::cpu {

// 16 bits of noise per element of a gradient page. They depend on the seed, the sequence, the
// logical page and the element alone, so that a page rounds the same way wherever it lies.
class RoundingNoise {
 public:
  RoundingNoise(uint64_t seed, int64_t batch, int64_t page)
      : key_(mix(seed ^ mix(static_cast<uint64_t>(batch) << 40 ^ static_cast<uint64_t>(page)))) {}

  uint32_t operator()(int64_t element) const {
    const uint64_t word = mix(key_ + static_cast<uint64_t>(element >> 2));
    return static_cast<uint32_t>(word >> (16 * (element & 3))) & 0xffffu;
  }

 private:
  // Spreads every bit of the counter over the word: odd multiplications carry upwards, shifts down.
  static uint64_t mix(uint64_t word) {
    word = (word ^ (word >> 31)) * 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 29)) * 0xd6e8feb86659fd93u;
    return word ^ (word >> 32);
  }

  uint64_t key_;
};

// Rounds to one of the two neighbours, each as often as the value is near to it. A value that
// bfloat16 holds stays what it is.
inline BFloat16 round_stochastic(float value, uint32_t noise) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return narrow<BFloat16>(value);
  return BFloat16{static_cast<uint16_t>((bits + noise) >> 16)};
}

// Gradient pages in the type that accompanies Real: doubles for double, else float or bfloat16.
class GradientPageTable {
 public:
  GradientPageTable(const GradientPages& grads, int64_t table_stride, const Shape& shape)
      : grads_(grads),
        table_stride_(table_stride),
        head_elements_(shape.page_size * shape.head_dim),
        page_elements_(shape.kv_heads * head_elements_),
        head_dim_(shape.head_dim) {}

  // Gradients of two kinds per page.
  enum Kind : int64_t { kKey = 0, kValue = 1 };

  bool wanted(int64_t batch, int64_t page) const {
    return grads_.dkv_table != nullptr && entry(batch, page, kKey) >= 0;
  }

  // page[row] += scale * rows[row] for the rows of one kv head
  template <typename Real>
  void add(int64_t batch, int64_t page, Kind kind, int64_t kv_head, int64_t rows, Real scale,
           const Real* source, int64_t source_stride) const {
    if constexpr (sizeof(Real) == 8) {
      add_plain<double>(batch, page, kind, kv_head, rows, scale, source, source_stride);
    } else if (grads_.dtype == DType::kFloat32) {
      add_plain<float>(batch, page, kind, kv_head, rows, scale, source, source_stride);
    } else {
      const RoundingNoise noise(grads_.rounding_seed, batch, page);
      BFloat16* target = at<BFloat16>(batch, page, kind) + kv_head * head_elements_;
      const int64_t first = kind * page_elements_ + kv_head * head_elements_;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t d = 0; d < head_dim_; ++d) {
          const int64_t element = row * head_dim_ + d;
          const float value = widen(target[element]) + scale * source[row * source_stride + d];
          target[element] = round_stochastic(value, noise(first + element));
        }
      }
    }
  }

  template <typename T>
  T* at(int64_t batch, int64_t page, Kind kind) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(grads_.dkv_pool) +
                                entry(batch, page, kind) * grads_.dkv_unit_bytes);
  }

  void check(DType inputs) const {
    if (grads_.dkv_table == nullptr) return;
    const bool fits = inputs == DType::kFloat64
                          ? grads_.dtype == DType::kFloat64
                          : grads_.dtype == DType::kFloat32 || grads_.dtype == DType::kBFloat16;
    expect(fits, "dkv_dtype",
           inputs == DType::kFloat64 ? "float64 for float64 inputs" : "float32 or bfloat16",
           name_of(grads_.dtype));
  }

 private:
  int64_t entry(int64_t batch, int64_t page, Kind kind) const {
    return grads_.dkv_table[(batch * table_stride_ + page) * 2 + kind];
  }

  template <typename T, typename Real>
  void add_plain(int64_t batch, int64_t page, Kind kind, int64_t kv_head, int64_t rows, Real scale,
                 const Real* source, int64_t source_stride) const {
    T* target = at<T>(batch, page, kind) + kv_head * head_elements_;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t d = 0; d < head_dim_; ++d) {
        target[row * head_dim_ + d] += scale * source[row * source_stride + d];
      }
    }
  }

  const GradientPages grads_;
  const int64_t table_stride_;
  const int64_t head_elements_;
  const int64_t page_elements_;
  const int64_t head_dim_;
};

}  // namespace oomb::attention::cpu

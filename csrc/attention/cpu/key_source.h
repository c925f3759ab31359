#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/cpu/buffer.h"
#include "attention/cpu/storage.h"
#include "attention/cpu/tile_kernels.h"
#include "attention/cpu/wave.h"

namespace oomb::attention::cpu {

// Where the keys and values of a launch lie: own chunk tensors and the pool's slots.
template <typename Storage>
struct KeySource {
  const Storage* k = nullptr;
  const Storage* v = nullptr;
  Strides k_strides, v_strides;
  const void* kv_pool = nullptr;
};

// Hands out tiles in the type computed in: in place where that is how they are stored, else
// converted into scratch that the next call overwrites.
template <typename Storage>
class TileReader {
 public:
  using Real = RealOf<Storage>;

  TileReader(const Shape& shape, const Wave& wave, const KeySource<Storage>& source,
             const TileKernels<Real>& kernels, DType dtype)
      : shape_(shape), wave_(wave), source_(source), kernels_(kernels), dtype_(dtype) {
    if constexpr (!kInPlace) {
      k_ = Buffer<Real>(wave.longest_tile() * shape.head_dim);
      v_ = Buffer<Real>(wave.longest_tile() * shape.head_dim);
    }
  }

  KeyTile<Real> read(int64_t batch, int64_t kv_head, const Tile& tile) const {
    const Storage* k;
    const Storage* v;
    int64_t k_stride = shape_.head_dim, v_stride = shape_.head_dim;
    if (tile.page < 0) {
      k = own(source_.k, source_.k_strides, batch, kv_head, tile);
      v = own(source_.v, source_.v_strides, batch, kv_head, tile);
      k_stride = source_.k_strides.token;
      v_stride = source_.v_strides.token;
    } else {
      const int64_t page_elements = shape_.page_size * shape_.head_dim;
      k = reinterpret_cast<const Storage*>(static_cast<const std::byte*>(source_.kv_pool) +
                                           wave_.page_offset(batch, tile.page)) +
          kv_head * page_elements;
      v = k + shape_.kv_heads * page_elements;
    }
    if constexpr (kInPlace) {
      return {tile.keys, k, v, k_stride, v_stride};
    } else {
      kernels_.widen(dtype_, k, k_stride, tile.keys, shape_.head_dim, k_.get());
      kernels_.widen(dtype_, v, v_stride, tile.keys, shape_.head_dim, v_.get());
      return {tile.keys, k_.get(), v_.get(), shape_.head_dim, shape_.head_dim};
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<Storage, Real>;

  static const Storage* own(const Storage* tensor, const Strides& strides, int64_t batch,
                            int64_t kv_head, const Tile& tile) {
    return tensor + batch * strides.batch + kv_head * strides.head + tile.own_begin * strides.token;
  }

  const Shape& shape_;
  const Wave& wave_;
  const KeySource<Storage>& source_;
  const TileKernels<Real>& kernels_;
  const DType dtype_;
  Buffer<Real> k_, v_;
};

}  // namespace oomb::attention::cpu

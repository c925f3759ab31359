#pragma once

// How much shared memory the kernels for heads of 256 and 512 ask for. Large tiles are faster,
// small ones fit where a block gets less.

#include <cstdint>

namespace oomb::attention::sm80 {

enum class TileSize { kLarge, kSmall };

// KiB of a block that attention's kernels need at most, forward and backward. 0: not in such tiles.
constexpr int64_t needed_kib(int64_t head_dim, TileSize size) {
  const bool small = size == TileSize::kSmall;
  if (head_dim == 256) return small ? 98 : 161;
  if (head_dim == 512) return small ? 139 : 212;
  return small ? 0 : 99;
}

constexpr int kStaticBytes = 1024;  // at most, beside what a kernel asks for at its launch

constexpr bool fits(int64_t dynamic_bytes, int64_t head_dim, TileSize size) {
  return dynamic_bytes + kStaticBytes <= needed_kib(head_dim, size) * 1024;
}

}  // namespace oomb::attention::sm80

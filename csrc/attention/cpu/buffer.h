#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/math.h"

namespace oomb::attention::cpu {

// Scratch memory, uninitialised, aligned to a cache line.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : lines_(std::make_unique_for_overwrite<Line[]>(
            static_cast<size_t>(ceil_div(size * int64_t{sizeof(T)}, sizeof(Line))))) {}

  T* get() const { return reinterpret_cast<T*>(lines_.get()); }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
};

}  // namespace oomb::attention::cpu

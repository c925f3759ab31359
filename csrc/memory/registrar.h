#pragma once

#include <cstddef>
#include <cstdint>

namespace oomb::memory {

// Locks host memory for a device, so that it can copy to and from it beside everything else.
class Registrar {
 public:
  Registrar() = default;
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;
  virtual ~Registrar() = default;

  // Throws CudaError when the system refuses.
  virtual void add(std::byte* begin, int64_t bytes) = 0;
  // Undoes the add() of the same address.
  virtual void remove(std::byte* begin) noexcept = 0;
};

}  // namespace oomb::memory

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/cuda/driver_api.h"

namespace oomb::memory {

// A second context of a device, in which host memory is registered and nothing else is done.
//
// While memory is registered, or given up again, nobody can launch kernels in the same context. The
// runtime's own is left alone like this, and the memory is page-locked for it all the same. It
// takes some of the device's memory, so there is one per device, as long as anybody uses it.
class RegistrationContext {
 public:
  // Null where there is none to be had, as in the compute mode that allows one context per GPU.
  static std::shared_ptr<RegistrationContext> of(int device);
  ~RegistrationContext();
  RegistrationContext(const RegistrationContext&) = delete;
  RegistrationContext& operator=(const RegistrationContext&) = delete;

  void add(std::byte* begin, int64_t bytes);
  // What was added before, from its beginning.
  void remove(std::byte* begin) noexcept;

 private:
  RegistrationContext(const ContextApi& api, CUcontext context) : api_(api), context_(context) {}
  static std::shared_ptr<RegistrationContext> make(int device);

  const ContextApi& api_;
  CUcontext context_;
};

}  // namespace oomb::memory

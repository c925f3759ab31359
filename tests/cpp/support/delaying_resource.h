#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "memory/wrapped_resource.h"

namespace oomb::testing {

// Takes its time to grow and to let go, which widens the window for races around it.
class DelayingResource final : public memory::WrappedResource {
 public:
  DelayingResource(std::unique_ptr<memory::MemoryResource> upstream,
                   std::chrono::microseconds delay)
      : WrappedResource(std::move(upstream)), delay_(delay) {}

  void commit(int64_t bytes) override {
    std::this_thread::sleep_for(delay_);
    WrappedResource::commit(bytes);
  }
  void release() override {
    WrappedResource::release();
    std::this_thread::sleep_for(delay_);
  }

 private:
  std::chrono::microseconds delay_;
};

}  // namespace oomb::testing

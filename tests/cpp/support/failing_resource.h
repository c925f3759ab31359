#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "common/error.h"
#include "memory/wrapped_resource.h"

namespace oomb::testing {

// Fails a growth on demand. The switch lives outside, where the test can reach it.
struct FailureSwitch {
  int64_t countdown = -1;     // growths to let pass before one fails; -1: none fails
  int64_t most_bytes = -1;    // growths beyond fail; -1: none does
  bool no_preparing = false;  // prepare() fails
  int64_t failures = 0;
};

class FailingResource final : public memory::WrappedResource {
 public:
  FailingResource(std::unique_ptr<memory::MemoryResource> upstream,
                  std::shared_ptr<FailureSwitch> control)
      : WrappedResource(std::move(upstream)), control_(std::move(control)) {}

  void commit(int64_t bytes) override {
    const bool grows = bytes > committed();
    const bool beyond = control_->most_bytes >= 0 && bytes > control_->most_bytes;
    if (grows && (beyond || (control_->countdown >= 0 && control_->countdown-- == 0))) {
      ++control_->failures;
      throw OutOfMemory("injected failure", bytes, committed());
    }
    WrappedResource::commit(bytes);
  }

  void prepare(int64_t bytes) override {
    if (control_->no_preparing) throw Error("injected failure");
    WrappedResource::prepare(bytes);
  }

 private:
  std::shared_ptr<FailureSwitch> control_;
};

}  // namespace oomb::testing

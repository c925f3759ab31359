#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"
#include "memory/wrapped_resource.h"

namespace oomb::memory {

// Refuses to grow past a limit. `setting` is what the message tells the user to change.
class LimitedResource final : public WrappedResource {
 public:
  LimitedResource(std::unique_ptr<MemoryResource> upstream, int64_t limit, std::string setting)
      : WrappedResource(std::move(upstream)), limit_(limit), setting_(std::move(setting)) {}

  int64_t limit() const { return limit_; }

  void commit(int64_t bytes) override {
    if (bytes > limit_) {
      throw OutOfMemory(concat(setting_, ": needed ", human_bytes(bytes), ", the limit is ",
                               human_bytes(limit_), "; raise ", setting_),
                        bytes, limit_ - committed());
    }
    WrappedResource::commit(bytes);
  }

 private:
  int64_t limit_;
  std::string setting_;
};

}  // namespace oomb::memory

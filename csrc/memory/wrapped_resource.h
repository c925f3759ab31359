#pragma once

#include <memory>
#include <utility>

#include "memory/memory_resource.h"

namespace oomb::memory {

// Base of the wrappers: forwards everything to the resource it owns.
class WrappedResource : public MemoryResource {
 public:
  explicit WrappedResource(std::unique_ptr<MemoryResource> upstream)
      : upstream_(std::move(upstream)) {}

  std::byte* base() const override { return upstream_->base(); }
  int64_t capacity() const override { return upstream_->capacity(); }
  int64_t committed() const override { return upstream_->committed(); }
  int64_t ready() const override { return upstream_->ready(); }
  int64_t granularity() const override { return upstream_->granularity(); }
  void commit(int64_t bytes) override { upstream_->commit(bytes); }
  void prepare(int64_t bytes) override { upstream_->prepare(bytes); }
  void release() override { upstream_->release(); }
  bool gives_back() const override { return upstream_->gives_back(); }

 protected:
  MemoryResource& upstream() { return *upstream_; }

 private:
  std::unique_ptr<MemoryResource> upstream_;
};

}  // namespace oomb::memory

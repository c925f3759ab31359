#pragma once

#include "memory/memory_resource.h"

namespace oomb::memory {

// Ordinary pageable memory: addresses reserved without backing, pages taken by the kernel when
// first touched. The CPU engine uses one for each of its two tiers.
class HostResource final : public MemoryResource {
 public:
  explicit HostResource(int64_t capacity);
  ~HostResource() override;

  std::byte* base() const override { return base_; }
  int64_t capacity() const override { return capacity_; }
  int64_t committed() const override { return committed_; }
  int64_t granularity() const override { return kGranularity; }
  void commit(int64_t bytes) override;
  void release() override;

 private:
  static constexpr int64_t kGranularity = int64_t{1} << 16;

  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t committed_ = 0;
};

}  // namespace oomb::memory

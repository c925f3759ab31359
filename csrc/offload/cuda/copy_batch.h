#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace oomb::offload {

// Copies that go to one stream together.
class CopyBatch {
 public:
  void clear();
  size_t size() const { return sizes_.size(); }

  // `joins`: this copy goes on where the one before ends, in both memories, and may be one with it.
  void add(std::byte* destination, const std::byte* source, size_t bytes, bool joins);

  void issue_one_by_one(cudaStream_t stream) const;
  // One call for all copies; the hint says that kernels run beside them. False where the runtime or
  // the driver has no such call: then nothing was issued.
  bool issue_together(cudaStream_t stream, bool overlap_hint);

 private:
  std::vector<void*> destinations_;
  std::vector<const void*> sources_;
  std::vector<size_t> sizes_;
};

}  // namespace oomb::offload

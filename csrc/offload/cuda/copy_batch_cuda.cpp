#include "memory/cuda/cuda_call.h"
#include "offload/cuda/copy_batch.h"

namespace oomb::offload {

void CopyBatch::clear() {
  destinations_.clear();
  sources_.clear();
  sizes_.clear();
}

void CopyBatch::add(std::byte* destination, const std::byte* source, size_t bytes, bool joins) {
  if (joins && size() > 0 &&
      static_cast<std::byte*>(destinations_.back()) + sizes_.back() == destination &&
      static_cast<const std::byte*>(sources_.back()) + sizes_.back() == source) {
    sizes_.back() += bytes;
    return;
  }
  destinations_.push_back(destination);
  sources_.push_back(source);
  sizes_.push_back(bytes);
}

void CopyBatch::issue_one_by_one(cudaStream_t stream) const {
  for (size_t i = 0; i < sizes_.size(); ++i) {
    memory::cuda_call("cudaMemcpyAsync", [&] {
      return cudaMemcpyAsync(destinations_[i], sources_[i], sizes_[i], cudaMemcpyDefault, stream);
    });
  }
}

bool CopyBatch::issue_together(cudaStream_t stream, bool overlap_hint) {
#if CUDART_VERSION >= 12080
  // Sources are read in stream order: any other order could pass the waits issued before.
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  if (overlap_hint) attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  if (memory::fault_due()) throw CudaError("injected failure of cudaMemcpyBatchAsync");
#if CUDART_VERSION >= 13000
  const cudaError_t status =
      cudaMemcpyBatchAsync(destinations_.data(), sources_.data(), sizes_.data(), sizes_.size(),
                           &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t status =
      cudaMemcpyBatchAsync(destinations_.data(), const_cast<void**>(sources_.data()), sizes_.data(),
                           sizes_.size(), &attributes, &first, 1, &failed, stream);
#endif
  if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) {
    check_cuda(status, "cudaMemcpyBatchAsync");
    return true;
  }
  cudaGetLastError();
#else
  static_cast<void>(stream);
  static_cast<void>(overlap_hint);
#endif
  return false;
}

}  // namespace oomb::offload

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace oomb::offload {

// Events to be used again and again. With timing they are slow to record, so only those that
// measure have it.
class EventPool {
 public:
  explicit EventPool(bool timing) : timing_(timing) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool();

  cudaEvent_t take();
  void give_back(cudaEvent_t event) { free_.push_back(event); }
  int64_t created() const { return created_; }

 private:
  bool timing_;
  int64_t created_ = 0;
  std::vector<cudaEvent_t> free_;
};

}  // namespace oomb::offload

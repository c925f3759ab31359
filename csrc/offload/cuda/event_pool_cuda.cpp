#include "memory/cuda/cuda_call.h"
#include "offload/cuda/event_pool.h"

namespace oomb::offload {

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) cudaEventDestroy(event);
}

cudaEvent_t EventPool::take() {
  if (!free_.empty()) {
    cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  cudaEvent_t event = nullptr;
  memory::cuda_call("cudaEventCreateWithFlags", [&] {
    return cudaEventCreateWithFlags(&event, timing_ ? cudaEventDefault : cudaEventDisableTiming);
  });
  ++created_;
  return event;
}

}  // namespace oomb::offload

#include <chrono>
#include <thread>
#include <utility>

#include "memory/cuda/cuda_call.h"
#include "offload/cuda/cuda_lane.h"

namespace oomb::offload {

using memory::cuda_call;
using paging::Ticket;

CudaLane::CudaLane(EventPool& events, bool owns_stream)
    : events_(events), owns_stream_(owns_stream) {
  if (!owns_stream_) return;
  cuda_call("cudaStreamCreateWithFlags",
            [&] { return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); });
}

CudaLane::~CudaLane() {
  abandon();
  if (owns_stream_) cudaStreamDestroy(stream_);
}

void CudaLane::switch_stream(cudaStream_t stream) {
  if (stream == stream_) return;
  if (issued_ > completed()) {
    if (cudaEvent_t event = event_of(mark()); event != nullptr) {
      cuda_call("cudaStreamWaitEvent", [&] { return cudaStreamWaitEvent(stream, event, 0); });
    }
  }
  stream_ = stream;
}

Ticket CudaLane::mark() {
  cudaEvent_t event = events_.take();
  try {
    cuda_call("cudaEventRecord", [&] { return cudaEventRecord(event, stream_); });
  } catch (...) {
    events_.give_back(event);
    throw;
  }
  marks_.push_back({++issued_, event});
  return issued_;
}

Ticket CudaLane::completed() {
  while (!marks_.empty()) {
    const cudaError_t status = cudaEventQuery(marks_.front().event);
    if (status == cudaErrorNotReady) break;
    check_cuda(status, "cudaEventQuery");
    completed_ = marks_.front().ticket;
    events_.give_back(marks_.front().event);
    marks_.pop_front();
  }
  return completed_;
}

cudaEvent_t CudaLane::event_of(Ticket ticket) {
  if (ticket <= completed()) return nullptr;
  // Tickets are consecutive, and those not completed are all here.
  return marks_[static_cast<size_t>(ticket - marks_.front().ticket)].event;
}

void CudaLane::synchronize(Ticket ticket, double timeout_seconds) {
  auto last_progress = std::chrono::steady_clock::now();
  Ticket passed = completed_;
  for (int64_t round = 0; completed() < ticket; ++round) {
    const auto now = std::chrono::steady_clock::now();
    if (std::exchange(passed, completed_) != completed_) last_progress = now;
    const std::chrono::duration<double> waited = now - last_progress;
    if (waited.count() > timeout_seconds) {
      throw Error(concat("work on pages has been stuck for ", timeout_seconds,
                         " seconds: a copy or the kernels it waits for do not finish"));
    }
    // Short waits are common and worth a busy core; long ones are not.
    if (round > 200) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void CudaLane::abandon() {
  const bool busy = owns_stream_ || !marks_.empty();
  if (busy && cudaStreamSynchronize(stream_) != cudaSuccess) cudaGetLastError();
  for (const Mark& mark : marks_) events_.give_back(mark.event);
  marks_.clear();
  completed_ = issued_;
}

}  // namespace oomb::offload

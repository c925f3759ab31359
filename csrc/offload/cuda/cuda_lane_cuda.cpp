#include <chrono>
#include <thread>
#include <utility>

#include "memory/cuda/cuda_call.h"
#include "offload/cuda/cuda_lane.h"

namespace oomb::offload {

using memory::cuda_call;
using paging::Ticket;

CudaLane::CudaLane(EventPool& events, int own_streams)
    : events_(events), owns_streams_(own_streams > 0) {
  expect(0 <= own_streams && own_streams <= kMaxStreams, "streams", concat("1 .. ", kMaxStreams),
         own_streams);
  if (!owns_streams_) streams_.push_back(nullptr);
  try {
    for (int i = 0; i < own_streams; ++i) {
      cudaStream_t stream = nullptr;
      cuda_call("cudaStreamCreateWithFlags",
                [&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); });
      streams_.push_back(stream);
    }
  } catch (...) {
    for (const cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    throw;
  }
}

CudaLane::~CudaLane() {
  abandon();
  if (!owns_streams_) return;
  for (const cudaStream_t stream : streams_) cudaStreamDestroy(stream);
}

void CudaLane::switch_stream(cudaStream_t stream) {
  if (stream == streams_[0]) return;
  std::span<const cudaEvent_t> events;
  if (issued_ > completed()) events = events_of(mark());
  const cudaStream_t previous = std::exchange(streams_[0], stream);
  try {
    wait(events);
  } catch (...) {
    streams_[0] = previous;
    throw;
  }
}

Ticket CudaLane::mark() {
  Mark mark = {.ticket = issued_ + 1};
  try {
    for (size_t i = 0; i < streams_.size(); ++i) {
      mark.events[i] = events_.take();
      cuda_call("cudaEventRecord", [&] { return cudaEventRecord(mark.events[i], streams_[i]); });
    }
  } catch (...) {
    give_back(mark);
    throw;
  }
  marks_.push_back(mark);
  return ++issued_;
}

void CudaLane::give_back(const Mark& mark) {
  for (cudaEvent_t event : mark.events) {
    if (event != nullptr) events_.give_back(event);
  }
}

Ticket CudaLane::completed() {
  while (!marks_.empty()) {
    for (size_t i = 0; i < streams_.size(); ++i) {
      const cudaError_t status = cudaEventQuery(marks_.front().events[i]);
      if (status == cudaErrorNotReady) return completed_;
      check_cuda(status, "cudaEventQuery");
    }
    completed_ = marks_.front().ticket;
    give_back(marks_.front());
    marks_.pop_front();
  }
  return completed_;
}

std::span<const cudaEvent_t> CudaLane::events_of(Ticket ticket) {
  if (ticket <= completed()) return {};
  // Tickets are consecutive, and those not completed are all here.
  const Mark& mark = marks_[static_cast<size_t>(ticket - marks_.front().ticket)];
  return std::span(mark.events).first(streams_.size());
}

void CudaLane::wait(std::span<const cudaEvent_t> events) {
  for (const cudaStream_t stream : streams_) {
    for (const cudaEvent_t event : events) {
      cuda_call("cudaStreamWaitEvent", [&] { return cudaStreamWaitEvent(stream, event, 0); });
    }
  }
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
  if (owns_streams_ || !marks_.empty()) {
    for (const cudaStream_t stream : streams_) {
      if (cudaStreamSynchronize(stream) != cudaSuccess) cudaGetLastError();
    }
  }
  for (const Mark& mark : marks_) give_back(mark);
  marks_.clear();
  completed_ = issued_;
}

}  // namespace oomb::offload

#pragma once

#include <cuda_runtime_api.h>

#include <deque>

#include "memory/cuda/cuda_call.h"
#include "offload/cuda/event_pool.h"

namespace oomb::offload {

// Measures how long a stream is busy with (or waits in) pieces of work, by an event on either side.
// Nobody waits for the results: those that are there are taken by harvest().
class Stopwatch {
 public:
  ~Stopwatch() {
    for (const Span& span : spans_) give_back(span);
  }

  // Calls `issue`, which puts work into the stream. Measures nothing while many are under way.
  // `label` comes back with the seconds.
  template <typename Issue>
  void around(cudaStream_t stream, int64_t label, Issue issue) {
    if (spans_.size() >= kMost) return issue();
    Span span = {.label = label};
    try {
      span.begin = timers_.take();
      span.end = timers_.take();
      record(span.begin, stream);
      issue();
      record(span.end, stream);
    } catch (...) {
      give_back(span);
      throw;
    }
    spans_.push_back(span);
  }

  // Calls take(label, seconds) for what has passed since, in the order of issue.
  template <typename Take>
  void harvest(Take take) {
    while (!spans_.empty() && cudaEventQuery(spans_.front().end) == cudaSuccess) {
      const Span span = spans_.front();
      float milliseconds = 0;
      if (cudaEventElapsedTime(&milliseconds, span.begin, span.end) == cudaSuccess) {
        take(span.label, milliseconds * 1e-3);
      }
      give_back(span);
      spans_.pop_front();
    }
  }

  int64_t events_created() const { return timers_.created(); }

 private:
  static constexpr size_t kMost = 256;
  struct Span {
    int64_t label = 0;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
  };

  static void record(cudaEvent_t event, cudaStream_t stream) {
    memory::cuda_call("cudaEventRecord", [&] { return cudaEventRecord(event, stream); });
  }
  void give_back(const Span& span) {
    for (cudaEvent_t event : {span.begin, span.end}) {
      if (event != nullptr) timers_.give_back(event);
    }
  }

  EventPool timers_{true};
  std::deque<Span> spans_;
};

}  // namespace oomb::offload

#pragma once

#include <cuda_runtime_api.h>

#include <deque>

#include "offload/cuda/event_pool.h"
#include "paging/copy_engine.h"

namespace oomb::offload {

// A lane made of a stream: tickets are events recorded in it. Passed events go back to their pool,
// so their number follows what is in flight.
class CudaLane {
 public:
  CudaLane(EventPool& events, bool owns_stream);
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;
  ~CudaLane();

  cudaStream_t stream() const { return stream_; }
  // Work goes to another stream from now on, after everything that went to the old one.
  void switch_stream(cudaStream_t stream);

  // A ticket for everything in the stream so far.
  paging::Ticket mark();
  paging::Ticket issued() const { return issued_; }
  paging::Ticket completed();
  int64_t in_flight() const { return static_cast<int64_t>(marks_.size()); }

  // The event to wait on for a ticket; null: it has passed.
  cudaEvent_t event_of(paging::Ticket ticket);

  // Blocks until the ticket has passed. Throws after `timeout_seconds` without any progress.
  void synchronize(paging::Ticket ticket, double timeout_seconds);
  // Waits without checking, and forgets all marks: after a failure.
  void abandon();

 private:
  struct Mark {
    paging::Ticket ticket;
    cudaEvent_t event;
  };

  EventPool& events_;
  bool owns_stream_;
  cudaStream_t stream_ = nullptr;
  paging::Ticket issued_ = 0;
  paging::Ticket completed_ = 0;
  std::deque<Mark> marks_;
};

}  // namespace oomb::offload

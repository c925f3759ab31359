#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <deque>
#include <span>
#include <vector>

#include "offload/cuda/event_pool.h"
#include "paging/copy_engine.h"

namespace oomb::offload {

// A lane made of streams: tickets are events, one recorded in each. Between its streams nothing is
// ordered, so work that has to keep its order goes to one of them. Passed events go back to their
// pool, so their number follows what is in flight.
class CudaLane {
 public:
  static constexpr int kMaxStreams = 4;

  // Runs in `own_streams` streams that it makes; 0: in one of the caller's, see switch_stream.
  CudaLane(EventPool& events, int own_streams);
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;
  ~CudaLane();

  std::span<const cudaStream_t> streams() const { return streams_; }
  // Work goes to another stream from now on, after everything that went to the old one.
  void switch_stream(cudaStream_t stream);

  // A ticket for everything in the streams so far.
  paging::Ticket mark();
  paging::Ticket issued() const { return issued_; }
  paging::Ticket completed();
  int64_t in_flight() const { return static_cast<int64_t>(marks_.size()); }

  // The events to wait on for a ticket, until the lane is used again; empty: it has passed.
  std::span<const cudaEvent_t> events_of(paging::Ticket ticket);
  // Later work of this lane starts after the events.
  void wait(std::span<const cudaEvent_t> events);

  // Blocks until the ticket has passed. Throws after `timeout_seconds` without any progress.
  void synchronize(paging::Ticket ticket, double timeout_seconds);
  // Waits without checking, and forgets all marks: after a failure.
  void abandon();

 private:
  struct Mark {
    paging::Ticket ticket = 0;
    std::array<cudaEvent_t, kMaxStreams> events = {};
  };

  void give_back(const Mark& mark);

  EventPool& events_;
  bool owns_streams_;
  std::vector<cudaStream_t> streams_;
  paging::Ticket issued_ = 0;
  paging::Ticket completed_ = 0;
  std::deque<Mark> marks_;
};

}  // namespace oomb::offload

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>

#include "paging/copy_engine.h"

namespace oomb::offload {

// A lane made of a thread: runs tasks in the order they came, as a GPU stream runs its work. The
// thread starts with the first task.
class WorkerLane {
 public:
  WorkerLane() = default;
  WorkerLane(const WorkerLane&) = delete;
  WorkerLane& operator=(const WorkerLane&) = delete;
  ~WorkerLane();

  paging::Ticket enqueue(std::function<void()> task);
  paging::Ticket issued() const;
  paging::Ticket completed() const;

  // Blocks the calling thread until the lane has passed the ticket. False after `timeout_seconds`.
  bool wait_for(paging::Ticket ticket, double timeout_seconds);

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::queue<std::function<void()>> tasks_;
  paging::Ticket issued_ = 0;
  paging::Ticket completed_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace oomb::offload

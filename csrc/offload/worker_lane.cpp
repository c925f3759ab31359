#include "offload/worker_lane.h"

#include <chrono>
#include <utility>

namespace oomb::offload {

using paging::Ticket;

WorkerLane::~WorkerLane() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Ticket WorkerLane::enqueue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  tasks_.push(std::move(task));
  work_.notify_one();
  return ++issued_;
}

Ticket WorkerLane::issued() const {
  const std::lock_guard lock(mutex_);
  return issued_;
}

Ticket WorkerLane::completed() const {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool WorkerLane::wait_for(Ticket ticket, double timeout_seconds) {
  std::unique_lock lock(mutex_);
  return progress_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                            [&] { return completed_ >= ticket; });
}

void WorkerLane::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop();
    lock.unlock();
    task();
    lock.lock();
    ++completed_;
    progress_.notify_all();
  }
}

}  // namespace oomb::offload

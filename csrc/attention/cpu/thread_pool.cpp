#include "attention/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "attention/cpu/cpu.h"
#include "common/error.h"

namespace oomb::attention::cpu {
namespace {

using Task = std::function<void(int64_t, int64_t)>;

constexpr int64_t kMostThreads = 4096;  // more are a mistake: each takes address space for a stack

// The calling thread is thread 0; the others sleep between calls.
class ThreadPool {
 public:
  explicit ThreadPool(int64_t threads) : threads_(threads) {
    try {
      for (int64_t thread = 1; thread < threads; ++thread) {
        workers_.emplace_back([this, thread] { work(thread); });
      }
    } catch (const std::system_error& error) {
      const size_t made = workers_.size();
      stop();
      throw Error(concat("threads: the system gave ", made, " of ", threads - 1, ": ", error.what(),
                         "; set fewer (OOMB_NUM_THREADS)"));
    }
  }

  ~ThreadPool() { stop(); }

  int64_t threads() const { return threads_; }

  void run(int64_t units, const Task& task) {
    {
      std::lock_guard lock(mutex_);
      units_ = units;
      task_ = &task;
      error_ = nullptr;
      running_ = threads_ - 1;
      ++generation_;
    }
    started_.notify_all();
    run_share(0);
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return running_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    started_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void work(int64_t thread) {
    int64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      started_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      lock.unlock();
      run_share(thread);
      lock.lock();
      if (--running_ == 0) finished_.notify_one();
    }
  }

  void run_share(int64_t thread) {
    try {
      for (int64_t unit = thread; unit < units_; unit += threads_) (*task_)(unit, thread);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  const int64_t threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  bool stopping_ = false;
  int64_t generation_ = 0;
  int64_t running_ = 0;
  int64_t units_ = 0;
  const Task* task_ = nullptr;
  std::exception_ptr error_;
};

int64_t usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return std::max<int64_t>(1, std::thread::hardware_concurrency());
}

int64_t initial_threads() {
  const char* asked = std::getenv("OOMB_NUM_THREADS");
  if (asked == nullptr) return usable_cores();
  char* end = nullptr;
  const int64_t count = std::strtoll(asked, &end, 10);
  expect(*end == '\0' && count > 0 && count <= kMostThreads, "OOMB_NUM_THREADS",
         concat("1 to ", kMostThreads), asked);
  return count;
}

// One pool per process, for calls that come one at a time.
class SharedPool {
 public:
  // `parents` is that of the process which this one was forked from; null: none.
  explicit SharedPool(const SharedPool* parents) : parents_(parents) {}

  void run(int64_t units, int64_t threads, const Task& task) {
    std::lock_guard lock(mutex_);
    if (!pool_ || pool_->threads() != threads) {
      pool_.reset();
      pool_ = std::make_unique<ThreadPool>(threads);
    }
    pool_->run(units, task);
  }

 private:
  [[maybe_unused]] const SharedPool* const parents_;  // left alone, but not lost
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> pool_;
};

// A child of fork() has the object but not its threads, and maybe a lock that one of them held: it
// leaves the parent's pool alone, which nothing can join, and makes its own. So does whoever ends
// the process while another thread is in a call.
std::atomic<SharedPool*> pool_of_process = nullptr;

void make_pool() { pool_of_process = std::make_unique<SharedPool>(pool_of_process).release(); }

SharedPool& shared_pool() {
  static const bool made = [] {
    make_pool();
    return pthread_atfork(nullptr, nullptr, make_pool) == 0;
  }();
  static_cast<void>(made);
  return *pool_of_process;
}

std::atomic<int64_t>& thread_count() {
  static std::atomic<int64_t> count = initial_threads();
  return count;
}

}  // namespace

void parallel_for(int64_t units, int64_t threads, const Task& task) {
  if (units <= 1 || threads == 1) {
    for (int64_t unit = 0; unit < units; ++unit) task(unit, 0);
  } else {
    shared_pool().run(units, threads, task);
  }
}

void set_num_threads(int64_t count) {
  expect(count > 0 && count <= kMostThreads, "count", concat("1 to ", kMostThreads), count);
  thread_count() = count;
}

int64_t num_threads() { return thread_count(); }

}  // namespace oomb::attention::cpu

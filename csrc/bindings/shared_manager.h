#pragma once

// A page manager as Python holds it: shared between threads, and left alone by forked processes.

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>

#include "common/error.h"
#include "paging/page_manager.h"

namespace oomb::bindings {

// Page managers belong to one thread at a time; the lock makes that true while the interpreter lock
// is released. Other threads may ask how a call is going: stats(), waits(), snapshot().
//
// And they belong to the process that made them. A child of fork() has the object but not its
// threads, which it can neither join nor wait for (a condition variable that they wait on cannot
// even be destroyed), nor the GPU: it leaves all of it alone until it ends.
class SharedManager {
 public:
  explicit SharedManager(std::unique_ptr<paging::PageManager> manager, int device = -1)
      : manager_(std::move(manager)), device_(device) {}
  SharedManager(const SharedManager&) = delete;
  SharedManager& operator=(const SharedManager&) = delete;
  ~SharedManager() {
    if (!is_inherited()) return;
    static_cast<void>(manager_.release());
  }

  int device() const { return device_; }  // -1: the CPU

  template <typename Call>
  auto with(Call call) {
    check_process();
    const pybind11::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return call(*manager_);
  }
  paging::PageManager& operator*() {  // for the thread that runs the call
    check_process();
    return *manager_;
  }

  void close() {
    if (is_inherited()) return;
    with([](paging::PageManager& manager) { manager.close(); });
  }

 private:
  bool is_inherited() const { return getpid() != process_; }
  void check_process() const {
    if (!is_inherited()) return;
    throw Error(concat("the page manager belongs to process ", process_, ", and this is process ",
                       getpid(), ", forked from it"));
  }

  const pid_t process_ = getpid();
  std::unique_ptr<paging::PageManager> manager_;
  int device_;
  std::mutex mutex_;
};

}  // namespace oomb::bindings

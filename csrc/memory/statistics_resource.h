#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "memory/wrapped_resource.h"

namespace oomb::memory {

struct Statistics {
  int64_t peak_bytes = 0;  // largest committed() since the last reset
  int64_t commits = 0;     // calls that made the resource grow
  int64_t failures = 0;
  double commit_seconds = 0;  // that callers waited for
};

// Counts what the wrapped resource hands out.
class StatisticsResource final : public WrappedResource {
 public:
  explicit StatisticsResource(std::unique_ptr<MemoryResource> upstream)
      : WrappedResource(std::move(upstream)) {}

  const Statistics& statistics() const { return statistics_; }
  void reset() { statistics_ = Statistics{.peak_bytes = committed()}; }

  void commit(int64_t bytes) override {
    const int64_t before = committed();
    const auto start = std::chrono::steady_clock::now();
    const auto stop = [&] {
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      statistics_.commit_seconds += waited.count();
    };
    try {
      WrappedResource::commit(bytes);
    } catch (...) {
      stop();
      ++statistics_.failures;
      throw;
    }
    stop();
    if (committed() > before) ++statistics_.commits;
    statistics_.peak_bytes = std::max(statistics_.peak_bytes, committed());
  }

 private:
  Statistics statistics_;
};

}  // namespace oomb::memory

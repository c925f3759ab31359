#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "paging/page_space.h"
#include "paging/residency.h"

namespace oomb::paging {

struct Transition {
  PageIndex index = 0;
  Residency from = Residency::kFree;
  Residency to = Residency::kFree;
};

// The last thousand transitions, for snapshots.
class TransitionLog {
 public:
  void add(const Transition& transition) { ring_[count_++ % ring_.size()] = transition; }
  void clear() { count_ = 0; }

  // Oldest first.
  std::vector<Transition> last(size_t limit) const {
    const size_t kept = std::min({limit, count_, ring_.size()});
    std::vector<Transition> result;
    for (size_t i = count_ - kept; i < count_; ++i) result.push_back(ring_[i % ring_.size()]);
    return result;
  }

 private:
  std::array<Transition, 1000> ring_;
  size_t count_ = 0;
};

}  // namespace oomb::paging

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "paging/schedule.h"

namespace oomb::paging {

// What is known of a call before it starts.
struct CallPlan {
  int64_t num_layers = 0;
  std::vector<int32_t> pages_per_sequence;
  int grad_slots = 1;         // slots of one gradient page
  std::vector<Visit> visits;  // the access order
  int64_t outputs = 0;        // pieces of kept outputs of a layer
  bool exact = true;       // ranges say what is used; false: an upper bound until set_visit_pages
  int64_t wave_pages = 1;  // waves end at multiples of this: kernels take so many pages at once
  std::optional<int64_t> device_slots = std::nullopt;  // a lower cap of the device tier

  // Throws InvalidArgument.
  void check() const;
  bool has_gradients() const;
  int64_t kept_outputs() const;  // pieces that are read
};

}  // namespace oomb::paging

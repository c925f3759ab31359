#include "paging/call_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "common/error.h"

namespace oomb::paging {

void CallPlan::check() const {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // layers and pages are int32_t
  expect(num_layers > 0 && num_layers <= kMost, "num_layers", "1 to 2^31 - 1", num_layers);
  expect(!pages_per_sequence.empty(), "pages_per_sequence", "one number per sequence", "none");
  expect(grad_slots == 1 || grad_slots == 2, "grad_slots", "1 or 2", grad_slots);
  expect(wave_pages > 0 && wave_pages <= kMost, "wave_pages", "1 to 2^31 - 1", wave_pages);
  expect(std::ssize(visits) < kMost / 2, "visits", "at most 2^30 visits", visits.size());
  for (const int32_t pages : pages_per_sequence) {
    expect(pages >= 0, "pages_per_sequence", "0 or more pages", pages);
  }
  const int32_t max_pages = *std::max_element(pages_per_sequence.begin(), pages_per_sequence.end());
  for (const Visit& visit : visits) {
    expect(visit.layer >= 0 && visit.layer < num_layers, "visits", "a layer of the model",
           visit.layer);
    expect(visit.kind >= VisitKind::kRead && visit.kind <= VisitKind::kReadGradient, "visits",
           "kind 0, 1 or 2", static_cast<int>(visit.kind));
    expect(0 <= visit.first && visit.first <= visit.last && visit.last <= max_pages, "visits",
           concat("pages within 0 .. ", max_pages), concat(visit.first, " .. ", visit.last));
  }
}

bool CallPlan::has_gradients() const {
  return std::any_of(visits.begin(), visits.end(),
                     [](const Visit& visit) { return visit.kind != VisitKind::kRead; });
}

}  // namespace oomb::paging

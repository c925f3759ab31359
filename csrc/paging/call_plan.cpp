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
  expect(outputs >= 0 && outputs <= kMost, "outputs", "0 to 2^31 - 1", outputs);
  const int32_t max_pages = *std::max_element(pages_per_sequence.begin(), pages_per_sequence.end());
  for (const Visit& visit : visits) {
    expect(visit.layer >= 0 && visit.layer < num_layers, "visits", "a layer of the model",
           visit.layer);
    expect(visit.kind >= VisitKind::kRead && visit.kind <= VisitKind::kReadOutput, "visits",
           "kind 0, 1, 2 or 3", static_cast<int>(visit.kind));
    const int64_t limit = visit.kind == VisitKind::kReadOutput ? outputs : max_pages;
    expect(0 <= visit.first && visit.first <= visit.last && visit.last <= limit, "visits",
           concat("pages within 0 .. ", limit), concat(visit.first, " .. ", visit.last));
  }
}

bool CallPlan::has_gradients() const {
  return std::any_of(visits.begin(), visits.end(),
                     [](const Visit& visit) { return visit.touches(PageKind::kGradient); });
}

int64_t CallPlan::kept_outputs() const {
  int64_t pieces = 0;
  for (const Visit& visit : visits) {
    if (visit.kind == VisitKind::kReadOutput) pieces += visit.last - visit.first;
  }
  return pieces;
}

}  // namespace oomb::paging

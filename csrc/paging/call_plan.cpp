#include "paging/call_plan.h"

#include <algorithm>

#include "common/error.h"

namespace oomb::paging {

void CallPlan::check() const {
  expect(num_layers > 0, "num_layers", "at least 1", num_layers);
  expect(!pages_per_sequence.empty(), "pages_per_sequence", "one number per sequence", "none");
  expect(grad_slots == 1 || grad_slots == 2, "grad_slots", "1 or 2", grad_slots);
  expect(wave_pages > 0, "wave_pages", "at least 1", wave_pages);
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

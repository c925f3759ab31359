#include <algorithm>
#include <limits>
#include <vector>

#include "attention/cpu/cpu.h"
#include "attention/cpu/thread_pool.h"
#include "common/error.h"

namespace oomb::attention::cpu {
namespace {

template <typename Real>
void select_row(const PageSelectParams& p, const Real* scores, int32_t* selection) {
  std::vector<int32_t> candidates;
  for (int64_t page = 0; page < p.num_pages; ++page) {
    if (scores[page] > -std::numeric_limits<Real>::infinity()) {
      candidates.push_back(static_cast<int32_t>(page));
    }
  }
  const int64_t count = static_cast<int64_t>(candidates.size());
  const int64_t chosen = std::min(p.budget, count);
  // Sinks move to the front of the list, recent pages behind them, best of the rest after that.
  const int64_t sinks = std::min(p.sink_pages, chosen);
  const int64_t recent = std::min(p.recent_pages, chosen - sinks);
  std::rotate(candidates.begin() + sinks, candidates.end() - recent, candidates.end());
  std::partial_sort(candidates.begin() + sinks + recent, candidates.begin() + chosen,
                    candidates.end(), [&](int32_t a, int32_t b) {
                      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
                    });
  std::sort(candidates.begin(), candidates.begin() + chosen);
  std::copy_n(candidates.begin(), chosen, selection);
  std::fill(selection + chosen, selection + p.budget, -1);
}

template <typename Real>
void select_rows(const PageSelectParams& p) {
  parallel_for(p.rows, num_threads(), [&](int64_t row, int64_t) {
    select_row(p, static_cast<const Real*>(p.scores) + row * p.num_pages,
               p.selection + row * p.budget);
  });
}

}  // namespace

void page_select(const PageSelectParams& params) {
  expect(params.budget > 0, "budget", "a number above 0", params.budget);
  expect(params.dtype == DType::kFloat32 || params.dtype == DType::kFloat64, "scores",
         "float32 or float64", name_of(params.dtype));
  if (params.dtype == DType::kFloat64) {
    select_rows<double>(params);
  } else {
    select_rows<float>(params);
  }
}

}  // namespace oomb::attention::cpu

// Scores of every past page for every query block: which score runs.

#include "attention/pages/pages.h"
#include "attention/pages/score.h"
#include "common/error.h"

namespace oomb::attention::pages {

extern const Score kBlockMean, kTokenSoftmax;

namespace {

constexpr const Score* kScores[] = {&kBlockMean, &kTokenSoftmax};  // by ScoreKind
static_assert(std::size(kScores) == std::size(kScoreNames));

const Score& score_of(const PageScoreParams& params) {
  return *kScores[static_cast<size_t>(params.kind)];
}

}  // namespace

int64_t page_score_workspace_bytes(const PageScoreParams& params) {
  return score_of(params).workspace_bytes(params);
}

void page_score(const PageScoreParams& params) {
  if (num_pages(params) == 0 || params.shape.chunk == 0 || params.shape.batch == 0) return;
  const int64_t needed = page_score_workspace_bytes(params);
  expect(params.workspace_bytes >= needed, "workspace", concat("at least ", needed, " bytes"),
         params.workspace_bytes);
  score_of(params).run(params);
}

}  // namespace oomb::attention::pages

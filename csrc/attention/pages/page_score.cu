// Scores of every past page for every query block: lays out the work space and runs the stages.

#include "attention/pages/pages.h"
#include "attention/pages/score.h"
#include "common/cuda_check.h"

namespace oomb::attention::pages {
namespace {

// Work space: queries summed over heads (or averaged over blocks), then the softmax statistics.
struct Workspace {
  int64_t queries = 0;
  int64_t statistics = 0;
};

Workspace workspace_of(const PageScoreParams& params) {
  const Shape& shape = params.shape;
  const int64_t accumulator = params.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t tokens = shape.batch * shape.kv_heads * shape.chunk;
  Workspace result;
  if (params.kind == ScoreKind::kBlockMean) {
    result.queries =
        shape.batch * num_blocks(params) * shape.kv_heads * shape.head_dim * accumulator;
  } else if (matrix_path_takes(params)) {
    result.queries = tokens * shape.head_dim * size_of(params.dtype);
    result.statistics = token_softmax_splits(params) * tokens * 8;
  } else {
    result.queries = tokens * shape.head_dim * accumulator;
    result.statistics = tokens * accumulator;
  }
  result.queries = align_up(result.queries, 256);
  return result;
}

}  // namespace

int64_t page_score_workspace_bytes(const PageScoreParams& params) {
  const Workspace workspace = workspace_of(params);
  return workspace.queries + workspace.statistics;
}

void page_score(const PageScoreParams& params) {
  if (num_pages(params) == 0 || params.shape.chunk == 0 || params.shape.batch == 0) return;
  const Workspace workspace = workspace_of(params);
  expect(params.workspace_bytes >= workspace.queries + workspace.statistics, "workspace",
         concat("at least ", workspace.queries + workspace.statistics, " bytes"),
         params.workspace_bytes);
  void* queries = params.workspace;
  void* statistics = static_cast<char*>(params.workspace) + workspace.queries;
  if (params.kind == ScoreKind::kBlockMean) {
    block_means(params, queries);
    score_block_mean(params, queries);
  } else if (matrix_path_takes(params)) {
    group_sums(params, queries, true);
    score_token_softmax_matrix(params, queries, statistics);
  } else {
    group_sums(params, queries, false);
    score_token_softmax(params, queries, statistics);
  }
}

}  // namespace oomb::attention::pages

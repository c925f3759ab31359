#pragma once

// What the scores of pages share. Each score is a .cu file of its own, which defines a Score;
// page_score.cu lists them.

#include <cstdint>

#include "attention/params.h"
#include "common/math.h"

namespace oomb::attention::pages {

inline int64_t num_pages(const PageScoreParams& p) {
  return ceil_div(p.num_tokens, p.shape.page_size);
}
inline int64_t num_blocks(const PageScoreParams& p) {
  return ceil_div(p.shape.chunk, p.shape.page_size);
}
inline int64_t accumulator_bytes(const PageScoreParams& p) {
  return p.dtype == DType::kFloat64 ? 8 : 4;
}

struct Score {
  int64_t (*workspace_bytes)(const PageScoreParams& params);
  void (*run)(const PageScoreParams& params);  // params.workspace has so many bytes
};

// Mean query of each block over its real tokens and the group's heads: [B, Q, Hkv, D], accumulator
// type.
void block_means(const PageScoreParams& params, void* means);

// Sum of each token's queries over the group's heads: [B, Hkv, C, D]; accumulator type, or the
// inputs' own type for the matrix path.
void group_sums(const PageScoreParams& params, void* sums, bool input_type);

// token_softmax with tensor cores: 16-bit inputs, head dim 64 to 256, page size 64 or 128.
bool matrix_path_takes(const PageScoreParams& params);
int64_t token_softmax_splits(const PageScoreParams& params);
// partials: (max, sum) in base 2 of each split of the pages, [splits, B, Hkv, C] of two floats
void score_token_softmax_matrix(const PageScoreParams& params, const void* sums, void* partials);

}  // namespace oomb::attention::pages

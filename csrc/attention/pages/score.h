#pragma once

// The stages of page scoring. Each is one .cu file; page_score.cu strings them together.

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

// Mean query of each block over its real tokens and the group's heads: [B, Q, Hkv, D], accumulator
// type.
void block_means(const PageScoreParams& params, void* means);

// Sum of each token's queries over the group's heads: [B, Hkv, C, D]; accumulator type, or the
// inputs' own type for the matrix path.
void group_sums(const PageScoreParams& params, void* sums, bool input_type);

void score_block_mean(const PageScoreParams& params, const void* means);

// Two passes over the pages: log-sum-exp of every token's scores, then the pages' sums of
// exp(score - lse). lse: [B, Hkv, C], accumulator type.
void score_token_softmax(const PageScoreParams& params, const void* sums, void* lse);

// The same with tensor cores: 16-bit inputs, head dim 64 or 128, page size 64 or 128.
bool matrix_path_takes(const PageScoreParams& params);
int64_t token_softmax_splits(const PageScoreParams& params);
// partials: (max, sum) in base 2 of each split of the pages, [splits, B, Hkv, C] of two floats
void score_token_softmax_matrix(const PageScoreParams& params, const void* sums, void* partials);

}  // namespace oomb::attention::pages

#pragma once

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::pages {

// Pages that a query block chooses among: [begin, end).
struct Candidates {
  int64_t begin = 0;
  int64_t end = 0;
};

__device__ inline Candidates candidates_of(const PageScoreParams& p, int64_t batch, int64_t block) {
  int64_t keys = p.num_tokens;
  if (p.visibility.num_keys != nullptr) {
    keys = min(keys, static_cast<int64_t>(p.visibility.num_keys[batch]));
  }
  Candidates result;
  result.end = keys <= 0 ? 0 : ceil_div(keys, p.shape.page_size);
  if (p.visibility.first_key != nullptr) {
    const int64_t first = p.visibility.first_key[batch * p.shape.chunk + block * p.shape.page_size];
    result.begin = max(first, int64_t{0}) / p.shape.page_size;
  }
  return result;
}

// Rows of the chunk that hold real tokens: [0, result).
__device__ inline int64_t real_rows(const PageScoreParams& p, int64_t batch) {
  if (p.visibility.num_keys == nullptr) return p.shape.chunk;
  const int64_t rows = p.visibility.num_keys[batch] - p.num_tokens;
  return max(int64_t{0}, min(rows, p.shape.chunk));
}

}  // namespace oomb::attention::pages

#pragma once

// What happens to pages outside the attention kernels, on a CUDA device: writing them, reading
// their gradients, scoring them, choosing among them. Any head dim up to 512, twice that where
// bounds are scored; any page size.

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::pages {

void page_write(const PageWriteParams& params);
void page_gradient_read(const PageGradientReadParams& params);
void page_score(const PageScoreParams& params);
int64_t page_score_workspace_bytes(const PageScoreParams& params);
void page_select(const PageSelectParams& params);

}  // namespace oomb::attention::pages

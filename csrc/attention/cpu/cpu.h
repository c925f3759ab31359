#pragma once

// The attention operations on the CPU: the reference of all others, and what runs where there is no
// GPU. float64 in float64; float32, bfloat16 and float16 with float32 accumulation.
//
// The result does not depend on the number of threads, on how the past is cut into waves, or on the
// slots its pages lie in: the tile grid is fixed (tiles of page_size keys, the own chunk's first,
// then the pages in ascending order) and every number has one writer that adds in that order.
//
// Invalid parameters, lists with duplicates or pages out of range, and pages that are needed but
// not resident throw InvalidArgument before anything is written.

#include "attention/params.h"

namespace oomb::attention::cpu {

void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
int64_t backward_workspace_bytes(const BackwardParams& params);  // 0: scratch belongs to the call

void page_write(const PageWriteParams& params);
void page_gradient_read(const PageGradientReadParams& params);
void page_score(const PageScoreParams& params);
int64_t page_score_workspace_bytes(const PageScoreParams& params);  // 0
void page_select(const PageSelectParams& params);

// Threads of the calls that follow; at the start OOMB_NUM_THREADS or the cores this process may
// use.
void set_num_threads(int64_t count);
int64_t num_threads();

// The instruction set the kernels were chosen for: "avx512", "avx2" or "generic".
const char* instruction_set();

}  // namespace oomb::attention::cpu

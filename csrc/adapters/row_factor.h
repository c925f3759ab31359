#pragma once

// What passes between the two products of a LoRA adapter: values in float, as the left factor of a
// product of bfloat16 numbers that keeps 16 bits of them.

#include <cstdint>

namespace oomb::adapters {

// u = scale * (halves[:, :rank] + halves[:, rank:]), of which factor = [u1 | u1 | u2] gets
// u1 = bfloat16(u) and u2 = bfloat16(u - u1). Beside [w1; w2; w1] it multiplies u by w up to u2 w2.
struct RowFactorParams {
  int64_t rows = 0;
  int64_t rank = 0;
  const float* halves = nullptr;  // [rows, 2 rank]
  uint16_t* factor = nullptr;     // [rows, 3 rank] bfloat16
  float scale = 1.0f;
  void* stream = nullptr;  // a cudaStream_t; the CPU has none
  int device = 0;          // of the stream and the arrays, on GPUs
};

void row_factor(const RowFactorParams& params);

namespace cuda {
void row_factor(const RowFactorParams& params);
}

}  // namespace oomb::adapters

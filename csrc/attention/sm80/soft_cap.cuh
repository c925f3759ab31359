#pragma once

// A soft cap: a score z = scale * q k becomes cap * tanh(z / cap). In the registers of a tile
// t = tanh(z / cap) takes the product's place, and cap that of scale, before anything is hidden:
//
//   no cap:  P = 2^(q k * scale * log2 e - lse)    dS = P (dP - delta)
//   a cap:   P = 2^(t * cap * log2 e - lse)        dS = P (dP - delta) (1 - t^2)
//
// dP is changed so that the formula without a cap gives that dS. Where there is no cap, a branch
// that all threads take alike leaves everything as it is.

#include "attention/device/ptx.cuh"
#include "attention/sm80/block_place.cuh"

namespace oomb::attention::sm80 {

// 2^(score * this) is e^score.
template <typename Params>
__device__ float exponent_scale(const Params& p) {
  return static_cast<float>(p.cap > 0 ? p.cap : p.scale) * kLog2E;
}

// tanh(x) = 1 - 2 / (1 + e^2x), to 1e-7 absolutely; cap times that is far below a bf16 score's
// rounding, which tanh.approx.f32 (5e-4) is not.
template <typename Params, int kTiles>
__device__ void cap_scores(const Params& p, float (&s)[kTiles][4]) {
  if (p.cap == 0) return;
  const float factor =
      2.0f * kLog2E * __fdividef(static_cast<float>(p.scale), static_cast<float>(p.cap));
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[n][c] = 1.0f - __fdividef(2.0f, 1.0f + device::exp2_fast(s[n][c] * factor));
    }
  }
}

// A hidden t is minus infinity and has P = 0: dP must only stay finite.
__device__ inline float behind_cap(float t, float dp, float delta) {
  const float seen = fmaxf(t, -1.0f);
  return fmaf(dp - delta, fmaf(-seen, seen, 1.0f), delta);
}

// Where a row of the tile is a query: rows r of a lane have delta[r].
template <typename Params, int kTiles>
__device__ void cap_by_row(const Params& p, const float (&t)[kTiles][4], float (&dp)[kTiles][4],
                           const float (&delta)[2]) {
  if (p.cap == 0) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) dp[n][c] = behind_cap(t[n][c], dp[n][c], delta[c / 2]);
  }
}

// Where a column is a query: delta of the lane's first pair of columns is at that shared address.
template <typename Params, int kTiles>
__device__ void cap_by_column(const Params& p, const float (&t)[kTiles][4], float (&dp)[kTiles][4],
                              uint32_t delta) {
  if (p.cap == 0) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 pair = device::load_pair(delta + n * 8 * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      dp[n][c] = behind_cap(t[n][c], dp[n][c], c % 2 == 0 ? pair.x : pair.y);
    }
  }
}

}  // namespace oomb::attention::sm80

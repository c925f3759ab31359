#pragma once

// Thread blocks that take turns at a place in memory: a counter of how many have had theirs. What a
// block had written before it passed its turn on is there for whoever has waited for it.

#include <cstdint>

namespace oomb::attention::sm80 {

__device__ inline void wait_for_turn(const int32_t* turn, int32_t order) {
  int32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(turn) : "memory");
  } while (now < order);
}

__device__ inline void set_turn(int32_t* turn, int32_t order) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(turn), "r"(order) : "memory");
}

}  // namespace oomb::attention::sm80

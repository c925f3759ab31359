#pragma once

// Thread blocks that take turns at a place in memory: a counter of how many have had theirs. What a
// block had written before it passed its turn on is there for whoever has waited for it.

#include <cstdint>

#include "attention/device/ptx.cuh"

namespace oomb::attention::sm80 {

__device__ inline int32_t turn_of(const int32_t* turn) {
  int32_t now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(turn) : "memory");
  return now;
}

__device__ inline void wait_for_turn(const int32_t* turn, int32_t order) {
  while (turn_of(turn) < order) {
  }
}

__device__ inline void set_turn(int32_t* turn, int32_t order) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(turn), "r"(order) : "memory");
}

// The same within a block, in shared memory: what one thread has seen, others may rely on. Atomic
// on both sides, so that whoever looks for races sees that the two are meant to meet.
__device__ inline int load_acquire_shared(const int* place) {
  int value;
  asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;\n"
               : "=r"(value)
               : "r"(device::shared_address(place))
               : "memory");
  return value;
}

__device__ inline void store_release_shared(int* place, int value) {
  int before;
  asm volatile("atom.release.cta.shared.exch.b32 %0, [%1], %2;\n"
               : "=r"(before)
               : "r"(device::shared_address(place)), "r"(value)
               : "memory");
}

}  // namespace oomb::attention::sm80

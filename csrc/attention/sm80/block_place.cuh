#pragma once

namespace oomb::attention::sm80 {

constexpr float kLog2E = 1.4426950408889634f;

// Which tile, head and sequence a block works on. Read from the special registers anew each time,
// so that nothing of it stays in registers through a main loop that has none to spare.
struct BlockPlace {
  int x, head, batch;

  __device__ BlockPlace() {
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(head));
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(batch));
  }
};

// Likewise the thread's number.
__device__ inline int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace oomb::attention::sm80

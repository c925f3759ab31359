#pragma once

// Synchronisation inside a thread block on sm_90a: transaction barriers (mbarrier), named barriers,
// proxy fences and the register hand-over between warpgroups. Device code only.
//
//   producer                                consumer
//   wait(empty, phase ^ 1)                  wait(full, phase)
//   arrive_expect(full, bytes); TMA load    ... wgmma reads the stage ...
//                                           arrive(empty)
//
// A barrier starts in phase 0. wait(b, p) returns once the phase of parity p has completed, so a
// producer's first wait for an empty stage passes with parity 1.

#include <cstdint>

namespace oomb::attention::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine; then synchronise the block.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// One arrival that also announces the bytes that copies will bring in this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra READY;\n"
      "bra WAIT;\n"
      "READY:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Named barriers 1..15 (0 is __syncthreads). `threads` counts both waiting and arriving threads.
__device__ __forceinline__ void named_barrier_wait(uint32_t id, uint32_t threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of the tensor cores and
// the copy engine.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Executed by all warps of a warpgroup. Registers must be a multiple of 8 in 24..256.
template <uint32_t kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace oomb::attention::sm90

#pragma once

// The bulk copy engine (TMA). Device code only; one thread issues. Coordinates count elements, the
// innermost dimension first; parts of a box outside the tensor arrive as zeros and still count as
// transferred bytes. Shared-memory addresses of swizzled boxes are multiples of 1024 bytes.

#include <cuda.h>

#include <cstdint>

#include "attention/sm90/ptx/barrier.h"

namespace oomb::attention::sm90 {

// L2 priorities: encoded createpolicy results for the whole access.
enum class CacheHint : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

__device__ __forceinline__ void tma_load_2d(void* shared, const CUtensorMap& map, uint64_t* barrier,
                                            int32_t x, int32_t y,
                                            CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(void* shared, const CUtensorMap& map, uint64_t* barrier,
                                            int32_t x, int32_t y, int32_t z, int32_t w,
                                            CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w),
      "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// What reads shared memory asynchronously: fence_async_shared and a barrier come before,
// bulk_commit after, and bulk_wait_read before the shared memory is written again.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most kPending of this thread's groups have yet to read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// At most kPending of this thread's groups have yet to reach global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace oomb::attention::sm90

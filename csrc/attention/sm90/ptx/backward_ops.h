#pragma once

// Device instructions that only the backward needs: reduce-add of a tile by the copy engine, plain
// bulk loads, stmatrix, a narrow matrix product, and the acquire/release of a counter in memory.

#include <cuda.h>

#include <cstdint>

#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"

namespace oomb::attention::sm90 {

// global[box] += shared[box] in fp32, done by the L2; parts of the box outside the tensor are left
// out. Ordering as for the stores in tma.h.
__device__ __forceinline__ void tma_reduce_add_3d(const CUtensorMap& map, const void* shared,
                                                  int32_t x, int32_t y, int32_t z, CacheHint hint) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group.L2::cache_hint "
      "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(&map),
      "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// Contiguous bytes (a multiple of 16, both addresses aligned to 16) into shared memory.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint64_t* barrier,
                                          uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Brings memory into the L2. Address and bytes are multiples of 16.
__device__ __forceinline__ void bulk_prefetch(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8 and
// holds row l / 4, columns 2 (l % 4), + 1 of each.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t r0, uint32_t r1,
                                               uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// d (64 x 32) = (accumulate ? d : 0) + A B; both operands MN-major in shared memory.
__device__ __forceinline__ void wgmma_ss_n32_transposed(float (&d)[16], uint64_t a, uint64_t b,
                                                        int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Orders accesses of the ordinary path and of the copy engine, in global memory too.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Adds to two neighbouring floats without reading them back.
__device__ __forceinline__ void reduce_add_pair(float* address, float first, float second) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(first),
               "f"(second)
               : "memory");
}

// Two neighbouring floats, or zeros.
__device__ __forceinline__ void load_pair_if(bool condition, const float* address, float& first,
                                             float& second) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
      "@p ld.global.v2.f32 {%0, %1}, [%2];\n}\n"
      : "=&f"(first), "=&f"(second)
      : "l"(address), "r"(static_cast<int>(condition))
      : "memory");
}

// 2^x; 0 for minus infinity.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace oomb::attention::sm90

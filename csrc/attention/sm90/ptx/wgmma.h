#pragma once

// Warpgroup matrix products on sm_90a: d (64 x N, fp32, registers) += A (64 x 16) B (16 x N), bf16.
// Device code only; all 128 threads of a warpgroup execute.
//
// Operands in shared memory are tiles as the copy engine writes them with a 128-byte swizzle: boxes
// of 64 columns, `rows` rows of 128 bytes, one box after the other.
//
//            columns 0..63    columns 64..127
//   row 0    [128 bytes]      [128 bytes]         8 rows = one swizzle atom of 1024 bytes
//   row 1    [128 bytes]      [128 bytes]         box at base, next box at base + rows * 128
//   ...
//
// An operand whose columns are the summed dimension k (Q and K in Q K^T) is "K-major"; one whose
// rows are (V in P V) is "MN-major" and takes the transposed form. Steps of 16 in k:
//   K-major   operand_k_step(c) from column c (a multiple of 16)
//   MN-major  + 16 rows = 2048 bytes
//
// Registers: thread t of the warpgroup, g = t / 4 % 8, q = t % 4, warp w = t / 32 % 4, holds
//   d[4j + 0, 1] = row 16w + g,     columns 8j + 2q, + 1
//   d[4j + 2, 3] = row 16w + g + 8, same columns
// and as A operand of k step s, packed pairs from d[8s .. 8s + 7] in order.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/ptx/barrier.h"

namespace oomb::attention::sm90 {

inline constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

__device__ __forceinline__ uint64_t encode_bytes(uint32_t bytes) { return (bytes & 0x3ffff) >> 4; }

// K-major operand: rows of 128 bytes, 8-row atoms 1024 bytes apart.
__device__ __forceinline__ uint64_t operand_k_major(const void* shared) {
  return kSwizzle128 | (encode_bytes(1024) << 32) | (uint64_t{1} << 16) |
         encode_bytes(shared_address(shared));
}

// MN-major operand: `box_bytes` from one block of 64 columns to the next.
__device__ __forceinline__ uint64_t operand_mn_major(const void* shared, uint32_t box_bytes) {
  return kSwizzle128 | (encode_bytes(1024) << 32) | (encode_bytes(box_bytes) << 16) |
         encode_bytes(shared_address(shared));
}

// Moves a descriptor by a number of bytes (a multiple of 16) inside shared memory.
__device__ __forceinline__ uint64_t operand_advance(uint64_t operand, uint32_t bytes) {
  return operand + (bytes >> 4);
}

// Bytes from column 0 to column c of a K-major tile of `rows` rows.
__device__ __forceinline__ constexpr uint32_t operand_k_step(uint32_t c, uint32_t rows) {
  return (c / 64) * rows * 128 + (c % 64) * 2;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of these registers across this point.
template <int N>
__device__ __forceinline__ void pin_registers(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin_registers(uint32_t (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Two floats rounded to bf16, `low` in the lower half: one register of an A operand.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Operand lists of the instruction: OOMB_D32(d, i) binds d[i .. i + 31].
#define OOMB_D8(d, i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OOMB_D32(d, i) OOMB_D8(d, i), OOMB_D8(d, i + 8), OOMB_D8(d, i + 16), OOMB_D8(d, i + 24)

#define OOMB_LIST_32                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OOMB_LIST_64                                                                 \
  OOMB_LIST_32                                                                       \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OOMB_LIST_128                                                                          \
  OOMB_LIST_64                                                                                 \
  ", "                                                                                         \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, "                                                                                     \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

// The instruction with d as operands 0 .. count - 1; predicate and operands follow.
#define OOMB_WGMMA_SS(shape, list, flag, a, b, ta, tb)                                 \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\nwgmma.mma_async.sync.aligned." shape \
  ".f32.bf16.bf16 {" list "}, " a ", " b ", p, 1, 1, " ta ", " tb ";\n}\n"
#define OOMB_WGMMA_RS(shape, list, flag, a, b, tb)                                     \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\nwgmma.mma_async.sync.aligned." shape \
  ".f32.bf16.bf16 {" list "}, {" a "}, " b ", p, 1, 1, " tb ";\n}\n"

// d = (accumulate ? d : 0) + A B, both operands in shared memory. kTransposeA/B: MN-major operand.
template <int N, bool kTransposeA = false, bool kTransposeB = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b,
                                         int accumulate) {
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (N == 64) {
    asm volatile(OOMB_WGMMA_SS("m64n64k16", OOMB_LIST_32, "%34", "%32", "%33", "%35", "%36")
                 : OOMB_D32(d, 0)
                 : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeA}), "n"(int{kTransposeB}));
  } else if constexpr (N == 128) {
    asm volatile(OOMB_WGMMA_SS("m64n128k16", OOMB_LIST_64, "%66", "%64", "%65", "%67", "%68")
                 : OOMB_D32(d, 0), OOMB_D32(d, 32)
                 : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeA}), "n"(int{kTransposeB}));
  } else {
    asm volatile(OOMB_WGMMA_SS("m64n256k16", OOMB_LIST_128, "%130", "%128", "%129", "%131", "%132")
                 : OOMB_D32(d, 0), OOMB_D32(d, 32), OOMB_D32(d, 64), OOMB_D32(d, 96)
                 : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeA}), "n"(int{kTransposeB}));
  }
}

// The same with A in registers: four packed pairs per thread.
template <int N, bool kTransposeB = false>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint64_t b, int accumulate) {
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (N == 64) {
    asm volatile(OOMB_WGMMA_RS("m64n64k16", OOMB_LIST_32, "%37", "%32, %33, %34, %35", "%36", "%38")
                 : OOMB_D32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate),
                   "n"(int{kTransposeB}));
  } else if constexpr (N == 128) {
    asm volatile(
        OOMB_WGMMA_RS("m64n128k16", OOMB_LIST_64, "%69", "%64, %65, %66, %67", "%68", "%70")
        : OOMB_D32(d, 0), OOMB_D32(d, 32)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(int{kTransposeB}));
  } else {
    asm volatile(
        OOMB_WGMMA_RS("m64n256k16", OOMB_LIST_128, "%133", "%128, %129, %130, %131", "%132", "%134")
        : OOMB_D32(d, 0), OOMB_D32(d, 32), OOMB_D32(d, 64), OOMB_D32(d, 96)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(int{kTransposeB}));
  }
}

#undef OOMB_WGMMA_RS
#undef OOMB_WGMMA_SS
#undef OOMB_LIST_128
#undef OOMB_LIST_64
#undef OOMB_LIST_32
#undef OOMB_D32
#undef OOMB_D8

}  // namespace oomb::attention::sm90

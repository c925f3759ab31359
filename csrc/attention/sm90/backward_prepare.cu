// What surrounds the backward's main kernel: delta and lse, bounds of query tiles, and dQ's
// conversion. All memory-bound and small beside the main kernel.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ float dot_pairs(uint32_t a, uint32_t b) {
  const float low = __uint_as_float(a << 16) * __uint_as_float(b << 16);
  return fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), low);
}

// One warp per row of [B, Hq, Cp]: delta = rowsum(o * d_o) - d_lse, or what an earlier wave found.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const BackwardParams params, const BackwardWorkspace workspace) {
  const int64_t chunk = params.shape.chunk;
  const int64_t padded = align_up(chunk, kQueryRows);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t batch_head = index / padded;
  const int64_t row = index % padded;
  const int64_t batch = batch_head / params.shape.query_heads;
  const int64_t head = batch_head % params.shape.query_heads;
  if (batch >= params.shape.batch) return;
  if (row >= chunk) {
    if (lane == 0) {
      workspace.lse[index] = INFINITY;
      workspace.delta[index] = 0.0f;
    }
    return;
  }
  const int64_t place = batch_head * chunk + row;
  float* saved = static_cast<float*>(params.delta);
  float delta = 0.0f;
  if (params.first_wave) {
    constexpr int kPairs = kDim / 64;  // 4-byte pairs per lane
    const auto* o = static_cast<const __nv_bfloat16*>(params.o) + batch * params.o_strides.batch +
                    head * params.o_strides.head + row * params.o_strides.token;
    const auto* d_o = static_cast<const __nv_bfloat16*>(params.d_o) +
                      batch * params.do_strides.batch + head * params.do_strides.head +
                      row * params.do_strides.token;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      delta += dot_pairs(reinterpret_cast<const uint32_t*>(o)[lane + 32 * i],
                         reinterpret_cast<const uint32_t*>(d_o)[lane + 32 * i]);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) delta += __shfl_xor_sync(0xffffffff, delta, i);
    if (params.d_lse != nullptr) delta -= static_cast<const float*>(params.d_lse)[place];
    if (lane == 0 && saved != nullptr) saved[place] = delta;
  } else {
    delta = saved[place];
  }
  if (lane == 0) {
    const float lse = static_cast<const float*>(params.lse)[place];
    const bool empty = lse == -INFINITY;  // 2^(s - inf) = 0: the row contributes nothing
    workspace.lse[index] = empty ? INFINITY : lse * 1.4426950408889634f;
    workspace.delta[index] = empty ? 0.0f : delta;
    if (empty) workspace.empty_rows[batch * (padded / kQueryRows) + row / kQueryRows] = 1;
  }
}

// One warp per query tile.
__global__ void __launch_bounds__(32)
    query_tiles_kernel(const __grid_constant__ BackwardKernelArgs args) {
  const BackwardParams& params = args.params;
  const int64_t batch = blockIdx.y;
  const int64_t chunk = params.shape.chunk;
  const int past_tokens = static_cast<int>(params.past.num_tokens);
  int32_t low = INT32_MAX;
  int32_t high = 0;
  for (int i = threadIdx.x; i < kQueryRows; i += 32) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kQueryRows + i;
    if (row >= chunk) continue;
    int64_t first = 0;
    if (params.visibility.first_key != nullptr) {
      first = params.visibility.first_key[batch * chunk + row];
    }
    if (params.visibility.window > 0) {
      first = max(first, params.past.num_tokens + row - params.visibility.window + 1);
    }
    low = min(low, static_cast<int32_t>(first));
    high = max(high, static_cast<int32_t>(first));
  }
  QueryTile tile;
  tile.lower_min = __reduce_min_sync(0xffffffff, low);
  tile.lower_max = __reduce_max_sync(0xffffffff, high);
  const int key_rows = args.tiling.key_rows;
  tile.first_own = max(0, tile.lower_min - past_tokens) / key_rows;
  tile.last_own = static_cast<int>(blockIdx.x) * kQueryRows / key_rows;
  if (params.visibility.num_keys != nullptr) {
    const int own_keys = params.visibility.num_keys[batch] - past_tokens;
    tile.last_own = min(tile.last_own, (own_keys + key_rows - 1) / key_rows - 1);
  }
  tile.first_past = tile.lower_min / key_rows;
  const int own_parts = args.own_tiles > 0 ? max(0, tile.last_own - tile.first_own + 1) : 0;
  tile.past_rank = own_parts - max(args.tiling.tile_begin, tile.first_past);
  const int64_t index = batch * gridDim.x + blockIdx.x;
  tile.empty_rows = args.workspace.empty_rows[index];
  if (threadIdx.x == 0) args.workspace.query_tiles[index] = tile;
}

// dq = bf16(scale * sum), four elements per thread.
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const BackwardParams params, const float* sum) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  const int64_t head_dim = params.shape.head_dim;
  const int64_t chunk = params.shape.chunk;
  const int64_t heads = params.shape.query_heads;
  if (index >= params.shape.batch * heads * chunk * head_dim) return;
  const int64_t column = index % head_dim;
  const int64_t row = index / head_dim % chunk;
  const int64_t head = index / head_dim / chunk % heads;
  const int64_t batch = index / head_dim / chunk / heads;
  const float scale = static_cast<float>(params.scale);
  const float4 value = *reinterpret_cast<const float4*>(sum + index);
  auto* target = static_cast<__nv_bfloat16*>(params.dq) + batch * params.dq_strides.batch +
                 head * params.dq_strides.head + row * params.dq_strides.token + column;
  reinterpret_cast<__nv_bfloat162*>(target)[0] =
      __floats2bfloat162_rn(value.x * scale, value.y * scale);
  reinterpret_cast<__nv_bfloat162*>(target)[1] =
      __floats2bfloat162_rn(value.z * scale, value.w * scale);
}

}  // namespace

void launch_backward_prepare(const BackwardKernelArgs& args) {
  const BackwardParams& params = args.params;
  const BackwardWorkspace& workspace = args.workspace;
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const Shape& shape = params.shape;
  check_cuda(cudaMemsetAsync(reinterpret_cast<char*>(params.workspace) + workspace.zeroed_offset, 0,
                             workspace.zeroed_bytes, stream),
             "cudaMemsetAsync");
  if (params.first_wave && !queries_apart(params)) {
    void* sum = params.dq_acc != nullptr ? params.dq_acc : workspace.dq;
    check_cuda(
        cudaMemsetAsync(
            sum, 0, shape.batch * shape.query_heads * shape.chunk * shape.head_dim * sizeof(float),
            stream),
        "cudaMemsetAsync");
  }
  const int64_t rows = shape.batch * shape.query_heads * align_up(shape.chunk, kQueryRows);
  const auto row_blocks = static_cast<uint32_t>(ceil_div(rows, kWarps));
  if (shape.head_dim == 64) {
    rows_kernel<64><<<row_blocks, kThreads, 0, stream>>>(params, workspace);
  } else if (shape.head_dim == 128) {
    rows_kernel<128><<<row_blocks, kThreads, 0, stream>>>(params, workspace);
  } else {
    rows_kernel<256><<<row_blocks, kThreads, 0, stream>>>(params, workspace);
  }
  const dim3 tiles(static_cast<uint32_t>(ceil_div(shape.chunk, kQueryRows)),
                   static_cast<uint32_t>(shape.batch));
  query_tiles_kernel<<<tiles, 32, 0, stream>>>(args);
  check_launch("attention backward, preparation");
}

void launch_backward_finish(const BackwardParams& params, const BackwardWorkspace& workspace) {
  const Shape& shape = params.shape;
  const int64_t elements = shape.batch * shape.query_heads * shape.chunk * shape.head_dim;
  const float* sum =
      params.dq_acc != nullptr ? static_cast<const float*>(params.dq_acc) : workspace.dq;
  convert_kernel<<<static_cast<uint32_t>(ceil_div(elements, kThreads * 4)), kThreads, 0,
                   static_cast<cudaStream_t>(params.stream)>>>(params, sum);
  check_launch("attention backward, conversion of dq");
}

}  // namespace oomb::attention::sm90

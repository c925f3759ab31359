// What surrounds the backward's main kernel: delta and lse, bounds of query tiles, the readers of
// each key tile, and dQ's conversion. All memory-bound and small beside the main kernel.

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
  tile.first_own = max(0, tile.lower_min - past_tokens) / kKeyRows;
  tile.last_own = static_cast<int>(blockIdx.x) * kQueryRows / kKeyRows;
  if (params.visibility.num_keys != nullptr) {
    const int own_keys = params.visibility.num_keys[batch] - past_tokens;
    tile.last_own = min(tile.last_own, (own_keys + kKeyRows - 1) / kKeyRows - 1);
  }
  tile.first_past = tile.lower_min / kKeyRows;
  const int own_parts = args.own_tiles > 0 ? max(0, tile.last_own - tile.first_own + 1) : 0;
  tile.past_rank = own_parts - max(args.tile_begin, tile.first_past);
  const int64_t index = batch * gridDim.x + blockIdx.x;
  tile.empty_rows = args.workspace.empty_rows[index];
  if (threadIdx.x == 0) args.workspace.query_tiles[index] = tile;
}

// One thread per list entry: sets the query block's bit at the key tile.
__global__ void __launch_bounds__(kThreads)
    readers_kernel(const BackwardParams params, const BackwardWorkspace workspace) {
  const PastPages& past = params.past;
  const int64_t blocks = ceil_div(params.shape.chunk, params.shape.page_size);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= params.shape.batch * blocks * past.selection_heads * past.budget) return;
  const int64_t page = past.selection[index];
  if (page < past.page_begin || page >= past.page_end) return;
  const int64_t row = index / past.budget;
  const int64_t list = row % past.selection_heads;
  const int64_t block = row / past.selection_heads % blocks;
  const int64_t batch = row / past.selection_heads / blocks;
  const int64_t tile = page * params.shape.page_size / kKeyRows -
                       past.page_begin * params.shape.page_size / kKeyRows;
  const int64_t together = workspace.lists_together;
  const int64_t segment = batch * (past.selection_heads / together) + list / together;
  const int64_t entry = segment * workspace.segment_entries + tile * together + list % together;
  atomicOr(workspace.readers + entry * workspace.reader_words + block / 32, 1u << block % 32);
  atomicOr(workspace.halves + entry, params.shape.page_size == kKeyRows ? 3u : 1u << (page & 1));
}

// One block: the entries with readers, in ascending order.
__global__ void __launch_bounds__(1024) active_kernel(const BackwardWorkspace workspace) {
  const int64_t entries = workspace.segments * workspace.segment_entries;
  __shared__ int warp_counts[32];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int64_t begin = 0; begin < entries; begin += 1024) {
    const int64_t entry = begin + threadIdx.x;
    uint32_t any = 0;
    if (entry < entries) {
      for (int64_t i = 0; i < workspace.reader_words; ++i) {
        any |= workspace.readers[entry * workspace.reader_words + i];
      }
    }
    const uint32_t ballot = __ballot_sync(0xffffffff, any != 0);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    __syncthreads();
    int before = total;
    for (int i = 0; i < 32; ++i) {
      if (i < warp) before += warp_counts[i];
      total += warp_counts[i];
    }
    const int place = before + __popc(ballot & ((1u << lane) - 1));
    if (any != 0) workspace.active[place] = static_cast<int32_t>(entry);
    if (entry < entries && entry % workspace.segment_entries == 0) {
      workspace.active_begin[entry / workspace.segment_entries] = place;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) workspace.active_begin[workspace.segments] = total;
}

// The index-th unit of the lists: false past the last one. tile counts the own tiles first.
__device__ bool place_listed(const BackwardKernelArgs& args, int index, Unit& unit, int& head,
                             int& tile) {
  const BackwardWorkspace& workspace = args.workspace;
  const int kv_heads = static_cast<int>(args.params.shape.kv_heads);
  const int lists = static_cast<int>(args.params.past.selection_heads);
  const int lists_together = static_cast<int>(workspace.lists_together);
  const int heads_per_list = kv_heads / lists;
  for (int segment = 0; segment < workspace.segments; ++segment) {
    const int begin = workspace.active_begin[segment];
    const int entries = workspace.active_begin[segment + 1] - begin;
    if (index >= entries * heads_per_list) {
      index -= entries * heads_per_list;
      continue;
    }
    // One list for all heads: the segment once for every group of heads.
    const int heads_together = lists == 1 ? args.heads_together : 1;
    const int group_units = entries * heads_together;
    const int entry = workspace.active[begin + index % group_units / heads_together];
    const int in_segment = entry - segment * static_cast<int>(workspace.segment_entries);
    const int groups = lists / lists_together;
    unit.entry = entry;
    unit.list = segment % groups * lists_together + in_segment % lists_together;
    tile = args.own_tiles + in_segment / lists_together;
    head = segment / groups * kv_heads +
           (lists == 1 ? index / group_units * heads_together + index % heads_together : unit.list);
    return true;
  }
  return false;
}

// The first key of the unit's tile or later that some row sees: what lies before may hold anything.
__device__ int first_seen(const BackwardKernelArgs& args, const Unit& unit) {
  const Visibility& visibility = args.params.visibility;
  if (visibility.first_key == nullptr && visibility.window == 0) return 0;
  const bool listed = !unit.own && args.params.past.selection != nullptr;
  const int tiles_per_block = static_cast<int>(args.params.shape.page_size) / kQueryRows;
  const uint32_t* readers = args.workspace.readers + unit.entry * args.workspace.reader_words;
  int first = INT32_MAX;
  for (int tile = 0; tile < args.query_tiles; ++tile) {
    const int block = tile / tiles_per_block;
    if (listed && !(readers[block / 32] >> block % 32 & 1)) continue;
    first = min(first, args.workspace.query_tiles[unit.batch * args.query_tiles + tile].lower_min);
  }
  return first;
}

// One thread per unit, in the order in which units are handed out.
__global__ void __launch_bounds__(kThreads)
    units_kernel(const __grid_constant__ BackwardKernelArgs args) {
  const Shape& shape = args.params.shape;
  const PastPages& past = args.params.past;
  const int kv_heads = static_cast<int>(shape.kv_heads);
  const int heads = static_cast<int>(shape.batch) * kv_heads;
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (index >= args.workspace.max_units) return;

  Unit unit{};
  int head = 0;  // batch * Hkv + kv head
  int tile = 0;  // own tiles first
  if (past.selection == nullptr) {
    const int units_of_heads =
        (args.own_tiles + args.tile_end - args.tile_begin) * args.heads_together;
    head = index / units_of_heads * args.heads_together + index % args.heads_together;
    tile = index % units_of_heads / args.heads_together;
    if (index == 0) *args.workspace.num_units = static_cast<int>(args.workspace.max_units);
  } else {
    // Own tiles of all heads, then the lists.
    const int own_units = args.own_tiles * heads;
    if (index == 0) {
      int listed = 0;
      if (args.workspace.segments > 0) {
        listed = args.workspace.active_begin[args.workspace.segments] *
                 static_cast<int>(kv_heads / past.selection_heads);
      }
      *args.workspace.num_units = own_units + listed;
    }
    if (index < own_units) {
      head = index % heads;
      tile = index / heads;
    } else if (!place_listed(args, index - own_units, unit, head, tile)) {
      return;
    }
  }
  unit.batch = head / kv_heads;
  unit.kv_head = head % kv_heads;
  if (tile < args.own_tiles) {
    unit.own = 1;
    unit.tile = args.own_tiles - 1 - tile;
    unit.key_begin = static_cast<int>(past.num_tokens) + unit.tile * kKeyRows;
    unit.row_begin = 0;
    unit.row_end = min(kKeyRows, static_cast<int>(shape.chunk) - unit.tile * kKeyRows);
  } else {
    const int page_size = static_cast<int>(shape.page_size);
    const int wave_begin = static_cast<int>(past.page_begin) * page_size;
    const int wave_end =
        min(static_cast<int>(past.page_end) * page_size, static_cast<int>(past.num_tokens));
    unit.own = 0;
    unit.tile = args.tile_begin + tile - args.own_tiles;
    unit.key_begin = unit.tile * kKeyRows;
    unit.row_begin = max(0, wave_begin - unit.key_begin);
    unit.row_end = min(kKeyRows, wave_end - unit.key_begin);
    if (past.selection != nullptr) {
      // A page of 64 that nobody lists is neither read nor given a gradient: it may be elsewhere.
      const uint32_t halves = args.workspace.halves[unit.entry];
      if (halves == 1) unit.row_end = min(unit.row_end, kKeyRows / 2);
      if (halves == 2) unit.row_begin = max(unit.row_begin, kKeyRows / 2);
    }
  }
  const int seen = first_seen(args, unit);
  if (seen > unit.key_begin) unit.row_begin = max(unit.row_begin, seen - unit.key_begin);
  if (args.params.visibility.num_keys != nullptr) {
    unit.row_end = min(unit.row_end, args.params.visibility.num_keys[unit.batch] - unit.key_begin);
  }
  args.workspace.units[index] = unit;
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
  const PastPages& past = params.past;
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
  } else {
    rows_kernel<128><<<row_blocks, kThreads, 0, stream>>>(params, workspace);
  }
  const dim3 tiles(static_cast<uint32_t>(ceil_div(shape.chunk, kQueryRows)),
                   static_cast<uint32_t>(shape.batch));
  query_tiles_kernel<<<tiles, 32, 0, stream>>>(args);
  if (workspace.readers != nullptr) {
    const int64_t listed =
        shape.batch * ceil_div(shape.chunk, shape.page_size) * past.selection_heads * past.budget;
    if (listed > 0) {
      readers_kernel<<<static_cast<uint32_t>(ceil_div(listed, kThreads)), kThreads, 0, stream>>>(
          params, workspace);
    }
    active_kernel<<<1, 1024, 0, stream>>>(workspace);
  }
  if (workspace.max_units > 0) {
    units_kernel<<<static_cast<uint32_t>(ceil_div(workspace.max_units, kThreads)), kThreads, 0,
                   stream>>>(args);
  }
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

// The units of the backward's main kernel, in the order in which they are handed out.

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::sm90 {
namespace {

constexpr int kThreads = 256;

// One thread per list entry: sets the query block's bit at the page's key tiles.
__global__ void __launch_bounds__(kThreads)
    readers_kernel(const __grid_constant__ BackwardKernelArgs args) {
  const Shape& shape = args.params.shape;
  const PastPages& past = args.params.past;
  const BackwardWorkspace& workspace = args.workspace;
  const int64_t blocks = ceil_div(shape.chunk, shape.page_size);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= shape.batch * blocks * past.selection_heads * past.budget) return;
  const int64_t page = past.selection[index];
  if (page < past.page_begin || page >= past.page_end) return;
  const int64_t row = index / past.budget;
  const int64_t list = row % past.selection_heads;
  const int64_t block = row / past.selection_heads % blocks;
  const int64_t batch = row / past.selection_heads / blocks;
  const int64_t tiles = shape.page_size / args.tiling.key_rows;  // of a page
  const int64_t entry = (batch * past.selection_heads + list) * workspace.list_tiles +
                        (page - past.page_begin) * tiles;
  for (int64_t i = 0; i < tiles; ++i) {
    atomicOr(workspace.readers + (entry + i) * workspace.reader_words + block / 32,
             1u << block % 32);
  }
}

// The class of a tile by its number of readers; -1: nobody reads it.
__device__ int reader_class(const BackwardWorkspace& workspace, int64_t entry) {
  int readers = 0;
  for (int64_t i = 0; i < workspace.reader_words; ++i) {
    readers += __popc(workspace.readers[entry * workspace.reader_words + i]);
  }
  return min(31 - __clz(readers), kReaderClasses - 1);
}

// One block: sorts the tiles with readers of each list into classes. The order in a class is
// whatever comes about; it changes no sum.
__global__ void __launch_bounds__(1024)
    active_kernel(const __grid_constant__ BackwardKernelArgs args) {
  const BackwardWorkspace& workspace = args.workspace;
  const int64_t lists = args.params.shape.batch * args.params.past.selection_heads;
  const int64_t tiles = workspace.list_tiles;
  __shared__ int next[kReaderClasses];  // counts, then the next place of a class
  int total = 0;
  for (int64_t list = 0; list < lists; ++list) {
    if (threadIdx.x < kReaderClasses) next[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t tile = threadIdx.x; tile < tiles; tile += 1024) {
      const int found = reader_class(workspace, list * tiles + tile);
      if (found >= 0) atomicAdd(&next[found], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kReaderClasses; ++i) {
        const int count = next[i];
        workspace.active_begin[list * kReaderClasses + i] = next[i] = total;
        total += count;
      }
    }
    __syncthreads();
    for (int64_t tile = threadIdx.x; tile < tiles; tile += 1024) {
      const int found = reader_class(workspace, list * tiles + tile);
      if (found >= 0) workspace.active[atomicAdd(&next[found], 1)] = static_cast<int32_t>(tile);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) workspace.active_begin[lists * kReaderClasses] = total;
}

// Where a unit lies.
struct Place {
  int head;        // batch * Hkv + kv head
  int tile;        // own tiles first, the last one foremost
  int stripe = 0;  // of a past tile; behind all stripes: the closing blocks
  int entry = 0;   // of a listed tile's readers
};

// Every tile, head by head (or a few that alternate), and stripe by stripe in a head; then the past
// tiles again for the closing blocks, all heads in turn.
__device__ Place place_dense(const BackwardKernelArgs& args, int index, int heads) {
  const int past_tiles = args.tiling.past_tiles;
  const int of_head = args.own_tiles + past_tiles * args.tiling.stripes;
  if (index >= of_head * heads) {
    index -= of_head * heads;
    return {.head = index % heads,
            .tile = args.own_tiles + index / heads,
            .stripe = args.tiling.stripes};
  }
  const int units = of_head * args.heads_together;
  const int tile = index % units / args.heads_together;
  const int stripe = tile < args.own_tiles ? 0 : (tile - args.own_tiles) / past_tiles;
  return {.head = index / units * args.heads_together + index % args.heads_together,
          .tile = tile - stripe * past_tiles,
          .stripe = stripe};
}

__device__ int num_listed(const BackwardKernelArgs& args) {
  const Shape& shape = args.params.shape;
  const int64_t lists = args.params.past.selection_heads;
  if (args.workspace.readers == nullptr) return 0;
  return args.workspace.active_begin[shape.batch * lists * kReaderClasses] *
         static_cast<int>(shape.kv_heads / lists);
}

// The index-th listed tile: the class with the most readers first, in a class head by head.
__device__ Place place_listed(const BackwardKernelArgs& args, int index) {
  const BackwardWorkspace& workspace = args.workspace;
  const int kv_heads = static_cast<int>(args.params.shape.kv_heads);
  const int lists = static_cast<int>(args.params.past.selection_heads);
  const int heads = static_cast<int>(args.params.shape.batch) * kv_heads;
  for (int place = 0;; ++place) {
    const int head = place % heads;
    const int list = head / (kv_heads / lists);  // of all sequences
    const int of_class = (list + 1) * kReaderClasses - 1 - place / heads;
    const int begin = workspace.active_begin[of_class];
    const int count = workspace.active_begin[of_class + 1] - begin;
    if (index < count) {
      const int tile = workspace.active[begin + index];
      return {.head = head,
              .tile = args.own_tiles + tile,
              .entry = list * static_cast<int>(workspace.list_tiles) + tile};
    }
    index -= count;
  }
}

// The first key that some row of the unit's query blocks sees: what lies before may hold anything.
__device__ int first_seen(const BackwardKernelArgs& args, const Unit& unit) {
  const Visibility& visibility = args.params.visibility;
  if (visibility.first_key == nullptr && visibility.window == 0) return 0;
  const bool listed = !unit.own && args.params.past.selection != nullptr;
  const int tiles_per_block = args.tiling.block_rows / kQueryRows;
  const uint32_t* readers = args.workspace.readers + unit.entry * args.workspace.reader_words;
  const QueryTile* tiles = args.workspace.query_tiles + unit.batch * args.query_tiles;
  const int end = min(unit.block_end * tiles_per_block, args.query_tiles);
  int first = INT32_MAX;
  int tile = unit.block_begin * tiles_per_block;
  if (unit.own) tile = unit.tile * args.tiling.key_rows / kQueryRows;
  for (; tile < end; ++tile) {
    const int block = tile / tiles_per_block;
    if (listed && !(readers[block / 32] >> block % 32 & 1)) continue;
    first = min(first, tiles[tile].lower_min);
  }
  return first;
}

// One thread per unit.
__global__ void __launch_bounds__(kThreads)
    units_kernel(const __grid_constant__ BackwardKernelArgs args) {
  const Shape& shape = args.params.shape;
  const PastPages& past = args.params.past;
  const int kv_heads = static_cast<int>(shape.kv_heads);
  const int heads = static_cast<int>(shape.batch) * kv_heads;
  const int key_rows = args.tiling.key_rows;
  const int block_rows = args.tiling.block_rows;
  const int blocks = (static_cast<int>(shape.chunk) + block_rows - 1) / block_rows;
  const bool listed = past.selection != nullptr;
  const int own_units = args.own_tiles * heads;  // with lists these come first
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (index >= args.workspace.max_units) return;
  const int units =
      listed ? own_units + num_listed(args) : static_cast<int>(args.workspace.max_units);
  if (index == 0) *args.workspace.num_units = units;
  if (index >= units) return;

  Place place;
  if (!listed) {
    place = place_dense(args, index, heads);
  } else if (index < own_units) {
    place = {.head = index / args.own_tiles, .tile = args.own_tiles - 1 - index % args.own_tiles};
  } else {
    place = place_listed(args, index - own_units);
  }
  Unit unit;
  unit.batch = place.head / kv_heads;
  unit.kv_head = place.head % kv_heads;
  unit.entry = place.entry;
  if (place.tile < args.own_tiles) {
    unit.own = 1;
    unit.tile = args.own_tiles - 1 - place.tile;
    unit.block_begin = unit.tile * key_rows / block_rows;
    unit.block_end = blocks;
    unit.key_begin = static_cast<int>(past.num_tokens) + unit.tile * key_rows;
    unit.row_begin = 0;
    unit.row_end = min(key_rows, static_cast<int>(shape.chunk) - unit.tile * key_rows);
  } else {
    const int page_size = static_cast<int>(shape.page_size);
    const int wave_begin = static_cast<int>(past.page_begin) * page_size;
    const int wave_end =
        min(static_cast<int>(past.page_end) * page_size, static_cast<int>(past.num_tokens));
    unit.own = 0;
    unit.tile = args.tiling.tile_begin + place.tile - args.own_tiles;
    const int opening = blocks - args.tiling.closing_blocks;
    const bool closes = place.stripe == args.tiling.stripes;
    unit.block_begin = closes ? opening : place.stripe * args.tiling.stripe_blocks;
    unit.block_end = closes ? blocks : min(opening, unit.block_begin + args.tiling.stripe_blocks);
    unit.key_begin = unit.tile * key_rows;
    unit.row_begin = max(0, wave_begin - unit.key_begin);
    unit.row_end = min(key_rows, wave_end - unit.key_begin);
  }
  const int seen = first_seen(args, unit);
  if (seen > unit.key_begin) unit.row_begin = max(unit.row_begin, seen - unit.key_begin);
  if (args.params.visibility.num_keys != nullptr) {
    unit.row_end = min(unit.row_end, args.params.visibility.num_keys[unit.batch] - unit.key_begin);
  }
  args.workspace.units[index] = unit;
}

}  // namespace

void launch_backward_units(const BackwardKernelArgs& args) {
  const Shape& shape = args.params.shape;
  const PastPages& past = args.params.past;
  const auto stream = static_cast<cudaStream_t>(args.params.stream);
  if (args.workspace.readers != nullptr) {
    const int64_t listed =
        shape.batch * ceil_div(shape.chunk, shape.page_size) * past.selection_heads * past.budget;
    if (listed > 0) {
      readers_kernel<<<static_cast<uint32_t>(ceil_div(listed, kThreads)), kThreads, 0, stream>>>(
          args);
    }
    active_kernel<<<1, 1024, 0, stream>>>(args);
  }
  if (args.workspace.max_units > 0) {
    units_kernel<<<static_cast<uint32_t>(ceil_div(args.workspace.max_units, kThreads)), kThreads, 0,
                   stream>>>(args);
  }
  check_launch("attention backward, units");
}

}  // namespace oomb::attention::sm90

// Forward: online softmax over tiles of keys, own chunk first, then pages in ascending order.

#include "attention/device/visibility.cuh"
#include "attention/plain/config.cuh"
#include "attention/plain/plain.h"

namespace oomb::attention::plain {
namespace {

using device::KeyRange;

// One query tile of one head: everything that is carried from key tile to key tile.
template <typename C>
struct Softmax {
  using A = typename C::A;
  using T = typename C::Element;

  A acc[C::kRows][C::kColumns];
  A highest[C::kRows], total[C::kRows];
  KeyRange keys[C::kRows];
  A* queries;        // shared, [kTile, D + 1]
  A* tile;           // shared, keys and then values
  A* probabilities;  // shared, [kTile, kTile + 1]
  A scale, cap;
  int head_dim;

  // Key tile: `count` keys from key number `first` on.
  __device__ void add(const T* k, const T* v, int64_t k_stride, int64_t v_stride, int first,
                      int count) {
    const int x = threadIdx.x % C::kWidth, y = threadIdx.x / C::kWidth;
    __syncthreads();
    load_tile<C>(tile, k, k_stride, count, head_dim);
    __syncthreads();
    A scores[C::kRows][C::kRows];
    multiply_tiles<C>(scores, queries, tile, head_dim);
    A factor[C::kRows];
    for (int i = 0; i < C::kRows; ++i) {
      A top = highest[i];
      for (int j = 0; j < C::kRows; ++j) {
        const int column = x + j * C::kWidth;
        const bool seen =
            column < count && first + column >= keys[i].begin && first + column < keys[i].end;
        scores[i][j] = seen ? capped(scores[i][j] * scale, cap) : device::minus_infinity<A>();
        top = max(top, scores[i][j]);
      }
      for (int step = C::kWidth / 2; step > 0; step /= 2) {
        top = max(top, __shfl_xor_sync(0xffffffffu, top, step));
      }
      const bool none = top == device::minus_infinity<A>();
      factor[i] = none ? A(1) : exp(highest[i] - top);
      A sum = 0;
      for (int j = 0; j < C::kRows; ++j) {
        const A p = none ? A(0) : exp(scores[i][j] - top);
        probabilities[(y + i * C::kWidth) * (C::kTile + 1) + x + j * C::kWidth] = p;
        sum += p;
      }
      for (int step = C::kWidth / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
      }
      total[i] = total[i] * factor[i] + sum;
      highest[i] = top;
    }
    __syncthreads();
    load_tile<C>(tile, v, v_stride, count, head_dim);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      if (d >= head_dim) break;
#pragma unroll
      for (int i = 0; i < C::kRows; ++i) acc[i][c] *= factor[i];
      for (int key = 0; key < C::kTile; ++key) {
        const A value = tile[key * (head_dim + 1) + d];
#pragma unroll
        for (int i = 0; i < C::kRows; ++i) {
          acc[i][c] += probabilities[(y + i * C::kWidth) * (C::kTile + 1) + key] * value;
        }
      }
    }
  }
};

// Grid: (query tiles, query heads, batch).
template <typename C>
__global__ void __launch_bounds__(C::kThreads) forward_kernel(const ForwardParams p) {
  using A = typename C::A;
  using T = typename C::Element;
  extern __shared__ __align__(16) char shared[];

  const int64_t batch = blockIdx.z, head = blockIdx.y;
  const int64_t kv_head = head / (p.shape.query_heads / p.shape.kv_heads);
  const int head_dim = static_cast<int>(p.shape.head_dim);
  const int page_size = static_cast<int>(p.shape.page_size);
  const int num_past = static_cast<int>(p.past.num_tokens);
  const int x = threadIdx.x % C::kWidth, y = threadIdx.x / C::kWidth;
  const QueryTiles tiles(p.shape, p.past, C::kTile);
  const QueryTile query(tiles, p.shape, C::kTile, blockIdx.x);
  if (query.rows == 0) return;

  Softmax<C> softmax;
  softmax.queries = reinterpret_cast<A*>(shared);
  softmax.tile = softmax.queries + C::kTile * (head_dim + 1);
  softmax.probabilities = softmax.tile + C::kTile * (head_dim + 1);
  softmax.scale = static_cast<A>(p.scale);
  softmax.cap = static_cast<A>(p.cap);
  softmax.head_dim = head_dim;
  load_tile<C>(softmax.queries,
               static_cast<const T*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head +
                   query.first * p.q_strides.token,
               p.q_strides.token, query.rows, head_dim);

  const int64_t first_row = (batch * p.shape.query_heads + head) * p.shape.chunk + query.first;
  A* state_acc = static_cast<A*>(p.state.acc);
  A* state_max = static_cast<A*>(p.state.max);
  A* state_sum = static_cast<A*>(p.state.sum);
  for (int i = 0; i < C::kRows; ++i) {
    const int row = y + i * C::kWidth;
    const bool inside = row < query.rows;
    softmax.keys[i] =
        inside ? device::visible_keys(p.shape, p.visibility, num_past, batch, query.first + row)
               : KeyRange{};
    const bool resume = inside && !p.first_wave;
    softmax.highest[i] = resume ? state_max[first_row + row] : device::minus_infinity<A>();
    softmax.total[i] = resume ? state_sum[first_row + row] : A(0);
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      softmax.acc[i][c] =
          resume && d < head_dim ? state_acc[(first_row + row) * head_dim + d] : A(0);
    }
  }
  int first_visible = INT32_MAX;  // over the tile's rows
  for (int row = 0; row < query.rows; ++row) {
    const KeyRange keys =
        device::visible_keys(p.shape, p.visibility, num_past, batch, query.first + row);
    first_visible = min(first_visible, keys.begin);
  }

  if (p.own_chunk) {
    const T* k =
        static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head;
    const T* v =
        static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head;
    const int end = own_key_end(p.visibility, num_past, batch, query);
    for (int key = 0; key < end; key += C::kTile) {
      const int count = min(C::kTile, end - key);
      if (num_past + key + count <= first_visible) continue;
      softmax.add(k + key * p.k_strides.token, v + key * p.v_strides.token, p.k_strides.token,
                  p.v_strides.token, num_past + key, count);
    }
  }

  const int past_end = device::visible_past(p.visibility, num_past, batch);
  const int32_t* list = device::page_list(p.past, tiles.blocks, batch, query.block, kv_head);
  const int64_t page_elements = int64_t{page_size} * head_dim;
  const auto add_page = [&](int64_t page) {
    const int64_t begin = page * page_size;
    if (begin + page_size <= first_visible || begin >= past_end) return;
    const T* k = device::keys_of_page<T>(p.past, batch, page) + kv_head * page_elements;
    const T* v = k + p.shape.kv_heads * page_elements;
    for (int key = 0; key < page_size; key += C::kTile) {
      const int first = static_cast<int>(begin) + key;
      const int count = min(min(C::kTile, page_size - key), past_end - first);
      if (count <= 0 || first + count <= first_visible) continue;
      softmax.add(k + int64_t{key} * head_dim, v + int64_t{key} * head_dim, head_dim, head_dim,
                  first, count);
    }
  };
  if (list != nullptr) {
    const int budget = static_cast<int>(p.past.budget);
    for (int i = device::lower_bound(list, budget, p.past.page_begin); i < budget; ++i) {
      if (list[i] < 0 || list[i] >= p.past.page_end) break;
      add_page(list[i]);
    }
  } else {
    for (int64_t page = p.past.page_begin; page < p.past.page_end; ++page) add_page(page);
  }

  T* o = static_cast<T*>(p.o) + batch * p.o_strides.batch + head * p.o_strides.head +
         query.first * p.o_strides.token;
  for (int i = 0; i < C::kRows; ++i) {
    const int row = y + i * C::kWidth;
    if (row >= query.rows) continue;
    const A total = softmax.total[i];
    const A inverse = total > 0 ? A(1) / total : A(0);
    if (x == 0 && p.last_wave) {
      static_cast<A*>(p.lse)[first_row + row] =
          total > 0 ? softmax.highest[i] + log(total) : device::minus_infinity<A>();
    }
    if (x == 0 && !p.last_wave) {
      state_max[first_row + row] = softmax.highest[i];
      state_sum[first_row + row] = total;
    }
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      if (d >= head_dim) break;
      if (p.last_wave) {
        o[row * p.o_strides.token + d] = device::store<T>(softmax.acc[i][c] * inverse);
      } else {
        state_acc[(first_row + row) * head_dim + d] = softmax.acc[i][c];
      }
    }
  }
}

}  // namespace

void forward(const ForwardParams& params) {
  if (params.shape.batch == 0 || params.shape.chunk == 0) return;
  with_config(params.dtype, params.shape.head_dim, [&](auto config) {
    using C = decltype(config);
    const QueryTiles tiles(params.shape, params.past, C::kTile);
    const int64_t bytes =
        C::kTile * (2 * (params.shape.head_dim + 1) + C::kTile + 1) * sizeof(typename C::A);
    allow_shared_memory(forward_kernel<C>, bytes);
    const dim3 grid(tiles.count(), params.shape.query_heads, params.shape.batch);
    forward_kernel<C>
        <<<grid, C::kThreads, bytes, static_cast<cudaStream_t>(params.stream)>>>(params);
  });
  check_launch("attention_forward (plain)");
}

}  // namespace oomb::attention::plain

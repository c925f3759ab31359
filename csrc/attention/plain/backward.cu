// Backward in two passes without atomics: one block per tile of queries for dQ, and one per tile of
// keys for dK and dV, which loops over the heads of the group, so that every gradient has one
// writer.

#include "attention/device/delta.cuh"
#include "attention/device/gradient_page.cuh"
#include "attention/device/visibility.cuh"
#include "attention/plain/config.cuh"
#include "attention/plain/plain.h"

namespace oomb::attention::plain {
namespace {

using device::KeyRange;

// Four [kTile, D + 1] tiles and the tile products p and ds.
template <typename C>
struct Shared {
  using A = typename C::A;
  A *q, *d_o, *k, *v, *p, *ds;

  __device__ Shared(char* memory, int head_dim) {
    const int tile = C::kTile * (head_dim + 1);
    q = reinterpret_cast<A*>(memory);
    d_o = q + tile;
    k = d_o + tile;
    v = k + tile;
    p = v + tile;
    ds = p + C::kTile * (C::kTile + 1);
  }
  static int64_t bytes(int64_t head_dim) {
    return C::kTile * (4 * (head_dim + 1) + 2 * (C::kTile + 1)) * sizeof(A);
  }
};

// One head's rows as the backward reads them.
template <typename C>
struct Head {
  using A = typename C::A;
  using T = typename C::Element;
  const T *q, *d_o;
  const A *lse, *delta;
  int64_t first_row;  // of this head in the [B, Hq, C] arrays

  __device__ Head(const BackwardParams& p, int64_t batch, int64_t head) {
    first_row = (batch * p.shape.query_heads + head) * p.shape.chunk;
    q = static_cast<const T*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
    d_o = static_cast<const T*>(p.d_o) + batch * p.do_strides.batch + head * p.do_strides.head;
    lse = static_cast<const A*>(p.lse) + first_row;
    delta = static_cast<const A*>(p.delta) + first_row;
  }

  __device__ void load(const Shared<C>& shared, const BackwardParams& p, const QueryTile& query) {
    const int head_dim = static_cast<int>(p.shape.head_dim);
    load_tile<C>(shared.q, q + query.first * p.q_strides.token, p.q_strides.token, query.rows,
                 head_dim);
    load_tile<C>(shared.d_o, d_o + query.first * p.do_strides.token, p.do_strides.token, query.rows,
                 head_dim);
  }
};

// Fills shared.p and shared.ds of one tile of queries and keys, all four tiles being loaded.
template <typename C>
__device__ void probabilities(const Shared<C>& shared, const BackwardParams& p, const Head<C>& head,
                              const QueryTile& query, int64_t batch, int first_key, int count) {
  using A = typename C::A;
  const int x = threadIdx.x % C::kWidth, y = threadIdx.x / C::kWidth;
  const int head_dim = static_cast<int>(p.shape.head_dim);
  const A scale = static_cast<A>(p.scale), cap = static_cast<A>(p.cap);
  A s[C::kRows][C::kRows], dp[C::kRows][C::kRows];
  multiply_tiles<C>(s, shared.q, shared.k, head_dim);
  multiply_tiles<C>(dp, shared.d_o, shared.v, head_dim);
  for (int i = 0; i < C::kRows; ++i) {
    const int row = y + i * C::kWidth;
    const bool inside = row < query.rows;
    const KeyRange keys =
        inside ? device::visible_keys(p.shape, p.visibility, static_cast<int>(p.past.num_tokens),
                                      batch, query.first + row)
               : KeyRange{};
    const A lse = inside ? head.lse[query.first + row] : A(0);
    const A delta = inside ? head.delta[query.first + row] : A(0);
    for (int j = 0; j < C::kRows; ++j) {
      const int column = x + j * C::kWidth;
      const int key = first_key + column;
      const bool seen = column < count && key >= keys.begin && key < keys.end &&
                        lse > device::minus_infinity<A>();
      const A score = capped(s[i][j] * scale, cap);
      const A part = cap > A(0) ? score / cap : A(0);
      const A probability = seen ? exp(score - lse) : A(0);
      shared.p[row * (C::kTile + 1) + column] = probability;
      shared.ds[row * (C::kTile + 1) + column] =
          seen ? probability * (dp[i][j] - delta) * (A(1) - part * part) : A(0);
    }
  }
}

// Grid: (query tiles, query heads, batch).
template <typename C>
__global__ void __launch_bounds__(C::kThreads) dq_kernel(const BackwardParams p) {
  using A = typename C::A;
  using T = typename C::Element;
  extern __shared__ __align__(16) char memory[];

  const int64_t batch = blockIdx.z;
  const int64_t kv_head = blockIdx.y / (p.shape.query_heads / p.shape.kv_heads);
  const int head_dim = static_cast<int>(p.shape.head_dim);
  const int page_size = static_cast<int>(p.shape.page_size);
  const int num_past = static_cast<int>(p.past.num_tokens);
  const int x = threadIdx.x % C::kWidth, y = threadIdx.x / C::kWidth;
  const Shared<C> shared(memory, head_dim);
  const QueryTiles tiles(p.shape, p.past, C::kTile);
  const QueryTile query(tiles, p.shape, C::kTile, blockIdx.x);
  if (query.rows == 0) return;
  Head<C> head(p, batch, blockIdx.y);
  head.load(shared, p, query);

  A* carried = static_cast<A*>(p.dq_acc);
  A dq[C::kRows][C::kColumns];
  for (int i = 0; i < C::kRows; ++i) {
    const int row = y + i * C::kWidth;
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      const bool resume = !p.first_wave && row < query.rows && d < head_dim;
      dq[i][c] = resume ? carried[(head.first_row + query.first + row) * head_dim + d] : A(0);
    }
  }
  int first_visible = INT32_MAX;
  for (int row = 0; row < query.rows; ++row) {
    const KeyRange keys =
        device::visible_keys(p.shape, p.visibility, num_past, batch, query.first + row);
    first_visible = min(first_visible, keys.begin);
  }

  const auto add = [&](const T* k, const T* v, int64_t k_stride, int64_t v_stride, int first,
                       int count) {
    if (count <= 0 || first + count <= first_visible) return;
    __syncthreads();
    load_tile<C>(shared.k, k, k_stride, count, head_dim);
    load_tile<C>(shared.v, v, v_stride, count, head_dim);
    __syncthreads();
    probabilities<C>(shared, p, head, query, batch, first, count);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      if (d >= head_dim) break;
      for (int key = 0; key < C::kTile; ++key) {
        const A value = shared.k[key * (head_dim + 1) + d];
#pragma unroll
        for (int i = 0; i < C::kRows; ++i) {
          dq[i][c] += shared.ds[(y + i * C::kWidth) * (C::kTile + 1) + key] * value;
        }
      }
    }
  };

  if (p.own_chunk) {
    const T* k =
        static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head;
    const T* v =
        static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head;
    const int end = own_key_end(p.visibility, num_past, batch, query);
    for (int key = 0; key < end; key += C::kTile) {
      add(k + key * p.k_strides.token, v + key * p.v_strides.token, p.k_strides.token,
          p.v_strides.token, num_past + key, min(C::kTile, end - key));
    }
  }
  const int past_end = device::visible_past(p.visibility, num_past, batch);
  const int64_t page_elements = int64_t{page_size} * head_dim;
  const auto add_page = [&](int64_t page) {
    const int64_t begin = page * page_size;
    if (begin + page_size <= first_visible || begin >= past_end) return;
    const T* k = device::keys_of_page<T>(p.past, batch, page) + kv_head * page_elements;
    const T* v = k + p.shape.kv_heads * page_elements;
    for (int key = 0; key < page_size; key += C::kTile) {
      const int first = static_cast<int>(begin) + key;
      add(k + int64_t{key} * head_dim, v + int64_t{key} * head_dim, head_dim, head_dim, first,
          min(min(C::kTile, page_size - key), past_end - first));
    }
  };
  const int32_t* list = device::page_list(p.past, tiles.blocks, batch, query.block, kv_head);
  if (list != nullptr) {
    const int budget = static_cast<int>(p.past.budget);
    for (int i = device::lower_bound(list, budget, p.past.page_begin); i < budget; ++i) {
      if (list[i] < 0 || list[i] >= p.past.page_end) break;
      add_page(list[i]);
    }
  } else {
    for (int64_t page = p.past.page_begin; page < p.past.page_end; ++page) add_page(page);
  }

  T* out = static_cast<T*>(p.dq) + batch * p.dq_strides.batch + blockIdx.y * p.dq_strides.head +
           query.first * p.dq_strides.token;
  const A scale = static_cast<A>(p.scale);
  for (int i = 0; i < C::kRows; ++i) {
    const int row = y + i * C::kWidth;
    if (row >= query.rows) continue;
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      if (d >= head_dim) break;
      if (p.last_wave) {
        out[row * p.dq_strides.token + d] = device::store<T>(dq[i][c] * scale);
      } else {
        carried[(head.first_row + query.first + row) * head_dim + d] = dq[i][c];
      }
    }
  }
}

// Grid: (tiles of keys, kv heads, batch). kOwn: the chunk's own keys; else the wave's pages.
template <typename C, bool kOwn>
__global__ void __launch_bounds__(C::kThreads) dkv_kernel(const BackwardParams p) {
  using A = typename C::A;
  using T = typename C::Element;
  extern __shared__ __align__(16) char memory[];

  const int64_t batch = blockIdx.z, kv_head = blockIdx.y;
  const int head_dim = static_cast<int>(p.shape.head_dim);
  const int page_size = static_cast<int>(p.shape.page_size);
  const int num_past = static_cast<int>(p.past.num_tokens);
  const int x = threadIdx.x % C::kWidth, y = threadIdx.x / C::kWidth;
  const Shared<C> shared(memory, head_dim);
  const QueryTiles tiles(p.shape, p.past, C::kTile);

  int64_t page = 0;
  int first = 0, count = 0;  // keys of the tile, numbered as in the sequence
  int row0 = 0;              // its first row in the chunk or in the page
  const T *k = nullptr, *v = nullptr;
  int64_t k_stride = head_dim, v_stride = head_dim;
  if (kOwn) {
    row0 = blockIdx.x * C::kTile;
    first = num_past + row0;
    count = static_cast<int>(min(int64_t{C::kTile}, p.shape.chunk - row0));
    if (p.visibility.num_keys != nullptr) {
      count = max(0, min(count, p.visibility.num_keys[batch] - first));
    }
    k_stride = p.k_strides.token;
    v_stride = p.v_strides.token;
    k = static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head +
        row0 * k_stride;
    v = static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head +
        row0 * v_stride;
  } else {
    const int64_t parts = ceil_div(page_size, C::kTile);
    page = p.past.page_begin + blockIdx.x / parts;
    row0 = static_cast<int>(blockIdx.x % parts) * C::kTile;
    first = static_cast<int>(page * page_size) + row0;
    count = min(min(C::kTile, page_size - row0),
                device::visible_past(p.visibility, num_past, batch) - first);
    if (count <= 0) return;
  }
  const device::GradientPage dk_page(p.grads, p.past.table_stride, batch, page, 0);
  const device::GradientPage dv_page(p.grads, p.past.table_stride, batch, page, 1);
  if (!kOwn && dk_page.data == nullptr && dv_page.data == nullptr) return;

  A dk[C::kRows][C::kColumns] = {}, dv[C::kRows][C::kColumns] = {};
  bool loaded = false;
  for (int64_t tile = 0; tile < tiles.count(); ++tile) {
    const QueryTile query(tiles, p.shape, C::kTile, tile);
    if (query.rows == 0) continue;
    if (kOwn && query.first + query.rows <= row0) continue;
    if (!kOwn) {
      const int32_t* list = device::page_list(p.past, tiles.blocks, batch, query.block, kv_head);
      if (list != nullptr) {
        const int budget = static_cast<int>(p.past.budget);
        const int place = device::lower_bound(list, budget, page);
        if (place == budget || list[place] != page) continue;
      }
    }
    int first_visible = INT32_MAX;
    for (int row = 0; row < query.rows; ++row) {
      const KeyRange keys =
          device::visible_keys(p.shape, p.visibility, num_past, batch, query.first + row);
      first_visible = min(first_visible, keys.begin);
    }
    if (first + count <= first_visible) continue;
    if (!loaded) {
      if (!kOwn) {
        k = device::keys_of_page<T>(p.past, batch, page) +
            (kv_head * page_size + row0) * int64_t{head_dim};
        v = k + p.shape.kv_heads * page_size * int64_t{head_dim};
      }
      load_tile<C>(shared.k, k, k_stride, count, head_dim);
      load_tile<C>(shared.v, v, v_stride, count, head_dim);
      loaded = true;
    }
    const int64_t group = p.shape.query_heads / p.shape.kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      Head<C> head(p, batch, h);
      __syncthreads();
      head.load(shared, p, query);
      __syncthreads();
      probabilities<C>(shared, p, head, query, batch, first, count);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < C::kColumns; ++c) {
        const int d = x + c * C::kWidth;
        if (d >= head_dim) break;
        for (int row = 0; row < C::kTile; ++row) {
          const A d_o = shared.d_o[row * (head_dim + 1) + d];
          const A q = shared.q[row * (head_dim + 1) + d];
#pragma unroll
          for (int i = 0; i < C::kRows; ++i) {
            const int key = y + i * C::kWidth;
            dv[i][c] += shared.p[row * (C::kTile + 1) + key] * d_o;
            dk[i][c] += shared.ds[row * (C::kTile + 1) + key] * q;
          }
        }
      }
    }
  }

  if (!kOwn && !loaded) return;
  const A scale = static_cast<A>(p.scale);
  for (int i = 0; i < C::kRows; ++i) {
    const int key = y + i * C::kWidth;
    if (kOwn ? row0 + key >= p.shape.chunk : key >= count) continue;
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      const int d = x + c * C::kWidth;
      if (d >= head_dim) break;
      if (kOwn) {
        const int64_t row = row0 + key;
        static_cast<T*>(p.dk)[batch * p.dk_strides.batch + kv_head * p.dk_strides.head +
                              row * p.dk_strides.token + d] = device::store<T>(dk[i][c] * scale);
        static_cast<T*>(p.dv)[batch * p.dv_strides.batch + kv_head * p.dv_strides.head +
                              row * p.dv_strides.token + d] = device::store<T>(dv[i][c]);
      } else {
        const int64_t element = (kv_head * page_size + row0 + key) * int64_t{head_dim} + d;
        if (dk_page.data != nullptr) dk_page.add(element, dk[i][c] * scale);
        if (dv_page.data != nullptr) dv_page.add(element, dv[i][c]);
      }
    }
  }
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardParams&) { return 0; }

void backward(const BackwardParams& params) {
  const Shape& shape = params.shape;
  if (shape.batch == 0 || shape.chunk == 0) return;
  const auto stream = static_cast<cudaStream_t>(params.stream);
  with_config(params.dtype, shape.head_dim, [&](auto config) {
    using C = decltype(config);
    if (params.first_wave) device::compute_delta<typename C::Element>(params);

    const QueryTiles tiles(shape, params.past, C::kTile);
    const int64_t bytes = Shared<C>::bytes(shape.head_dim);
    allow_shared_memory(dq_kernel<C>, bytes);
    const dim3 query_grid(tiles.count(), shape.query_heads, shape.batch);
    dq_kernel<C><<<query_grid, C::kThreads, bytes, stream>>>(params);
    check_launch("attention_backward dQ (plain)");

    if (params.own_chunk) {
      allow_shared_memory(dkv_kernel<C, true>, bytes);
      const dim3 own_grid(ceil_div(shape.chunk, C::kTile), shape.kv_heads, shape.batch);
      dkv_kernel<C, true><<<own_grid, C::kThreads, bytes, stream>>>(params);
      check_launch("attention_backward own dK, dV (plain)");
    }
    const int64_t pages = params.past.page_end - params.past.page_begin;
    if (pages > 0 && params.grads.dkv_table != nullptr) {
      allow_shared_memory(dkv_kernel<C, false>, bytes);
      const dim3 page_grid(pages * ceil_div(shape.page_size, C::kTile), shape.kv_heads,
                           shape.batch);
      dkv_kernel<C, false><<<page_grid, C::kThreads, bytes, stream>>>(params);
      check_launch("attention_backward page dK, dV (plain)");
    }
  });
}

}  // namespace oomb::attention::plain

#include <algorithm>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include "attention/cpu/buffer.h"
#include "attention/cpu/cpu.h"
#include "attention/cpu/gradient_page.h"
#include "attention/cpu/key_source.h"
#include "attention/cpu/panel_copy.h"
#include "attention/cpu/panels.h"
#include "attention/cpu/storage.h"
#include "attention/cpu/thread_pool.h"
#include "attention/cpu/tile_kernels.h"
#include "attention/cpu/wave.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::attention::cpu {
namespace {

// The query side of some panels of one kv head, in the layouts the kernels read, and their dQ.
template <typename Real>
struct QuerySide {
  QuerySide(int64_t panels, int64_t panel_rows, int64_t head_dim, int64_t padded_dim)
      : q_t(panels * panel_rows * head_dim),
        do_t(panels * panel_rows * head_dim),
        q(panels * panel_rows * padded_dim),
        d_o(panels * panel_rows * padded_dim),
        dq(panels * panel_rows * head_dim),
        lse_log2(panels * panel_rows),
        delta(panels * panel_rows) {}
  Buffer<Real> q_t, do_t;  // [panel, D, panel_rows]
  Buffer<Real> q, d_o;     // [panel, panel_rows, padded_dim]
  Buffer<Real> dq;         // [panel, D, panel_rows]
  Buffer<Real> lse_log2, delta;
};

// What one thread needs to work on a tile.
template <typename Storage>
struct TileSide {
  using Real = RealOf<Storage>;
  TileSide(TileReader<Storage> tile_reader, int64_t keys, int64_t panel_rows, int64_t padded_dim)
      : reader(std::move(tile_reader)),
        p(keys * panel_rows),
        ds(keys * panel_rows),
        dk(keys * padded_dim),
        dv(keys * padded_dim),
        first(panel_rows),
        last(panel_rows) {}
  TileReader<Storage> reader;
  Buffer<Real> p, ds, dk, dv, first, last;
};

// Every tile's dK and dV and every panel's dQ have one writer, which adds in a fixed order: query
// blocks ascending for dK and dV, tiles in the wave's order for dQ. So the two schedules agree in
// every bit:
//
//   whole heads   a thread takes a (sequence, kv head) with all its tiles and panels and computes
//                 each pair of them once, for dK, dV and dQ: 5 products
//   split heads   where there are too few (sequence, kv head) for the threads: all threads share
//   one;
//                 first each takes tiles (dK, dV), then each takes query blocks (dQ): 7 products
template <typename Storage>
class Backward {
 public:
  using Real = RealOf<Storage>;

  explicit Backward(const BackwardParams& params)
      : p_(params),
        shape_(params.shape),
        wave_(params.shape, params.visibility, params.past, params.own_chunk),
        grads_(params.grads, params.past.table_stride, params.shape),
        kernels_(tile_kernels<Real>()),
        source_{static_cast<const Storage*>(params.k), static_cast<const Storage*>(params.v),
                params.k_strides, params.v_strides, params.past.kv_pool},
        blocks_(ceil_div(params.shape.chunk, params.shape.page_size)),
        padded_dim_(align_up(params.shape.head_dim, kernels_.lanes)),
        threads_(num_threads()) {
    grads_.check(params.dtype);
    expect(params.delta != nullptr, "delta", "a tensor", "none");
    expect((params.first_wave && params.last_wave) || params.dq_acc != nullptr, "dq_acc",
           "a tensor to carry between waves", "none");
  }

  void run() {
    if (p_.first_wave) compute_delta();
    for (int64_t i = 0; i < threads_; ++i) {
      tile_sides_.emplace_back(TileReader<Storage>(shape_, wave_, source_, kernels_, p_.dtype),
                               wave_.longest_tile(), kernels_.panel_rows, padded_dim_);
    }
    const int64_t pairs = shape_.batch * shape_.kv_heads;
    const bool whole_heads = ceil_div(pairs, threads_) * threads_ * 5 <= pairs * 7;
    if (whole_heads) {
      run_whole_heads(pairs);
    } else {
      for (int64_t pair = 0; pair < pairs; ++pair) {
        run_split_head(pair / shape_.kv_heads, pair % shape_.kv_heads);
      }
    }
  }

 private:
  enum class Part { kKeys, kQueries, kBoth };

  void compute_delta() const {
    parallel_for(shape_.batch * shape_.query_heads, threads_, [&](int64_t unit, int64_t) {
      const int64_t batch = unit / shape_.query_heads;
      for (int64_t token = 0; token < shape_.chunk; ++token) {
        const Panels::Row row{unit % shape_.query_heads, token, {}};
        const int64_t at = stat_index(batch, row);
        const Storage* o = row_at(static_cast<const Storage*>(p_.o), p_.o_strides, batch, row);
        const Storage* d_o = row_at(static_cast<const Storage*>(p_.d_o), p_.do_strides, batch, row);
        Real delta = 0;
        if (lse(at) != -std::numeric_limits<Real>::infinity()) {
          for (int64_t d = 0; d < shape_.head_dim; ++d) delta += widen(o[d]) * widen(d_o[d]);
          if (p_.d_lse != nullptr) delta -= static_cast<const Real*>(p_.d_lse)[at];
        }
        static_cast<Real*>(p_.delta)[at] = delta;
      }
    });
  }

  void run_whole_heads(int64_t pairs) {
    std::vector<QuerySide<Real>> sides;
    const int64_t panels = panels_of(0, 0, 0, blocks_).size();
    for (int64_t i = 0; i < std::min(threads_, pairs); ++i) sides.push_back(query_side(panels));
    parallel_for(pairs, threads_, [&](int64_t unit, int64_t thread) {
      const int64_t batch = unit / shape_.kv_heads, kv_head = unit % shape_.kv_heads;
      const QuerySide<Real>& queries = sides[static_cast<size_t>(thread)];
      const Panels rows = panels_of(batch, kv_head, 0, blocks_);
      for (int64_t i = 0; i < rows.size(); ++i) load_panel(rows, i, batch, queries);
      for (const Tile& tile : wave_.tiles(batch)) {
        run_tile(rows, 0, rows.size(), batch, kv_head, tile, queries, Part::kBoth, thread);
      }
      for (int64_t i = 0; i < rows.size(); ++i) store_dq(rows, i, batch, queries);
    });
  }

  void run_split_head(int64_t batch, int64_t kv_head) {
    const Panels rows = panels_of(batch, kv_head, 0, blocks_);
    const QuerySide<Real> queries = query_side(rows.size());
    const std::vector<Tile>& tiles = wave_.tiles(batch);
    parallel_for(rows.size(), threads_,
                 [&](int64_t i, int64_t) { load_panel(rows, i, batch, queries); });
    parallel_for(static_cast<int64_t>(tiles.size()), threads_, [&](int64_t i, int64_t thread) {
      run_tile(rows, 0, rows.size(), batch, kv_head, tiles[static_cast<size_t>(i)], queries,
               Part::kKeys, thread);
    });
    parallel_for(rows.size(), threads_, [&](int64_t i, int64_t thread) {
      for (const Tile& tile : tiles) {
        run_tile(rows, i, i + 1, batch, kv_head, tile, queries, Part::kQueries, thread);
      }
      store_dq(rows, i, batch, queries);
    });
  }

  // One tile against panels [begin, end) in ascending order.
  void run_tile(const Panels& rows, int64_t begin, int64_t end, int64_t batch, int64_t kv_head,
                const Tile& tile, const QuerySide<Real>& queries, Part part, int64_t thread) {
    TileSide<Storage>& s = tile_sides_[static_cast<size_t>(thread)];
    const bool own = tile.page < 0;
    const bool keys_wanted = part != Part::kQueries && (own || grads_.wanted(batch, tile.page));
    if (!keys_wanted && part == Part::kKeys) return;
    const int64_t width = kernels_.panel_rows;
    KeyTile<Real> keys;
    if (keys_wanted) {
      const int64_t size = (own ? tile.own_tokens : tile.keys) * padded_dim_;
      std::fill_n(s.dk.get(), size, Real{0});
      std::fill_n(s.dv.get(), size, Real{0});
    }
    for (int64_t i = begin; i < end; ++i) {
      if (!wave_.attends(batch, rows[i].block, kv_head, tile)) continue;
      const Cover cover = rows.cover(i, tile);
      if (cover == Cover::kNone) continue;
      if (keys.keys == 0) keys = s.reader.read(batch, kv_head, tile);
      BackwardTile<Real> t;
      t.tile = keys;
      t.mask = {cover == Cover::kPart, s.first.get(), s.last.get()};
      if (t.mask.masked) rows.fill_mask(i, tile, s.first.get(), s.last.get());
      t.head_dim = shape_.head_dim;
      t.padded_dim = padded_dim_;
      t.vectors = rows[i].vectors;
      t.rows = rows[i].rows;
      t.of_product = {p_.scale, p_.cap};
      t.q_t = queries.q_t.get() + i * width * shape_.head_dim;
      t.do_t = queries.do_t.get() + i * width * shape_.head_dim;
      t.q = queries.q.get() + i * width * padded_dim_;
      t.d_o = queries.d_o.get() + i * width * padded_dim_;
      t.lse_log2 = queries.lse_log2.get() + i * width;
      t.delta = queries.delta.get() + i * width;
      t.p = s.p.get();
      t.ds = s.ds.get();
      if (keys_wanted) t.dk = s.dk.get(), t.dv = s.dv.get();
      if (part != Part::kKeys) t.dq = queries.dq.get() + i * width * shape_.head_dim;
      kernels_.backward(t);
    }
    if (!keys_wanted) return;
    const Real scale = static_cast<Real>(p_.scale);
    if (own) {
      store_own(tile, batch, kv_head, scale, s.dk.get(), p_.dk, p_.dk_strides);
      store_own(tile, batch, kv_head, Real{1}, s.dv.get(), p_.dv, p_.dv_strides);
    } else if (keys.keys > 0) {
      grads_.add(batch, tile.page, GradientPageTable::kKey, kv_head, tile.keys, scale, s.dk.get(),
                 padded_dim_);
      grads_.add(batch, tile.page, GradientPageTable::kValue, kv_head, tile.keys, Real{1},
                 s.dv.get(), padded_dim_);
    }
  }

  void store_own(const Tile& tile, int64_t batch, int64_t kv_head, Real scale, const Real* source,
                 void* tensor, const Strides& strides) const {
    for (int64_t row = 0; row < tile.own_tokens; ++row) {
      Storage* target = row_at(static_cast<Storage*>(tensor), strides, batch,
                               Panels::Row{kv_head, tile.own_begin + row, {}});
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        target[d] = narrow<Storage>(scale * source[row * padded_dim_ + d]);
      }
    }
  }

  void load_panel(const Panels& rows, int64_t i, int64_t batch,
                  const QuerySide<Real>& queries) const {
    const int64_t width = kernels_.panel_rows, dim = shape_.head_dim;
    const Storage* q = static_cast<const Storage*>(p_.q);
    const Storage* d_o = static_cast<const Storage*>(p_.d_o);
    Real* dq = queries.dq.get() + i * width * dim;
    load_transposed(rows, i, kernels_.lanes, width, dim, q, p_.q_strides, batch,
                    queries.q_t.get() + i * width * dim);
    load_transposed(rows, i, kernels_.lanes, width, dim, d_o, p_.do_strides, batch,
                    queries.do_t.get() + i * width * dim);
    load_rows(rows, i, dim, padded_dim_, q, p_.q_strides, batch,
              queries.q.get() + i * width * padded_dim_);
    load_rows(rows, i, dim, padded_dim_, d_o, p_.do_strides, batch,
              queries.d_o.get() + i * width * padded_dim_);
    if (p_.first_wave) {
      std::fill_n(dq, width * dim, Real{0});
    } else {
      load_transposed(rows, i, kernels_.lanes, width, dim, static_cast<const Real*>(p_.dq_acc),
                      contiguous_strides(shape_, dim), batch, dq);
    }
    Real* lse_log2 = queries.lse_log2.get() + i * width;
    Real* delta = queries.delta.get() + i * width;
    for (int64_t r = 0; r < width; ++r) {
      lse_log2[r] = std::numeric_limits<Real>::infinity();
      delta[r] = 0;
      if (r >= rows[i].rows) continue;
      const int64_t at = stat_index(batch, rows.rows(i)[r]);
      if (lse(at) == -std::numeric_limits<Real>::infinity()) {
        clear_row(queries, i, r);
        continue;
      }
      lse_log2[r] = static_cast<Real>(lse(at) * std::numbers::log2e);
      delta[r] = static_cast<const Real*>(p_.delta)[at];
    }
  }

  // A query that sees no key may hold anything, NaN too, and 0 * NaN would reach dK and dV.
  void clear_row(const QuerySide<Real>& queries, int64_t panel, int64_t row) const {
    const int64_t width = kernels_.panel_rows, dim = shape_.head_dim;
    for (int64_t d = 0; d < dim; ++d) {
      queries.q_t.get()[(panel * dim + d) * width + row] = 0;
      queries.do_t.get()[(panel * dim + d) * width + row] = 0;
    }
    std::fill_n(queries.q.get() + (panel * width + row) * padded_dim_, dim, Real{0});
    std::fill_n(queries.d_o.get() + (panel * width + row) * padded_dim_, dim, Real{0});
  }

  void store_dq(const Panels& rows, int64_t i, int64_t batch,
                const QuerySide<Real>& queries) const {
    const int64_t width = kernels_.panel_rows, dim = shape_.head_dim;
    const Real* dq = queries.dq.get() + i * width * dim;
    const std::vector<Real> factor(static_cast<size_t>(width),
                                   p_.last_wave ? static_cast<Real>(p_.scale) : Real{1});
    if (p_.last_wave) {
      store_transposed(rows, i, width, dim, dq, factor.data(), static_cast<Storage*>(p_.dq),
                       p_.dq_strides, batch);
    } else {
      store_transposed(rows, i, width, dim, dq, factor.data(), static_cast<Real*>(p_.dq_acc),
                       contiguous_strides(shape_, dim), batch);
    }
  }

  Panels panels_of(int64_t batch, int64_t kv_head, int64_t block_begin, int64_t block_end) const {
    return Panels(shape_, p_.visibility, p_.past.num_tokens, kernels_.lanes, kernels_.panel_rows,
                  batch, kv_head, block_begin, block_end);
  }
  QuerySide<Real> query_side(int64_t panels) const {
    return QuerySide<Real>(panels, kernels_.panel_rows, shape_.head_dim, padded_dim_);
  }
  Real lse(int64_t at) const { return static_cast<const Real*>(p_.lse)[at]; }
  int64_t stat_index(int64_t batch, const Panels::Row& row) const {
    return (batch * shape_.query_heads + row.head) * shape_.chunk + row.token;
  }

  const BackwardParams& p_;
  const Shape& shape_;
  const Wave wave_;
  const GradientPageTable grads_;
  const TileKernels<Real>& kernels_;
  const KeySource<Storage> source_;
  const int64_t blocks_;
  const int64_t padded_dim_;
  const int64_t threads_;
  std::vector<TileSide<Storage>> tile_sides_;
};

}  // namespace

void backward(const BackwardParams& params) {
  dispatch_storage(params.dtype, [&]<typename Storage>() { Backward<Storage>(params).run(); });
}

int64_t backward_workspace_bytes(const BackwardParams&) { return 0; }

}  // namespace oomb::attention::cpu

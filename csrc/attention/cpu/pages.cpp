#include <algorithm>
#include <cstddef>
#include <cstring>

#include "attention/cpu/buffer.h"
#include "attention/cpu/cpu.h"
#include "attention/cpu/gradient_page.h"
#include "attention/cpu/storage.h"
#include "attention/cpu/thread_pool.h"
#include "common/math.h"

namespace oomb::attention::cpu {
namespace {

template <typename Storage>
void write_summary(const PageWriteParams& p, int64_t batch, int64_t page, int64_t token_begin,
                   int64_t token_end) {
  using Real = RealOf<Storage>;
  const Shape& shape = p.shape;
  const Buffer<Real> sums(shape.head_dim);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    std::fill_n(sums.get(), shape.head_dim, Real{0});
    for (int64_t token = token_begin; token < token_end; ++token) {
      const Storage* row = static_cast<const Storage*>(p.k) + batch * p.k_strides.batch +
                           head * p.k_strides.head + token * p.k_strides.token;
      for (int64_t d = 0; d < shape.head_dim; ++d) sums.get()[d] += widen(row[d]);
    }
    Storage* target = static_cast<Storage*>(p.summary) +
                      ((batch * p.summary_stride + page) * shape.kv_heads + head) * shape.head_dim;
    const Real count = static_cast<Real>(std::max<int64_t>(token_end - token_begin, 1));
    for (int64_t d = 0; d < shape.head_dim; ++d) target[d] = narrow<Storage>(sums.get()[d] / count);
  }
}

template <typename Storage>
void write_page(const PageWriteParams& p, int64_t batch, int64_t page) {
  const int32_t slot = p.slots[batch * p.slots_stride + page];
  if (slot < 0) return;
  const Shape& shape = p.shape;
  const int64_t begin = page * shape.page_size;
  const int64_t end = std::min(begin + shape.page_size, shape.chunk);
  const int64_t real = p.num_rows != nullptr ? p.num_rows[batch] : shape.chunk;
  const int64_t rows = std::clamp(real, begin, end) - begin;
  Storage* target =
      reinterpret_cast<Storage*>(static_cast<std::byte*>(p.kv_pool) + slot * p.kv_slot_bytes);
  const auto copy = [&](const void* tensor, const Strides& strides) {
    for (int64_t head = 0; head < shape.kv_heads;
         ++head, target += shape.page_size * shape.head_dim) {
      const Storage* source = static_cast<const Storage*>(tensor) + batch * strides.batch +
                              head * strides.head + begin * strides.token;
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(target + row * shape.head_dim, source + row * strides.token,
                    static_cast<size_t>(shape.head_dim) * sizeof(Storage));
      }
      const int64_t behind = (shape.page_size - rows) * shape.head_dim;
      std::memset(static_cast<void*>(target + rows * shape.head_dim), 0,
                  static_cast<size_t>(behind) * sizeof(Storage));
    }
  };
  copy(p.k, p.k_strides);
  copy(p.v, p.v_strides);
  if (p.summary != nullptr) {
    write_summary<Storage>(p, batch, page, begin, begin + rows);
  }
}

// tensor[row] += scale * page[row]
template <typename Storage, typename Gradient>
void add_rows(const Shape& shape, int64_t first_row, const Gradient* page, RealOf<Storage> scale,
              Storage* tensor, const Strides& strides) {
  const int64_t rows = std::min(shape.page_size, shape.chunk - first_row);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (int64_t row = 0; row < rows; ++row) {
      Storage* target = tensor + head * strides.head + (first_row + row) * strides.token;
      const Gradient* source = page + (head * shape.page_size + row) * shape.head_dim;
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const RealOf<Storage> gradient = widen(source[d]);
        target[d] = narrow<Storage>(widen(target[d]) + scale * gradient);
      }
    }
  }
}

template <typename Storage, typename Gradient>
void read_gradient(const PageGradientReadParams& p, const GradientPageTable& grads, int64_t batch,
                   int64_t page) {
  if (!grads.wanted(batch, page)) return;
  const int64_t first_row = page * p.shape.page_size;
  const RealOf<Storage> scale = static_cast<RealOf<Storage>>(p.scale);
  add_rows(p.shape, first_row, grads.at<const Gradient>(batch, page, GradientPageTable::kKey),
           scale, static_cast<Storage*>(p.dk) + batch * p.dk_strides.batch, p.dk_strides);
  add_rows(p.shape, first_row, grads.at<const Gradient>(batch, page, GradientPageTable::kValue),
           scale, static_cast<Storage*>(p.dv) + batch * p.dv_strides.batch, p.dv_strides);
}

}  // namespace

void page_write(const PageWriteParams& params) {
  const int64_t pages = params.page_end - params.page_begin;
  dispatch_storage(params.dtype, [&]<typename Storage>() {
    parallel_for(params.shape.batch * pages, num_threads(), [&](int64_t unit, int64_t) {
      write_page<Storage>(params, unit / pages, params.page_begin + unit % pages);
    });
  });
}

void page_gradient_read(const PageGradientReadParams& params) {
  const GradientPageTable grads(params.grads, params.table_stride, params.shape);
  grads.check(params.dtype);
  const int64_t pages = params.page_end - params.page_begin;
  dispatch_storage(params.dtype, [&]<typename Storage>() {
    parallel_for(params.shape.batch * pages, num_threads(), [&](int64_t unit, int64_t) {
      const int64_t batch = unit / pages, page = params.page_begin + unit % pages;
      if constexpr (std::is_same_v<Storage, double>) {
        read_gradient<Storage, double>(params, grads, batch, page);
      } else if (params.grads.dtype == DType::kFloat32) {
        read_gradient<Storage, float>(params, grads, batch, page);
      } else {
        read_gradient<Storage, BFloat16>(params, grads, batch, page);
      }
    });
  });
}

}  // namespace oomb::attention::cpu

#pragma once

// Moves rows between tensors [B, H, C, D] and panels, one of them per direction and layout.

#include <cstdint>

#include "attention/cpu/panels.h"
#include "attention/cpu/storage.h"

namespace oomb::attention::cpu {

template <typename Storage>
Storage* row_at(Storage* tensor, const Strides& strides, int64_t batch, const Panels::Row& row) {
  return tensor + batch * strides.batch + row.head * strides.head + row.token * strides.token;
}

// target [D, panel_rows]; lanes without a row, up to whole vectors, are zero.
template <typename Storage, typename Real>
void load_transposed(const Panels& panels, int64_t panel, int64_t lanes, int64_t panel_rows,
                     int64_t head_dim, const Storage* tensor, const Strides& strides, int64_t batch,
                     Real* target) {
  const Panels::Row* rows = panels.rows(panel);
  for (int64_t i = 0; i < panels[panel].vectors * lanes; ++i) {
    if (i < panels[panel].rows) {
      const Storage* source = row_at(tensor, strides, batch, rows[i]);
      for (int64_t d = 0; d < head_dim; ++d) target[d * panel_rows + i] = widen(source[d]);
    } else {
      for (int64_t d = 0; d < head_dim; ++d) target[d * panel_rows + i] = 0;
    }
  }
}

// target [rows, padded_dim], the padding zero.
template <typename Storage, typename Real>
void load_rows(const Panels& panels, int64_t panel, int64_t head_dim, int64_t padded_dim,
               const Storage* tensor, const Strides& strides, int64_t batch, Real* target) {
  const Panels::Row* rows = panels.rows(panel);
  for (int64_t i = 0; i < panels[panel].rows; ++i) {
    const Storage* source = row_at(tensor, strides, batch, rows[i]);
    for (int64_t d = 0; d < head_dim; ++d) target[i * padded_dim + d] = widen(source[d]);
    for (int64_t d = head_dim; d < padded_dim; ++d) target[i * padded_dim + d] = 0;
  }
}

// Row i of the tensor = factor[i] * column i of source [D, panel_rows].
template <typename Storage, typename Real>
void store_transposed(const Panels& panels, int64_t panel, int64_t panel_rows, int64_t head_dim,
                      const Real* source, const Real* factor, Storage* tensor,
                      const Strides& strides, int64_t batch) {
  const Panels::Row* rows = panels.rows(panel);
  for (int64_t i = 0; i < panels[panel].rows; ++i) {
    Storage* target = row_at(tensor, strides, batch, rows[i]);
    for (int64_t d = 0; d < head_dim; ++d) {
      target[d] = narrow<Storage>(source[d * panel_rows + i] * factor[i]);
    }
  }
}

// Strides of a contiguous [B, Hq, C, inner] tensor, as the softmax state and lse are laid out.
inline Strides contiguous_strides(const Shape& shape, int64_t inner) {
  return {shape.query_heads * shape.chunk * inner, shape.chunk * inner, inner};
}

}  // namespace oomb::attention::cpu

#pragma once

// The inner loops: one tile of keys against one panel of query rows. They are compiled once per
// instruction set from tile_kernels.inl and chosen at run time.
//
// A panel holds panel_rows query rows of one kv head, one row per vector lane, so that everything
// that happens per row (maximum, sum, mask, rescaling) is plain vector arithmetic without shuffles:
//
//      panel_rows                     panel_rows                    panel_rows
//     +----------+                   +----------+                  +----------+
//   D |   q^T    |     S^T = K q^T   |   S^T    | keys     O^T +=  |   o^T    | D
//     +----------+                   +----------+          V^T P^T +----------+
//
// K and V are read as they lie in their pages, one scalar at a time, broadcast over the rows.

#include <cstdint>
#include <numbers>
#include <vector>

#include "common/dtype.h"

namespace oomb::attention::cpu {

// Key j of a tile is seen by row r when first[r] <= j < last[r]; read only where masked.
template <typename Real>
struct RowMask {
  bool masked = false;
  const Real* first = nullptr;  // [panel_rows]
  const Real* last = nullptr;
};

template <typename Real>
struct KeyTile {
  int64_t keys = 0;
  const Real* k = nullptr;  // [keys, D]
  const Real* v = nullptr;
  int64_t k_stride = 0;
  int64_t v_stride = 0;
};

// What makes scores of products q . k. Scores are kept in base 2.
template <typename Real>
struct Scores {
  Real scale_log2 = 0;  // scale * log2(e)
  Real cap_log2 = 0;    // cap * log2(e): a score is cap_log2 * tanh(product * per_cap); 0: no cap
  Real per_cap = 0;     // scale / cap

  Scores() = default;
  Scores(double scale, double cap)
      : scale_log2(static_cast<Real>(scale * std::numbers::log2e)),
        cap_log2(static_cast<Real>(cap * std::numbers::log2e)),
        per_cap(cap > 0 ? static_cast<Real>(scale / cap) : Real{0}) {}
};

template <typename Real>
struct ForwardTile {
  KeyTile<Real> tile;
  RowMask<Real> mask;
  int64_t head_dim = 0;
  int64_t vectors = 0;  // vectors of the panel in use, panel_rows / lanes at most
  Scores<Real> of_product;
  const Real* q = nullptr;  // [D, panel_rows]
  Real* scores = nullptr;   // [keys, panel_rows], scratch
  Real* acc = nullptr;      // [D, panel_rows], unnormalised output
  Real* max = nullptr;      // [panel_rows]
  Real* sum = nullptr;
};

template <typename Real>
struct BackwardTile {
  KeyTile<Real> tile;
  RowMask<Real> mask;
  int64_t head_dim = 0;
  int64_t padded_dim = 0;  // head_dim rounded up to whole vectors
  int64_t vectors = 0;
  int64_t rows = 0;  // rows of the panel in use
  Scores<Real> of_product;
  const Real* q_t = nullptr;       // [D, panel_rows]
  const Real* do_t = nullptr;      // [D, panel_rows]
  const Real* q = nullptr;         // [rows, padded_dim]
  const Real* d_o = nullptr;       // [rows, padded_dim]
  const Real* lse_log2 = nullptr;  // [panel_rows], +inf for rows that see nothing
  const Real* delta = nullptr;     // [panel_rows]
  Real* p = nullptr;               // [keys, panel_rows], scratch
  Real* ds = nullptr;              // [keys, panel_rows], scratch
  Real* dk = nullptr;  // [keys, padded_dim], added to, without the scale; null: not wanted
  Real* dv = nullptr;
  Real* dq = nullptr;  // [D, panel_rows], added to, without the scale; null: not wanted
};

template <typename Real>
struct TileKernels {
  int64_t lanes = 0;
  int64_t panel_rows = 0;
  void (*forward)(const ForwardTile<Real>&) = nullptr;
  void (*backward)(const BackwardTile<Real>&) = nullptr;
  // c [rows, panel_rows] = a [rows, depth] . b [depth, panel_rows]
  void (*multiply)(int64_t rows, int64_t depth, const Real* a, int64_t a_stride, const Real* b,
                   int64_t vectors, Real* c) = nullptr;
  // target [rows, columns] contiguous = source [rows, columns] of any dtype that Real can hold
  void (*widen)(DType dtype, const void* source, int64_t source_stride, int64_t rows,
                int64_t columns, Real* target) = nullptr;
};

struct InstructionSet {
  const char* name = nullptr;
  TileKernels<float> single_precision;
  TileKernels<double> double_precision;
};

InstructionSet generic_instruction_set();
#if defined(__x86_64__)
InstructionSet avx2_instruction_set();
InstructionSet avx512_instruction_set();
#endif

// Those that this machine can run, the best one first.
std::vector<InstructionSet> usable_instruction_sets();

// The one of that name; the best for null or an empty name.
InstructionSet instruction_set_named(const char* name);

// What the kernels of this process use: the one that OOMB_CPU_ISA names.
const InstructionSet& chosen_instruction_set();

template <typename Real>
const TileKernels<Real>& tile_kernels();

}  // namespace oomb::attention::cpu

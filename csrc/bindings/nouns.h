#pragma once

// The nouns of attention/params.h as Python makes them: frozen, and checked when they are made.
//
// They hold tensors and not addresses, because a tensor may be resized in between. Each call looks
// at its tensors again, checks how its nouns fit each other, and makes the structs of params.h.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>

#include "attention/params.h"
#include "bindings/attention_arguments.h"

namespace oomb::bindings::nouns {

// float64, float32 or bfloat16.
DType dtype_from_name(const std::string& name);

// Slots of one size, in memory that its owner keeps until kernels end. `name` is the argument's, in
// what the checks say.
struct PagePool {
  PagePool(int64_t address, int64_t slot_bytes, int64_t num_slots);
  void check_address(const char* name, DType dtype) const;
  void check_pages(const char* name, const Geometry& geometry) const;  // of keys and values

  int64_t address, slot_bytes, num_slots;
};

struct Visibility {
  Visibility(int64_t window, pybind11::object first_key, pybind11::object num_keys);
  attention::Visibility of(const Geometry& geometry) const;

  int64_t window;
  pybind11::object first_key, num_keys;
};

// The chunk that attends: its queries, its own keys and values, and what the queries may see.
struct Chunk {
  Chunk(pybind11::object q, pybind11::object k, pybind11::object v, double scale, double cap,
        const std::optional<Visibility>& visibility);

  // Into the parameters of a forward or a backward.
  template <typename Params>
  Geometry fill(Params& params, int64_t page_size) const {
    const Tensor queries = to_tensor(q, "q", 4), keys = to_tensor(k, "k", 4);
    const Geometry geometry = geometry_of(queries, keys, page_size);
    const Tensor values = tensor_like(v, "v", geometry.keys());
    params.shape = geometry.shape;
    params.dtype = geometry.dtype;
    params.scale = scale;
    params.cap = cap;
    params.visibility = visibility.of(geometry);
    params.q = queries.data;
    params.k = keys.data;
    params.v = values.data;
    params.q_strides = strides_of(queries);
    params.k_strides = strides_of(keys);
    params.v_strides = strides_of(values);
    return geometry;
  }

  pybind11::object q, k, v;
  double scale;
  double cap;
  Visibility visibility;
};

// The pages that one launch takes, and its place among the launches of an attention.
struct Wave {
  Wave(int64_t begin, int64_t end, bool first, bool last, std::optional<bool> own_chunk);

  template <typename Params>
  void fill(Params& params) const {
    params.own_chunk = own_chunk;
    params.first_wave = first;
    params.last_wave = last;
  }

  int64_t begin, end;
  bool first, last, own_chunk;
};

struct PastPages {
  PastPages(int64_t page_size, const std::optional<PagePool>& pool, pybind11::object block_table,
            int64_t num_tokens, pybind11::object selection);
  Wave whole() const;  // all pages at once
  attention::PastPages of(const Geometry& geometry, const Wave& wave) const;

  int64_t page_size;
  std::optional<PagePool> pool;
  pybind11::object block_table;
  int64_t num_tokens;
  pybind11::object selection;
};

struct GradientPages {
  GradientPages(const PagePool& pool, pybind11::object table, const std::string& dtype,
                uint64_t rounding_seed);
  // `like` is what the table must look like; the entries of [begin, end) are used.
  attention::GradientPages of(const Geometry& geometry, const Expected& like, int64_t begin,
                              int64_t end) const;

  PagePool pool;
  pybind11::object table;
  DType dtype;
  uint64_t rounding_seed;
};

struct SoftmaxState {
  SoftmaxState(pybind11::object acc, pybind11::object max, pybind11::object sum);
  attention::SoftmaxState of(const Geometry& geometry) const;

  pybind11::object acc, max, sum;
};

// What a backward carries from wave to wave; no dq_acc where there is one wave.
struct BackwardState {
  BackwardState(pybind11::object delta, pybind11::object dq_acc);

  pybind11::object delta, dq_acc;
};

// Attention's output and its log-sum-exp, or their gradients.
struct Output {
  Output(pybind11::object o, pybind11::object lse);

  pybind11::object o, lse;
};

struct ChunkGradients {
  ChunkGradients(pybind11::object dq, pybind11::object dk, pybind11::object dv);

  pybind11::object dq, dk, dv;
};

}  // namespace oomb::bindings::nouns

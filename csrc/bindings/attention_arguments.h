#pragma once

// What the attention operations share: their tensors' checks, in the order ndim, device, dtype,
// shape, strides, and the parameters made of them.
//
// Everything is checked that the host can see, and on the CPU the entries of tables too, so that no
// argument makes a kernel leave its memory. Trusted are addresses: that a pool has so many slots.

#include <pybind11/pybind11.h>

#include <cstdint>

#include "attention/params.h"
#include "bindings/tensor.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::bindings {

// Most tokens of a past, a chunk or a page: kernels count keys in int32_t.
constexpr int64_t kMostTokens = int64_t{1} << 30;

// Bytes: kernels cut a workspace from its begin.
constexpr int64_t kWorkspaceAlignment = 256;

// Where an operation goes, by the device of its first tensor.
template <typename Params>
void launch(const Device& device, const Params& params, void (*cpu)(const Params&),
            void (*cuda)(const Params&)) {
  const pybind11::gil_scoped_release unlocked;
  (device.cuda ? cuda : cpu)(params);
}

void* pointer_to(int64_t address);
attention::Strides strides_of(const Tensor& tensor);

// A tensor that must look as expected.
Tensor tensor_like(pybind11::handle object, const char* name, const Expected& expected);

// Its address; null for None.
void* optional_like(pybind11::handle object, const char* name, const Expected& expected);

// The workspace may be a tensor of bytes, or a function that makes one of the size it is given; it
// is not called where nothing is needed. Returns what must live until the launch.
template <typename Params>
pybind11::object provide_workspace(Params& params, pybind11::object workspace, const Device& device,
                                   int64_t bytes) {
  if (bytes == 0) return workspace;
  if (PyCallable_Check(workspace.ptr()) != 0) workspace = workspace(bytes);
  const Tensor tensor =
      tensor_like(workspace, "workspace", {{Extents::kAny}, device, Element::kUInt8, true});
  expect(tensor.shape[0] >= bytes, "workspace", Parts("at least ", bytes, " bytes"),
         tensor.shape[0]);
  const auto address = reinterpret_cast<intptr_t>(tensor.data);
  expect(!device.cuda || address % kWorkspaceAlignment == 0, "workspace",
         Parts("memory that begins on ", kWorkspaceAlignment, " bytes"), address);
  params.workspace = tensor.data;
  params.workspace_bytes = tensor.shape[0];
  return workspace;
}

// Pages from one sequence to the next in a summary table [B, pages, Hkv, D], which may be a range
// of the pages of a longer one.
int64_t summary_stride(const Tensor& summary);

// Sizes and type that all tensors of a call share, taken from its first ones.
struct Geometry {
  attention::Shape shape;
  Device device;
  DType dtype = DType::kFloat32;

  Expected queries() const {
    return {{shape.batch, shape.query_heads, shape.chunk, shape.head_dim},
            device,
            element_of(dtype),
            false};
  }
  Expected keys() const {
    return {{shape.batch, shape.kv_heads, shape.chunk, shape.head_dim},
            device,
            element_of(dtype),
            false};
  }
  // Statistics and state: float64 for float64 inputs, else float32.
  Element statistics_element() const {
    return dtype == DType::kFloat64 ? Element::kFloat64 : Element::kFloat32;
  }
  Expected statistics() const {
    return {{shape.batch, shape.query_heads, shape.chunk}, device, statistics_element(), true};
  }
  Expected accumulator() const {
    return {{shape.batch, shape.query_heads, shape.chunk, shape.head_dim},
            device,
            statistics_element(),
            true};
  }
  Expected table(const Extents& extents) const { return {extents, device, Element::kInt32, true}; }
  // Some columns of a table.
  Expected table_slice(const Extents& extents) const {
    return {extents, device, Element::kInt32, true, true};
  }

  bool empty() const { return shape.batch == 0 || shape.chunk == 0; }
  int64_t blocks() const { return ceil_div(shape.chunk, shape.page_size); }
  int64_t page_bytes(DType type) const;  // of the keys, or the values
};

// Sizes that every operation needs: heads in groups, something in a row, tokens that can be
// counted.
void check_shape(const attention::Shape& shape);
void check_page_size(int64_t page_size);
void check_past(const char* name, int64_t num_past);

// Entries of a table on the CPU: -1, or one of the places of a pool.
void check_entries(const char* name, const int32_t* entries, int64_t count, int64_t places);

Geometry geometry_of(const Tensor& q, const Tensor& k, int64_t page_size);

// Of keys alone.
Geometry geometry_of_keys(const Tensor& k, int64_t page_size);

}  // namespace oomb::bindings

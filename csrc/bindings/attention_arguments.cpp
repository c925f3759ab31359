#include "bindings/attention_arguments.h"

#include "common/checked.h"

namespace py = pybind11;

namespace oomb::bindings {

using namespace attention;

void* pointer_to(int64_t address) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
}

Strides strides_of(const Tensor& tensor) {
  return {tensor.strides[0], tensor.strides[1], tensor.strides[2]};
}

Tensor tensor_like(py::handle object, const char* name, const Expected& expected) {
  const Tensor tensor = to_tensor(object, name, expected.shape.ndim);
  check(tensor, expected);
  return tensor;
}

void* optional_like(py::handle object, const char* name, const Expected& expected) {
  return object.is_none() ? nullptr : tensor_like(object, name, expected).data;
}

int64_t summary_stride(const Tensor& summary) {
  const int64_t page = summary.shape[2] * summary.shape[3];
  const bool dense = (summary.shape[2] == 1 || summary.strides[2] == summary.shape[3]) &&
                     (summary.shape[1] <= 1 || summary.strides[1] == page) &&
                     (summary.shape[0] <= 1 || summary.strides[0] % page == 0);
  expect(dense, summary.name, "pages that lie one behind the other", "other strides");
  return summary.strides[0] / page;
}

void check_page_size(int64_t page_size) {
  expect(page_size > 0 && page_size <= kMostTokens, "page_size", "1 to 2^30 tokens", page_size);
}

void check_shape(const Shape& shape) {
  check_page_size(shape.page_size);
  expect(shape.kv_heads > 0, "k", "at least 1 kv head", shape.kv_heads);
  expect(shape.head_dim > 0, "head_dim", "at least 1", shape.head_dim);
  expect(shape.chunk <= kMostTokens, "chunk", "at most 2^30 tokens", shape.chunk);
  expect(shape.query_heads % shape.kv_heads == 0, "q",
         Parts("heads in groups for ", shape.kv_heads, " kv heads"), shape.query_heads);
}

void check_past(const char* name, int64_t num_past) {
  expect(num_past >= 0 && num_past <= kMostTokens, name, "0 to 2^30 tokens", num_past);
}

int64_t Geometry::page_bytes(DType type) const {
  return checked_product("page_size", shape.kv_heads, shape.page_size, shape.head_dim,
                         size_of(type));
}

void check_entries(const char* name, const int32_t* entries, int64_t count, int64_t places) {
  for (int64_t i = 0; i < count; ++i) {
    if (entries[i] < -1 || entries[i] >= places) {
      expect(false, name, concat("-1 or a place below ", places), entries[i]);
    }
  }
}

Geometry geometry_of(const Tensor& q, const Tensor& k, int64_t page_size) {
  Geometry geometry;
  geometry.device = q.device;
  geometry.dtype = q.dtype();
  geometry.shape = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], page_size};
  check_shape(geometry.shape);
  check(q, geometry.queries());
  check(k, geometry.keys());
  return geometry;
}

Geometry geometry_of_keys(const Tensor& k, int64_t page_size) {
  Geometry geometry;
  geometry.device = k.device;
  geometry.dtype = k.dtype();
  geometry.shape = {k.shape[0], k.shape[1], k.shape[1], k.shape[2], k.shape[3], page_size};
  check_shape(geometry.shape);
  check(k, geometry.keys());
  return geometry;
}

}  // namespace oomb::bindings

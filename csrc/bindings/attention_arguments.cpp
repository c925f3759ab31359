#include "bindings/attention_arguments.h"

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

Visibility Chunk::visibility(int64_t window, py::handle first_key, py::handle num_keys) const {
  expect(window >= 0, "window", "0 or more tokens", window);
  Visibility result;
  result.window = window;
  result.first_key = static_cast<const int32_t*>(
      optional_like(first_key, "first_key", table({shape.batch, shape.chunk})));
  result.num_keys =
      static_cast<const int32_t*>(optional_like(num_keys, "num_keys", table({shape.batch})));
  return result;
}

Chunk chunk_of(const Tensor& q, const Tensor& k, int64_t page_size) {
  Chunk chunk;
  chunk.device = q.device;
  chunk.dtype = q.dtype();
  chunk.shape = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], page_size};
  expect(page_size > 0, "page_size", "a number above 0", page_size);
  expect(chunk.shape.kv_heads > 0 && chunk.shape.query_heads % chunk.shape.kv_heads == 0, "q",
         concat("heads in groups for ", chunk.shape.kv_heads, " kv heads"),
         chunk.shape.query_heads);
  check(q, chunk.queries());
  check(k, chunk.keys());
  return chunk;
}

Chunk chunk_of_keys(const Tensor& k, int64_t page_size) {
  Chunk chunk;
  chunk.device = k.device;
  chunk.dtype = k.dtype();
  chunk.shape = {k.shape[0], k.shape[1], k.shape[1], k.shape[2], k.shape[3], page_size};
  expect(page_size > 0, "page_size", "a number above 0", page_size);
  check(k, chunk.keys());
  return chunk;
}

PastPages past_of(const Chunk& chunk, const PastArguments& a) {
  PastPages past;
  past.kv_pool = pointer_to(a.kv_pool);
  past.kv_slot_bytes = a.kv_slot_bytes;
  past.kv_num_slots = a.kv_num_slots;
  past.num_tokens = a.num_past;
  past.page_begin = a.page_begin;
  past.page_end = a.page_end;
  const int64_t pages = ceil_div(a.num_past, chunk.shape.page_size);
  expect(a.num_past >= 0, "num_past", "0 or more tokens", a.num_past);
  expect(0 <= a.page_begin && a.page_begin <= a.page_end && a.page_end <= pages,
         "page_begin, page_end", concat("a range within ", pages, " past pages"),
         concat(a.page_begin, ", ", a.page_end));
  if (a.page_begin < a.page_end) {
    const int64_t page_bytes = 2 * chunk.shape.kv_heads * chunk.shape.page_size *
                               chunk.shape.head_dim * size_of(chunk.dtype);
    expect(a.kv_pool != 0, "kv_pool", "the address of the pool", a.kv_pool);
    expect(a.kv_slot_bytes >= page_bytes, "kv_slot_bytes", concat("at least ", page_bytes),
           a.kv_slot_bytes);
    expect(a.kv_num_slots > 0, "kv_num_slots", "a number above 0", a.kv_num_slots);
  }
  if (!a.block_table.is_none()) {
    const Tensor table =
        tensor_like(a.block_table, "block_table", chunk.table({chunk.shape.batch, Extents::kAny}));
    past.block_table = static_cast<const int32_t*>(table.data);
    past.table_stride = table.shape[1];
  }
  expect(past.table_stride >= a.page_end, "block_table",
         concat("entries of ", a.page_end, " pages"), past.table_stride);
  if (!a.selection.is_none()) {
    const Tensor selection =
        tensor_like(a.selection, "selection",
                    chunk.table({chunk.shape.batch, chunk.blocks(), Extents::kAny, Extents::kAny}));
    past.selection = static_cast<const int32_t*>(selection.data);
    past.selection_heads = selection.shape[2];
    past.budget = selection.shape[3];
    expect(past.selection_heads == 1 || past.selection_heads == chunk.shape.kv_heads, "selection",
           concat("1 or ", chunk.shape.kv_heads, " heads"), past.selection_heads);
  }
  return past;
}

namespace {

DType dtype_from_name(const std::string& name, const char* argument) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (name == oomb::name_of(dtype)) return dtype;
  }
  throw InvalidArgument(
      concat(argument, ": expected float64, float32, float16 or bfloat16, got ", name));
}

}  // namespace

GradientPages gradients_of(const Chunk& chunk, int64_t dkv_pool, int64_t dkv_unit_bytes,
                           py::handle dkv_table, const Expected& table,
                           const std::string& dkv_dtype, uint64_t rounding_seed) {
  GradientPages grads;
  grads.dkv_pool = pointer_to(dkv_pool);
  grads.dkv_unit_bytes = dkv_unit_bytes;
  grads.rounding_seed = rounding_seed;
  grads.dtype = dtype_from_name(dkv_dtype, "dkv_dtype");
  if (dkv_table.is_none()) return grads;
  const bool fits = chunk.dtype == DType::kFloat64
                        ? grads.dtype == DType::kFloat64
                        : grads.dtype == DType::kFloat32 || grads.dtype == DType::kBFloat16;
  expect(fits, "dkv_dtype",
         chunk.dtype == DType::kFloat64 ? "float64 for float64 tensors" : "float32 or bfloat16",
         dkv_dtype);
  grads.dkv_table = static_cast<const int32_t*>(tensor_like(dkv_table, "dkv_table", table).data);
  expect(dkv_pool != 0, "dkv_pool", "the address of the pool", dkv_pool);
  expect(dkv_unit_bytes > 0, "dkv_unit_bytes", "a number above 0", dkv_unit_bytes);
  return grads;
}

}  // namespace oomb::bindings

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

Visibility Chunk::visibility(int64_t window, py::handle first_key, py::handle num_keys) const {
  expect(window >= 0, "window", "0 or more tokens", window);
  Visibility result;
  result.window = window > kMostTokens ? 0 : window;  // so many are all
  result.first_key = static_cast<const int32_t*>(
      optional_like(first_key, "first_key", table({shape.batch, shape.chunk})));
  result.num_keys =
      static_cast<const int32_t*>(optional_like(num_keys, "num_keys", table({shape.batch})));
  return result;
}

void check_shape(const Shape& shape) {
  expect(shape.page_size > 0 && shape.page_size <= kMostTokens, "page_size", "1 to 2^30 tokens",
         shape.page_size);
  expect(shape.kv_heads > 0, "k", "at least 1 kv head", shape.kv_heads);
  expect(shape.head_dim > 0, "head_dim", "at least 1", shape.head_dim);
  expect(shape.chunk <= kMostTokens, "chunk", "at most 2^30 tokens", shape.chunk);
  expect(shape.query_heads % shape.kv_heads == 0, "q",
         concat("heads in groups for ", shape.kv_heads, " kv heads"), shape.query_heads);
}

void check_past(int64_t num_past) {
  expect(num_past >= 0 && num_past <= kMostTokens, "num_past", "0 to 2^30 tokens", num_past);
}

int64_t Chunk::page_bytes(DType type) const {
  return checked_product("page_size", shape.kv_heads, shape.page_size, shape.head_dim,
                         size_of(type));
}

namespace {

void check_address(const char* name, int64_t pool, DType dtype) {
  const auto element = static_cast<int64_t>(size_of(dtype));
  expect(pool != 0 && pool % element == 0, name,
         concat("the address of the pool, aligned to elements of ", element, " bytes"), pool);
}

}  // namespace

void check_kv_pool(const Chunk& chunk, int64_t pool, int64_t slot_bytes, int64_t num_slots) {
  const auto element = static_cast<int64_t>(size_of(chunk.dtype));
  const int64_t page_bytes = 2 * chunk.page_bytes(chunk.dtype);
  check_address("kv_pool", pool, chunk.dtype);
  expect(slot_bytes >= page_bytes && slot_bytes % element == 0, "kv_slot_bytes",
         concat("at least ", page_bytes, ", a multiple of ", element), slot_bytes);
  expect(num_slots > 0, "kv_num_slots", "a number above 0", num_slots);
  checked_product("kv_slot_bytes", slot_bytes, num_slots);
}

void check_entries(const char* name, const int32_t* entries, int64_t count, int64_t places) {
  for (int64_t i = 0; i < count; ++i) {
    if (entries[i] < -1 || entries[i] >= places) {
      expect(false, name, concat("-1 or a place below ", places), entries[i]);
    }
  }
}

Chunk chunk_of(const Tensor& q, const Tensor& k, int64_t page_size) {
  Chunk chunk;
  chunk.device = q.device;
  chunk.dtype = q.dtype();
  chunk.shape = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], page_size};
  check_shape(chunk.shape);
  check(q, chunk.queries());
  check(k, chunk.keys());
  return chunk;
}

Chunk chunk_of_keys(const Tensor& k, int64_t page_size) {
  Chunk chunk;
  chunk.device = k.device;
  chunk.dtype = k.dtype();
  chunk.shape = {k.shape[0], k.shape[1], k.shape[1], k.shape[2], k.shape[3], page_size};
  check_shape(chunk.shape);
  check(k, chunk.keys());
  return chunk;
}

PastPages past_of(const Chunk& chunk, const PastArguments& a) {
  check_past(a.num_past);
  PastPages past;
  past.kv_pool = pointer_to(a.kv_pool);
  past.kv_slot_bytes = a.kv_slot_bytes;
  past.kv_num_slots = a.kv_num_slots;
  past.num_tokens = a.num_past;
  past.page_begin = a.page_begin;
  past.page_end = a.page_end;
  const int64_t pages = ceil_div(a.num_past, chunk.shape.page_size);
  expect(0 <= a.page_begin && a.page_begin <= a.page_end && a.page_end <= pages,
         "page_begin, page_end", concat("a range within ", pages, " past pages"),
         concat(a.page_begin, ", ", a.page_end));
  if (a.page_begin < a.page_end) {
    check_kv_pool(chunk, a.kv_pool, a.kv_slot_bytes, a.kv_num_slots);
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

GradientPages gradients_of(const Chunk& chunk, const GradientArguments& a) {
  GradientPages grads;
  grads.dkv_pool = pointer_to(a.dkv_pool);
  grads.dkv_unit_bytes = a.dkv_unit_bytes;
  grads.rounding_seed = a.rounding_seed;
  grads.dtype = dtype_from_name(a.dkv_dtype, "dkv_dtype");
  if (a.dkv_table.is_none()) return grads;
  const bool fits = chunk.dtype == DType::kFloat64
                        ? grads.dtype == DType::kFloat64
                        : grads.dtype == DType::kFloat32 || grads.dtype == DType::kBFloat16;
  expect(fits, "dkv_dtype",
         chunk.dtype == DType::kFloat64 ? "float64 for float64 tensors" : "float32 or bfloat16",
         a.dkv_dtype);
  const Tensor table = tensor_like(a.dkv_table, "dkv_table", a.table);
  grads.dkv_table = static_cast<const int32_t*>(table.data);
  if (a.page_begin == a.page_end) return grads;
  expect(table.shape[1] >= a.page_end, "dkv_table", concat("entries of ", a.page_end, " pages"),
         table.shape[1]);
  check_address("dkv_pool", a.dkv_pool, grads.dtype);
  expect(a.dkv_unit_bytes > 0, "dkv_unit_bytes", "a number above 0", a.dkv_unit_bytes);
  expect(a.dkv_num_units > 0, "dkv_num_units", "a number above 0", a.dkv_num_units);
  // A page begins with a unit and may take several.
  const int64_t room = checked_product("dkv_unit_bytes", a.dkv_unit_bytes, a.dkv_num_units) -
                       chunk.page_bytes(grads.dtype);
  const int64_t places = room < 0 ? 0 : room / a.dkv_unit_bytes + 1;
  for (int64_t b = 0; !chunk.device.cuda && b < chunk.shape.batch; ++b) {
    const int32_t* row = grads.dkv_table + b * table.strides[0];
    check_entries("dkv_table", row + 2 * a.page_begin, 2 * (a.page_end - a.page_begin), places);
    for (int64_t page = a.page_begin; page < a.page_end; ++page) {
      const int64_t dk = row[2 * page], dv = row[2 * page + 1];
      const auto element = static_cast<int64_t>(size_of(grads.dtype));
      const bool aligned =
          dk * a.dkv_unit_bytes % element == 0 && dv * a.dkv_unit_bytes % element == 0;
      if ((dk < 0) == (dv < 0) && (dk < 0 || aligned)) continue;
      expect(false, "dkv_table",
             concat("aligned places for both dK and dV of page ", page, ", or -1 twice"),
             concat(dk, ", ", dv));
    }
  }
  return grads;
}

}  // namespace oomb::bindings

#include "bindings/nouns.h"

#include <cmath>
#include <utility>

#include "common/checked.h"

namespace py = pybind11;

namespace oomb::bindings::nouns {
namespace {

constexpr int64_t kAny = Extents::kAny;

// What a noun can see of a tensor alone, before a call says what its sizes must be.
void check_table(py::handle object, const char* name, const Extents& extents,
                 bool strided_rows = false) {
  if (object.is_none()) return;
  const Tensor tensor = to_tensor(object, name, extents.ndim);
  check(tensor, {extents, tensor.device, Element::kInt32, true, strided_rows});
}

void check_rows(py::handle object, const char* name) {
  if (object.is_none()) return;
  const Tensor tensor = to_tensor(object, name, 4);
  check(tensor, {{kAny, kAny, kAny, kAny}, tensor.device, element_of(tensor.dtype()), false});
}

void check_statistics(py::handle object, const char* name, const Extents& extents) {
  if (object.is_none()) return;
  const Tensor tensor = to_tensor(object, name, extents.ndim);
  expect(tensor.element == Element::kFloat32 || tensor.element == Element::kFloat64, name,
         "float32 or float64", name_of(tensor.element));
  check(tensor, {extents, tensor.device, tensor.element, true});
}

}  // namespace

DType dtype_from_name(const std::string& name) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    if (name == oomb::name_of(dtype)) return dtype;
  }
  throw InvalidArgument(concat("dtype: expected float64, float32 or bfloat16, got ", name));
}

PagePool::PagePool(int64_t address, int64_t slot_bytes, int64_t num_slots)
    : address(address), slot_bytes(slot_bytes), num_slots(num_slots) {
  expect(slot_bytes >= 0, "slot_bytes", "0 or more", slot_bytes);
  expect(num_slots >= 0, "num_slots", "0 or more", num_slots);
  checked_product("slot_bytes", slot_bytes, num_slots);
}

void PagePool::check_address(const char* name, DType dtype) const {
  const auto element = static_cast<int64_t>(size_of(dtype));
  expect(address != 0 && address % element == 0, name,
         Parts("an address aligned to elements of ", element, " bytes"), address);
  expect(num_slots > 0, name, "at least 1 slot", num_slots);
  expect(slot_bytes > 0, name, "slots of at least 1 byte", slot_bytes);
}

void PagePool::check_pages(const char* name, const Geometry& geometry) const {
  const auto element = static_cast<int64_t>(size_of(geometry.dtype));
  const int64_t page_bytes = 2 * geometry.page_bytes(geometry.dtype);
  check_address(name, geometry.dtype);
  expect(slot_bytes >= page_bytes && slot_bytes % element == 0, name,
         Parts("slots of at least ", page_bytes, " bytes, a multiple of ", element), slot_bytes);
}

Visibility::Visibility(int64_t window, py::object first_key, py::object num_keys)
    : window(window), first_key(std::move(first_key)), num_keys(std::move(num_keys)) {
  expect(window >= 0, "window", "0 or more tokens", window);
  check_table(this->first_key, "first_key", {kAny, kAny});
  check_table(this->num_keys, "num_keys", {kAny});
}

attention::Visibility Visibility::of(const Geometry& geometry) const {
  const attention::Shape& shape = geometry.shape;
  attention::Visibility result;
  result.window = window > kMostTokens ? 0 : window;  // so many are all
  result.first_key = static_cast<const int32_t*>(
      optional_like(first_key, "first_key", geometry.table({shape.batch, shape.chunk})));
  result.num_keys = static_cast<const int32_t*>(
      optional_like(num_keys, "num_keys", geometry.table({shape.batch})));
  return result;
}

Chunk::Chunk(py::object q, py::object k, py::object v, double scale, double cap,
             const std::optional<Visibility>& visibility)
    : q(std::move(q)),
      k(std::move(k)),
      v(std::move(v)),
      scale(scale),
      cap(cap),
      visibility(visibility ? *visibility : Visibility(0, py::none(), py::none())) {
  // In fp32 neither the cap nor one by it may overflow, whatever the scale.
  expect(cap == 0 || (cap >= 1e-30 && cap <= 1e30), "cap", "0, or a number of 1e-30 .. 1e30", cap);
  attention::ForwardParams params;
  fill(params, 1);
}

Wave::Wave(int64_t begin, int64_t end, bool first, bool last, std::optional<bool> own_chunk)
    : begin(begin), end(end), first(first), last(last), own_chunk(own_chunk.value_or(first)) {
  expect(0 <= begin && begin <= end, "begin, end", "a range of pages", Parts(begin, ", ", end));
}

PastPages::PastPages(int64_t page_size, const std::optional<PagePool>& pool, py::object block_table,
                     int64_t num_tokens, py::object selection)
    : page_size(page_size),
      pool(pool),
      block_table(std::move(block_table)),
      num_tokens(num_tokens),
      selection(std::move(selection)) {
  check_page_size(page_size);
  check_past("num_tokens", num_tokens);
  check_table(this->block_table, "block_table", {kAny, kAny});
  check_table(this->selection, "selection", {kAny, kAny, kAny, kAny});
}

Wave PastPages::whole() const {
  return {0, ceil_div(num_tokens, page_size), true, true, std::nullopt};
}

attention::PastPages PastPages::of(const Geometry& geometry, const Wave& wave) const {
  const attention::Shape& shape = geometry.shape;
  const int64_t pages = ceil_div(num_tokens, page_size);
  expect(wave.end <= pages, "wave", Parts("a range within ", pages, " past pages"),
         Parts(wave.begin, ", ", wave.end));
  attention::PastPages past;
  past.num_tokens = num_tokens;
  past.page_begin = wave.begin;
  past.page_end = wave.end;
  if (wave.begin < wave.end) {
    expect(pool.has_value(), "past.pool", "a PagePool", "None");
    pool->check_pages("past.pool", geometry);
  }
  if (pool) {
    past.kv_pool = pointer_to(pool->address);
    past.kv_slot_bytes = pool->slot_bytes;
    past.kv_num_slots = pool->num_slots;
  }
  if (!block_table.is_none()) {
    const Tensor table =
        tensor_like(block_table, "block_table", geometry.table({shape.batch, kAny}));
    past.block_table = static_cast<const int32_t*>(table.data);
    past.table_stride = table.shape[1];
  }
  expect(past.table_stride >= wave.end, "block_table", Parts("entries of ", wave.end, " pages"),
         past.table_stride);
  if (!selection.is_none()) {
    const Tensor lists = tensor_like(selection, "selection",
                                     geometry.table({shape.batch, geometry.blocks(), kAny, kAny}));
    past.selection = static_cast<const int32_t*>(lists.data);
    past.selection_heads = lists.shape[2];
    past.budget = lists.shape[3];
    // Memory of no entries has no address, and no lists mean all pages.
    expect(past.budget > 0, "selection", "lists of at least 1 entry (-1: no page)", past.budget);
    expect(past.selection_heads == 1 || past.selection_heads == shape.kv_heads, "selection",
           Parts("1 or ", shape.kv_heads, " heads"), past.selection_heads);
  }
  return past;
}

GradientPages::GradientPages(const PagePool& pool, py::object table, const std::string& dtype,
                             uint64_t rounding_seed)
    : pool(pool),
      table(std::move(table)),
      dtype(dtype_from_name(dtype)),
      rounding_seed(rounding_seed) {
  expect(!this->table.is_none(), "table", "a tensor", "None");
  check_table(this->table, "table", {kAny, kAny, 2}, true);
}

attention::GradientPages GradientPages::of(const Geometry& geometry, const Expected& like,
                                           int64_t begin, int64_t end) const {
  constexpr const char* kTable = "gradients.table";
  constexpr const char* kPool = "gradients.pool";
  const bool double_inputs = geometry.dtype == DType::kFloat64;
  const bool fits = double_inputs ? dtype == DType::kFloat64
                                  : dtype == DType::kFloat32 || dtype == DType::kBFloat16;
  expect(fits, "gradients.dtype",
         double_inputs ? "float64 for float64 tensors" : "float32 or bfloat16",
         oomb::name_of(dtype));
  const Tensor places = tensor_like(table, kTable, like);
  attention::GradientPages grads;
  grads.dkv_pool = pointer_to(pool.address);
  grads.dkv_unit_bytes = pool.slot_bytes;
  grads.dkv_table = static_cast<const int32_t*>(places.data);
  grads.dtype = dtype;
  grads.rounding_seed = rounding_seed;
  if (begin == end) return grads;
  expect(places.shape[1] >= end, kTable, Parts("entries of ", end, " pages"), places.shape[1]);
  pool.check_address(kPool, dtype);
  // A page begins with a unit and may take several.
  const int64_t room = pool.slot_bytes * pool.num_slots - geometry.page_bytes(dtype);
  const int64_t most = room < 0 ? 0 : room / pool.slot_bytes + 1;
  const auto element = static_cast<int64_t>(size_of(dtype));
  for (int64_t b = 0; !geometry.device.cuda && b < geometry.shape.batch; ++b) {
    const int32_t* row = grads.dkv_table + b * places.strides[0];
    check_entries(kTable, row + 2 * begin, 2 * (end - begin), most);
    for (int64_t page = begin; page < end; ++page) {
      const int64_t dk = row[2 * page], dv = row[2 * page + 1];
      const bool aligned =
          dk * pool.slot_bytes % element == 0 && dv * pool.slot_bytes % element == 0;
      if ((dk < 0) == (dv < 0) && (dk < 0 || aligned)) continue;
      expect(false, kTable,
             concat("aligned places for both dK and dV of page ", page, ", or -1 twice"),
             concat(dk, ", ", dv));
    }
  }
  return grads;
}

SoftmaxState::SoftmaxState(py::object acc, py::object max, py::object sum)
    : acc(std::move(acc)), max(std::move(max)), sum(std::move(sum)) {
  check_statistics(this->acc, "acc", {kAny, kAny, kAny, kAny});
  check_statistics(this->max, "max", {kAny, kAny, kAny});
  check_statistics(this->sum, "sum", {kAny, kAny, kAny});
}

attention::SoftmaxState SoftmaxState::of(const Geometry& geometry) const {
  return {tensor_like(acc, "acc", geometry.accumulator()).data,
          tensor_like(max, "max", geometry.statistics()).data,
          tensor_like(sum, "sum", geometry.statistics()).data};
}

BackwardState::BackwardState(py::object delta, py::object dq_acc)
    : delta(std::move(delta)), dq_acc(std::move(dq_acc)) {
  check_statistics(this->delta, "delta", {kAny, kAny, kAny});
  check_statistics(this->dq_acc, "dq_acc", {kAny, kAny, kAny, kAny});
}

Output::Output(py::object o, py::object lse) : o(std::move(o)), lse(std::move(lse)) {
  check_rows(this->o, "o");
  check_statistics(this->lse, "lse", {kAny, kAny, kAny});
}

ChunkGradients::ChunkGradients(py::object dq, py::object dk, py::object dv)
    : dq(std::move(dq)), dk(std::move(dk)), dv(std::move(dv)) {
  check_rows(this->dq, "dq");
  check_rows(this->dk, "dk");
  check_rows(this->dv, "dv");
}

}  // namespace oomb::bindings::nouns

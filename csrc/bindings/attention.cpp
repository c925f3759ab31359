// The attention operations of _C: tensors in, parameter structs out, one launch each. Everything
// about the tensors is checked here, in the order ndim, device, dtype, shape, strides.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "attention/cpu/cpu.h"
#include "attention/dispatch.h"
#include "attention/params.h"
#include "bindings/tensor.h"
#include "common/error.h"
#include "common/math.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

using namespace attention;

// Where an operation goes, by the device of its first tensor.
template <typename Params>
void launch(const Device& device, const Params& params, void (*cpu)(const Params&),
            void (*cuda)(const Params&)) {
  const py::gil_scoped_release unlocked;
  (device.cuda ? cuda : cpu)(params);
}

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

// Null for None.
void* optional_like(py::handle object, const char* name, const Expected& expected) {
  return object.is_none() ? nullptr : tensor_like(object, name, expected).data;
}

// The workspace may be a tensor of bytes, or a function that makes one of the size it is given; it
// is not called where nothing is needed. Returns what must live until the launch.
template <typename Params>
py::object provide_workspace(Params& params, py::object workspace, const Device& device,
                             int64_t bytes) {
  if (bytes == 0) return workspace;
  if (PyCallable_Check(workspace.ptr()) != 0) workspace = workspace(bytes);
  const Tensor tensor =
      tensor_like(workspace, "workspace", {{Extents::kAny}, device, Element::kUInt8, true});
  expect(tensor.shape[0] >= bytes, "workspace", concat("at least ", bytes, " bytes"),
         tensor.shape[0]);
  params.workspace = tensor.data;
  params.workspace_bytes = tensor.shape[0];
  return workspace;
}

// Pages from one sequence to the next in a summary table [B, pages, Hkv, D], which may be a range
// of the pages of a longer one.
int64_t summary_stride(const Tensor& summary) {
  const int64_t page = summary.shape[2] * summary.shape[3];
  const bool dense = (summary.shape[2] == 1 || summary.strides[2] == summary.shape[3]) &&
                     (summary.shape[1] <= 1 || summary.strides[1] == page) &&
                     (summary.shape[0] <= 1 || summary.strides[0] % page == 0);
  expect(dense, summary.name, "pages that lie one behind the other", "other strides");
  return summary.strides[0] / page;
}

DType dtype_from_name(const std::string& name, const char* argument) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (name == oomb::name_of(dtype)) return dtype;
  }
  throw InvalidArgument(
      concat(argument, ": expected float64, float32, float16 or bfloat16, got ", name));
}

// Sizes and type that all tensors of a call share, taken from its first ones.
struct Chunk {
  Shape shape;
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

  Visibility visibility(int64_t window, py::handle first_key, py::handle num_keys) const {
    expect(window >= 0, "window", "0 or more tokens", window);
    Visibility result;
    result.window = window;
    result.first_key = static_cast<const int32_t*>(
        optional_like(first_key, "first_key", table({shape.batch, shape.chunk})));
    result.num_keys =
        static_cast<const int32_t*>(optional_like(num_keys, "num_keys", table({shape.batch})));
    return result;
  }

  int64_t blocks() const { return ceil_div(shape.chunk, shape.page_size); }
};

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

// A chunk of keys alone.
Chunk chunk_of_keys(const Tensor& k, int64_t page_size) {
  Chunk chunk;
  chunk.device = k.device;
  chunk.dtype = k.dtype();
  chunk.shape = {k.shape[0], k.shape[1], k.shape[1], k.shape[2], k.shape[3], page_size};
  expect(page_size > 0, "page_size", "a number above 0", page_size);
  check(k, chunk.keys());
  return chunk;
}

struct PastArguments {
  int64_t kv_pool, kv_slot_bytes, kv_num_slots;
  py::object block_table;
  int64_t num_past, page_begin, page_end;
  py::object selection;
};

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

void attention_forward(py::object q, py::object k, py::object v, py::object o, py::object lse,
                       double scale, int64_t page_size, int64_t window, py::object first_key,
                       py::object num_keys, int64_t kv_pool, int64_t kv_slot_bytes,
                       int64_t kv_num_slots, py::object block_table, int64_t num_past,
                       int64_t page_begin, int64_t page_end, py::object selection, bool own_chunk,
                       bool first_wave, bool last_wave, py::object acc, py::object max,
                       py::object sum, int64_t stream) {
  const Tensor q_tensor = to_tensor(q, "q", 4), k_tensor = to_tensor(k, "k", 4);
  const Chunk chunk = chunk_of(q_tensor, k_tensor, page_size);
  const Tensor v_tensor = tensor_like(v, "v", chunk.keys());
  ForwardParams params;
  params.shape = chunk.shape;
  params.dtype = chunk.dtype;
  params.scale = scale;
  params.visibility = chunk.visibility(window, first_key, num_keys);
  params.past = past_of(chunk, {kv_pool, kv_slot_bytes, kv_num_slots, block_table, num_past,
                                page_begin, page_end, selection});
  params.q = q_tensor.data;
  params.k = k_tensor.data;
  params.v = v_tensor.data;
  params.q_strides = strides_of(q_tensor);
  params.k_strides = strides_of(k_tensor);
  params.v_strides = strides_of(v_tensor);
  params.own_chunk = own_chunk;
  params.first_wave = first_wave;
  params.last_wave = last_wave;
  if (!first_wave || !last_wave) {
    params.state = {tensor_like(acc, "acc", chunk.accumulator()).data,
                    tensor_like(max, "max", chunk.statistics()).data,
                    tensor_like(sum, "sum", chunk.statistics()).data};
  }
  if (last_wave) {
    const Tensor o_tensor = tensor_like(o, "o", chunk.queries());
    params.o = o_tensor.data;
    params.o_strides = strides_of(o_tensor);
    params.lse = tensor_like(lse, "lse", chunk.statistics()).data;
  }
  params.stream = pointer_to(stream);
  launch(chunk.device, params, &cpu::forward, &cuda::forward);
}

void attention_backward(py::object q, py::object k, py::object v, py::object o, py::object d_o,
                        py::object lse, py::object dq, py::object dk, py::object dv,
                        py::object delta, double scale, int64_t page_size, py::object d_lse,
                        int64_t window, py::object first_key, py::object num_keys, int64_t kv_pool,
                        int64_t kv_slot_bytes, int64_t kv_num_slots, py::object block_table,
                        int64_t num_past, int64_t page_begin, int64_t page_end,
                        py::object selection, bool own_chunk, bool first_wave, bool last_wave,
                        int64_t dkv_pool, int64_t dkv_unit_bytes, py::object dkv_table,
                        const std::string& dkv_dtype, uint64_t rounding_seed, bool deterministic,
                        py::object dq_acc, py::object workspace, int64_t stream) {
  const Tensor q_tensor = to_tensor(q, "q", 4), k_tensor = to_tensor(k, "k", 4);
  const Chunk chunk = chunk_of(q_tensor, k_tensor, page_size);
  const Tensor v_tensor = tensor_like(v, "v", chunk.keys());
  const Tensor o_tensor = tensor_like(o, "o", chunk.queries());
  const Tensor do_tensor = tensor_like(d_o, "d_o", chunk.queries());
  BackwardParams params;
  params.shape = chunk.shape;
  params.dtype = chunk.dtype;
  params.scale = scale;
  params.deterministic = deterministic;
  params.visibility = chunk.visibility(window, first_key, num_keys);
  params.past = past_of(chunk, {kv_pool, kv_slot_bytes, kv_num_slots, block_table, num_past,
                                page_begin, page_end, selection});
  params.grads = gradients_of(chunk, dkv_pool, dkv_unit_bytes, dkv_table,
                              chunk.table({chunk.shape.batch, params.past.table_stride, 2}),
                              dkv_dtype, rounding_seed);
  params.q = q_tensor.data;
  params.k = k_tensor.data;
  params.v = v_tensor.data;
  params.o = o_tensor.data;
  params.d_o = do_tensor.data;
  params.q_strides = strides_of(q_tensor);
  params.k_strides = strides_of(k_tensor);
  params.v_strides = strides_of(v_tensor);
  params.o_strides = strides_of(o_tensor);
  params.do_strides = strides_of(do_tensor);
  params.lse = tensor_like(lse, "lse", chunk.statistics()).data;
  params.d_lse = optional_like(d_lse, "d_lse", chunk.statistics());
  params.own_chunk = own_chunk;
  params.first_wave = first_wave;
  params.last_wave = last_wave;
  if (!first_wave || !last_wave) {
    params.dq_acc = tensor_like(dq_acc, "dq_acc", chunk.accumulator()).data;
  }
  params.delta = tensor_like(delta, "delta", chunk.statistics()).data;
  if (last_wave) {
    const Tensor dq_tensor = tensor_like(dq, "dq", chunk.queries());
    params.dq = dq_tensor.data;
    params.dq_strides = strides_of(dq_tensor);
  }
  if (own_chunk) {
    const Tensor dk_tensor = tensor_like(dk, "dk", chunk.keys());
    const Tensor dv_tensor = tensor_like(dv, "dv", chunk.keys());
    params.dk = dk_tensor.data;
    params.dv = dv_tensor.data;
    params.dk_strides = strides_of(dk_tensor);
    params.dv_strides = strides_of(dv_tensor);
  }
  const py::object keep =
      provide_workspace(params, workspace, chunk.device,
                        chunk.device.cuda ? cuda::backward_workspace_bytes(params)
                                          : cpu::backward_workspace_bytes(params));
  params.stream = pointer_to(stream);
  launch(chunk.device, params, &cpu::backward, &cuda::backward);
}

void page_write(py::object k, py::object v, int64_t kv_pool, int64_t kv_slot_bytes,
                py::object slots, int64_t page_begin, int64_t page_end, int64_t page_size,
                py::object num_rows, py::object summary, int64_t stream) {
  const Tensor k_tensor = to_tensor(k, "k", 4);
  const Chunk chunk = chunk_of_keys(k_tensor, page_size);
  const Tensor v_tensor = tensor_like(v, "v", chunk.keys());
  const Shape& shape = chunk.shape;
  const int64_t page_bytes = 2 * shape.kv_heads * page_size * shape.head_dim * size_of(chunk.dtype);
  const Tensor slot_table =
      tensor_like(slots, "slots", chunk.table_slice({shape.batch, Extents::kAny}));
  expect(0 <= page_begin && page_begin <= page_end && page_end <= chunk.blocks(),
         "page_begin, page_end", concat("a range within ", chunk.blocks(), " pages of the chunk"),
         concat(page_begin, ", ", page_end));
  expect(slot_table.shape[1] >= page_end, "slots", concat("entries of ", page_end, " pages"),
         slot_table.shape[1]);
  expect(kv_pool != 0, "kv_pool", "the address of the pool", kv_pool);
  expect(kv_slot_bytes >= page_bytes, "kv_slot_bytes", concat("at least ", page_bytes),
         kv_slot_bytes);
  PageWriteParams params;
  params.shape = shape;
  params.dtype = chunk.dtype;
  params.k = k_tensor.data;
  params.v = v_tensor.data;
  params.k_strides = strides_of(k_tensor);
  params.v_strides = strides_of(v_tensor);
  params.page_begin = page_begin;
  params.page_end = page_end;
  params.kv_pool = pointer_to(kv_pool);
  params.kv_slot_bytes = kv_slot_bytes;
  params.slots = static_cast<const int32_t*>(slot_table.data);
  params.slots_stride = slot_table.strides[0];
  params.num_rows =
      static_cast<const int32_t*>(optional_like(num_rows, "num_rows", chunk.table({shape.batch})));
  if (!summary.is_none()) {
    const Tensor tensor = tensor_like(summary, "summary",
                                      {{shape.batch, Extents::kAny, shape.kv_heads, shape.head_dim},
                                       chunk.device,
                                       element_of(chunk.dtype),
                                       false});
    params.summary = tensor.data;
    params.summary_stride = summary_stride(tensor);
    expect(tensor.shape[1] >= page_end, "summary", concat("rows of ", page_end, " pages"),
           tensor.shape[1]);
  }
  params.stream = pointer_to(stream);
  launch(chunk.device, params, &cpu::page_write, &cuda::page_write);
}

void page_gradient_read(py::object dk, py::object dv, int64_t dkv_pool, int64_t dkv_unit_bytes,
                        py::object dkv_table, const std::string& dkv_dtype, int64_t page_begin,
                        int64_t page_end, int64_t page_size, double scale, int64_t stream) {
  const Tensor dk_tensor = to_tensor(dk, "dk", 4);
  const Chunk chunk = chunk_of_keys(dk_tensor, page_size);
  const Tensor dv_tensor = tensor_like(dv, "dv", chunk.keys());
  const Tensor table = to_tensor(dkv_table, "dkv_table", 3);
  expect(0 <= page_begin && page_begin <= page_end && page_end <= chunk.blocks(),
         "page_begin, page_end", concat("a range within ", chunk.blocks(), " pages of the chunk"),
         concat(page_begin, ", ", page_end));
  expect(table.shape[1] >= page_end, "dkv_table", concat("entries of ", page_end, " pages"),
         table.shape[1]);
  PageGradientReadParams params;
  params.shape = chunk.shape;
  params.dtype = chunk.dtype;
  params.grads =
      gradients_of(chunk, dkv_pool, dkv_unit_bytes, dkv_table,
                   chunk.table_slice({chunk.shape.batch, Extents::kAny, 2}), dkv_dtype, 0);
  params.table_stride = table.strides[0] / 2;
  params.page_begin = page_begin;
  params.page_end = page_end;
  params.scale = scale;
  params.dk = dk_tensor.data;
  params.dv = dv_tensor.data;
  params.dk_strides = strides_of(dk_tensor);
  params.dv_strides = strides_of(dv_tensor);
  params.stream = pointer_to(stream);
  launch(chunk.device, params, &cpu::page_gradient_read, &cuda::page_gradient_read);
}

ScoreKind score_kind(const std::string& kind) {
  if (kind == "block_mean") return ScoreKind::kBlockMean;
  if (kind == "token_softmax") return ScoreKind::kTokenSoftmax;
  throw InvalidArgument(concat("kind: expected block_mean or token_softmax, got ", kind));
}

void page_score(py::object q, py::object summary, py::object scores, const std::string& kind,
                int64_t num_past, int64_t page_size, py::object first_key, py::object num_keys,
                py::object workspace, int64_t stream) {
  const Tensor q_tensor = to_tensor(q, "q", 4), summary_tensor = to_tensor(summary, "summary", 4);
  Chunk chunk;
  chunk.device = q_tensor.device;
  chunk.dtype = q_tensor.dtype();
  chunk.shape = {q_tensor.shape[0], q_tensor.shape[1], summary_tensor.shape[2],
                 q_tensor.shape[2], q_tensor.shape[3], page_size};
  const Shape& shape = chunk.shape;
  expect(page_size > 0, "page_size", "a number above 0", page_size);
  expect(num_past >= 0, "num_past", "0 or more tokens", num_past);
  expect(shape.kv_heads > 0 && shape.query_heads % shape.kv_heads == 0, "q",
         concat("heads in groups for ", shape.kv_heads, " kv heads"), shape.query_heads);
  check(q_tensor, chunk.queries());
  check(summary_tensor, {{shape.batch, Extents::kAny, shape.kv_heads, shape.head_dim},
                         chunk.device,
                         element_of(chunk.dtype),
                         false});
  const int64_t pages = ceil_div(num_past, page_size);
  expect(summary_tensor.shape[1] >= pages, "summary", concat("rows of ", pages, " pages"),
         summary_tensor.shape[1]);
  const Tensor scores_tensor = tensor_like(scores, "scores",
                                           {{shape.batch, chunk.blocks(), Extents::kAny, pages},
                                            chunk.device,
                                            chunk.statistics_element(),
                                            true});
  expect(scores_tensor.shape[2] == 1 || scores_tensor.shape[2] == shape.kv_heads, "scores",
         concat("1 or ", shape.kv_heads, " heads"), scores_tensor.shape[2]);
  PageScoreParams params;
  params.shape = shape;
  params.visibility = chunk.visibility(0, first_key, num_keys);
  params.dtype = chunk.dtype;
  params.kind = score_kind(kind);
  params.q = q_tensor.data;
  params.q_strides = strides_of(q_tensor);
  params.summary = summary_tensor.data;
  params.summary_stride = summary_stride(summary_tensor);
  params.num_tokens = num_past;
  params.score_heads = scores_tensor.shape[2];
  params.scores = scores_tensor.data;
  const py::object keep =
      provide_workspace(params, workspace, chunk.device,
                        chunk.device.cuda ? cuda::page_score_workspace_bytes(params)
                                          : cpu::page_score_workspace_bytes(params));
  params.stream = pointer_to(stream);
  launch(chunk.device, params, &cpu::page_score, &cuda::page_score);
}

void page_select(py::object scores, py::object selection, int64_t budget, int64_t sink_pages,
                 int64_t recent_pages, int64_t stream) {
  const Tensor scores_tensor = to_tensor(scores, "scores", 4);
  const bool real =
      scores_tensor.element == Element::kFloat32 || scores_tensor.element == Element::kFloat64;
  expect(real, "scores", "float32 or float64", name_of(scores_tensor.element));
  check(scores_tensor, {{Extents::kAny, Extents::kAny, Extents::kAny, Extents::kAny},
                        scores_tensor.device,
                        scores_tensor.element,
                        true});
  expect(budget > 0, "budget", "a number above 0", budget);
  expect(sink_pages >= 0, "sink_pages", "0 or more", sink_pages);
  expect(recent_pages >= 0, "recent_pages", "0 or more", recent_pages);
  const auto& sizes = scores_tensor.shape;
  const Tensor selection_tensor = tensor_like(
      selection, "selection",
      {{sizes[0], sizes[1], sizes[2], budget}, scores_tensor.device, Element::kInt32, true});
  PageSelectParams params;
  params.rows = sizes[0] * sizes[1] * sizes[2];
  params.num_pages = sizes[3];
  params.budget = budget;
  params.sink_pages = sink_pages;
  params.recent_pages = recent_pages;
  params.dtype = scores_tensor.dtype();
  params.scores = scores_tensor.data;
  params.selection = static_cast<int32_t*>(selection_tensor.data);
  params.stream = pointer_to(stream);
  launch(scores_tensor.device, params, &cpu::page_select, &cuda::page_select);
}

}  // namespace

void bind_attention(py::module_& module) {
  using py::arg;
  const py::none none;
  module.def("attention_forward", &attention_forward, py::kw_only(), arg("q"), arg("k"), arg("v"),
             arg("o"), arg("lse"), arg("scale"), arg("page_size"), arg("window") = 0,
             arg("first_key") = none, arg("num_keys") = none, arg("kv_pool") = 0,
             arg("kv_slot_bytes") = 0, arg("kv_num_slots") = 0, arg("block_table") = none,
             arg("num_past") = 0, arg("page_begin") = 0, arg("page_end") = 0,
             arg("selection") = none, arg("own_chunk") = true, arg("first_wave") = true,
             arg("last_wave") = true, arg("acc") = none, arg("max") = none, arg("sum") = none,
             arg("stream") = 0);
  module.def("attention_backward", &attention_backward, py::kw_only(), arg("q"), arg("k"), arg("v"),
             arg("o"), arg("d_o"), arg("lse"), arg("dq"), arg("dk"), arg("dv"), arg("delta"),
             arg("scale"), arg("page_size"), arg("d_lse") = none, arg("window") = 0,
             arg("first_key") = none, arg("num_keys") = none, arg("kv_pool") = 0,
             arg("kv_slot_bytes") = 0, arg("kv_num_slots") = 0, arg("block_table") = none,
             arg("num_past") = 0, arg("page_begin") = 0, arg("page_end") = 0,
             arg("selection") = none, arg("own_chunk") = true, arg("first_wave") = true,
             arg("last_wave") = true, arg("dkv_pool") = 0, arg("dkv_unit_bytes") = 0,
             arg("dkv_table") = none, arg("dkv_dtype") = "float32", arg("rounding_seed") = 0,
             arg("deterministic") = true, arg("dq_acc") = none, arg("workspace") = none,
             arg("stream") = 0);
  module.def("page_write", &page_write, py::kw_only(), arg("k"), arg("v"), arg("kv_pool"),
             arg("kv_slot_bytes"), arg("slots"), arg("page_begin"), arg("page_end"),
             arg("page_size"), arg("num_rows") = none, arg("summary") = none, arg("stream") = 0);
  module.def("page_gradient_read", &page_gradient_read, py::kw_only(), arg("dk"), arg("dv"),
             arg("dkv_pool"), arg("dkv_unit_bytes"), arg("dkv_table"), arg("dkv_dtype"),
             arg("page_begin"), arg("page_end"), arg("page_size"), arg("scale") = 1.0,
             arg("stream") = 0);
  module.def("page_score", &page_score, py::kw_only(), arg("q"), arg("summary"), arg("scores"),
             arg("kind"), arg("num_past"), arg("page_size"), arg("first_key") = none,
             arg("num_keys") = none, arg("workspace") = none, arg("stream") = 0);
  module.def("page_select", &page_select, py::kw_only(), arg("scores"), arg("selection"),
             arg("budget"), arg("sink_pages") = 0, arg("recent_pages") = 0, arg("stream") = 0);
  module.def(
      "force_attention",
      [](const std::optional<std::string>& name) {
        cuda::force(name ? std::optional(cuda::implementation_from(*name)) : std::nullopt);
      },
      arg("implementation"),
      "Makes CUDA calls use sm90, sm80 or plain; None chooses by device and shape.");
  module.def("set_num_threads", &cpu::set_num_threads, arg("count"));
  module.def("num_threads", &cpu::num_threads);
  module.def("cpu_instruction_set", &cpu::instruction_set);
}

}  // namespace oomb::bindings

// The page operations of _C: writing a chunk's pages, reading back their gradients, choosing pages.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <optional>
#include <string>

#include "attention/cpu/cpu.h"
#include "attention/dispatch.h"
#include "attention/params.h"
#include "bindings/attention_arguments.h"
#include "bindings/nouns.h"
#include "common/checked.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

using namespace attention;

void check_own_pages(const Geometry& geometry, int64_t begin, int64_t end) {
  expect(0 <= begin && begin <= end && end <= geometry.blocks(), "page_begin, page_end",
         Parts("a range within ", geometry.blocks(), " pages of the chunk"),
         Parts(begin, ", ", end));
}

void page_write(py::object k, py::object v, const nouns::PagePool& pool, py::object slots,
                int64_t page_begin, int64_t page_end, int64_t page_size, py::object num_rows,
                py::object summary, int64_t stream) {
  const Tensor k_tensor = to_tensor(k, "k", 4);
  const Geometry geometry = geometry_of_keys(k_tensor, page_size);
  const Tensor v_tensor = tensor_like(v, "v", geometry.keys());
  const Shape& shape = geometry.shape;
  const Tensor slot_table =
      tensor_like(slots, "slots", geometry.table_slice({shape.batch, Extents::kAny}));
  check_own_pages(geometry, page_begin, page_end);
  expect(slot_table.shape[1] >= page_end, "slots", Parts("entries of ", page_end, " pages"),
         slot_table.shape[1]);
  if (page_begin == page_end) return;
  pool.check_pages("pool", geometry);
  const auto* entries = static_cast<const int32_t*>(slot_table.data);
  for (int64_t b = 0; !geometry.device.cuda && b < shape.batch; ++b) {
    check_entries("slots", entries + b * slot_table.strides[0] + page_begin, page_end - page_begin,
                  pool.num_slots);
  }
  PageWriteParams params;
  params.shape = shape;
  params.dtype = geometry.dtype;
  params.k = k_tensor.data;
  params.v = v_tensor.data;
  params.k_strides = strides_of(k_tensor);
  params.v_strides = strides_of(v_tensor);
  params.page_begin = page_begin;
  params.page_end = page_end;
  params.kv_pool = pointer_to(pool.address);
  params.kv_slot_bytes = pool.slot_bytes;
  params.slots = entries;
  params.slots_stride = slot_table.strides[0];
  params.num_rows = static_cast<const int32_t*>(
      optional_like(num_rows, "num_rows", geometry.table({shape.batch})));
  if (!summary.is_none()) {
    const Tensor tensor = tensor_like(summary, "summary",
                                      {{shape.batch, Extents::kAny, shape.kv_heads, shape.head_dim},
                                       geometry.device,
                                       element_of(geometry.dtype),
                                       false});
    params.summary = tensor.data;
    params.summary_stride = summary_stride(tensor);
    expect(tensor.shape[1] >= page_end, "summary", Parts("rows of ", page_end, " pages"),
           tensor.shape[1]);
  }
  params.stream = pointer_to(stream);
  launch(geometry.device, params, &cpu::page_write, &cuda::page_write);
}

void page_gradient_read(py::object dk, py::object dv, const nouns::GradientPages& gradients,
                        int64_t page_begin, int64_t page_end, int64_t page_size, double scale,
                        int64_t stream) {
  const Tensor dk_tensor = to_tensor(dk, "dk", 4);
  const Geometry geometry = geometry_of_keys(dk_tensor, page_size);
  const Tensor dv_tensor = tensor_like(dv, "dv", geometry.keys());
  const Tensor table = to_tensor(gradients.table, "gradients.table", 3);
  check_own_pages(geometry, page_begin, page_end);
  PageGradientReadParams params;
  params.shape = geometry.shape;
  params.dtype = geometry.dtype;
  params.grads =
      gradients.of(geometry, geometry.table_slice({geometry.shape.batch, Extents::kAny, 2}),
                   page_begin, page_end);
  if (page_begin == page_end) return;
  expect(table.shape[0] == 1 || table.strides[0] % 2 == 0, "gradients.table",
         "rows that are whole pairs apart", table.strides[0]);
  params.table_stride = table.strides[0] / 2;
  params.page_begin = page_begin;
  params.page_end = page_end;
  params.scale = scale;
  params.dk = dk_tensor.data;
  params.dv = dv_tensor.data;
  params.dk_strides = strides_of(dk_tensor);
  params.dv_strides = strides_of(dv_tensor);
  params.stream = pointer_to(stream);
  launch(geometry.device, params, &cpu::page_gradient_read, &cuda::page_gradient_read);
}

ScoreKind score_kind(const std::string& name) {
  std::string names;
  for (size_t kind = 0; kind < std::size(kScoreNames); ++kind) {
    if (name == kScoreNames[kind]) return static_cast<ScoreKind>(kind);
    names += concat(kind == 0 ? "" : " or ", kScoreNames[kind]);
  }
  throw InvalidArgument(concat("kind: expected ", names, ", got ", name));
}

void page_score(py::object q, py::object summary, py::object scores, const std::string& kind,
                int64_t num_past, int64_t page_size,
                const std::optional<nouns::Visibility>& visibility, py::object workspace,
                int64_t stream) {
  const Tensor q_tensor = to_tensor(q, "q", 4), summary_tensor = to_tensor(summary, "summary", 4);
  Geometry geometry;
  geometry.device = q_tensor.device;
  geometry.dtype = q_tensor.dtype();
  geometry.shape = {q_tensor.shape[0], q_tensor.shape[1], summary_tensor.shape[2],
                    q_tensor.shape[2], q_tensor.shape[3], page_size};
  const Shape& shape = geometry.shape;
  check_shape(shape);
  check_past("num_past", num_past);
  check(q_tensor, geometry.queries());
  check(summary_tensor, {{shape.batch, Extents::kAny, shape.kv_heads, shape.head_dim},
                         geometry.device,
                         element_of(geometry.dtype),
                         false});
  const int64_t pages = ceil_div(num_past, page_size);
  expect(summary_tensor.shape[1] >= pages, "summary", Parts("rows of ", pages, " pages"),
         summary_tensor.shape[1]);
  const Tensor scores_tensor = tensor_like(scores, "scores",
                                           {{shape.batch, geometry.blocks(), Extents::kAny, pages},
                                            geometry.device,
                                            geometry.statistics_element(),
                                            true});
  expect(scores_tensor.shape[2] == 1 || scores_tensor.shape[2] == shape.kv_heads, "scores",
         Parts("1 or ", shape.kv_heads, " heads"), scores_tensor.shape[2]);
  PageScoreParams params;
  params.shape = shape;
  if (visibility) {
    expect(visibility->window == 0, "visibility", "no window, which no score knows",
           visibility->window);
    params.visibility = visibility->of(geometry);
  }
  params.dtype = geometry.dtype;
  params.kind = score_kind(kind);
  params.q = q_tensor.data;
  params.q_strides = strides_of(q_tensor);
  params.summary = summary_tensor.data;
  params.summary_stride = summary_stride(summary_tensor);
  params.num_tokens = num_past;
  params.score_heads = scores_tensor.shape[2];
  params.scores = scores_tensor.data;
  const py::object keep =
      provide_workspace(params, workspace, geometry.device,
                        geometry.device.cuda ? cuda::page_score_workspace_bytes(params)
                                             : cpu::page_score_workspace_bytes(params));
  params.stream = pointer_to(stream);
  launch(geometry.device, params, &cpu::page_score, &cuda::page_score);
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
  params.rows = checked_product("scores", sizes[0], sizes[1], sizes[2]);
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

void bind_attention_pages(py::module_& module) {
  using py::arg;
  const py::none none;
  module.def("page_write", &page_write, py::kw_only(), arg("k"), arg("v"), arg("pool"),
             arg("slots"), arg("page_begin"), arg("page_end"), arg("page_size"),
             arg("num_rows") = none, arg("summary") = none, arg("stream") = 0);
  module.def("page_gradient_read", &page_gradient_read, py::kw_only(), arg("dk"), arg("dv"),
             arg("gradients"), arg("page_begin"), arg("page_end"), arg("page_size"),
             arg("scale") = 1.0, arg("stream") = 0);
  module.def("page_score", &page_score, py::kw_only(), arg("q"), arg("summary"), arg("scores"),
             arg("kind"), arg("num_past"), arg("page_size"), arg("visibility") = none,
             arg("workspace") = none, arg("stream") = 0);
  module.def("page_select", &page_select, py::kw_only(), arg("scores"), arg("selection"),
             arg("budget"), arg("sink_pages") = 0, arg("recent_pages") = 0, arg("stream") = 0);
}

}  // namespace oomb::bindings

// The nouns as classes of _C.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/nouns.h"
#include "bindings/nouns_docs.h"

namespace py = pybind11;

namespace oomb::bindings {

using py::arg;
using namespace nouns;

void bind_nouns(py::module_& module) {
  const py::none none;
  const py::kw_only named;
  py::class_<PagePool>(module, "PagePool", kPagePoolDoc)
      .def(py::init<int64_t, int64_t, int64_t>(), named, arg("address"), arg("slot_bytes"),
           arg("num_slots"))
      .def_readonly("address", &PagePool::address)
      .def_readonly("slot_bytes", &PagePool::slot_bytes)
      .def_readonly("num_slots", &PagePool::num_slots);
  py::class_<Visibility>(module, "Visibility", kVisibilityDoc)
      .def(py::init<int64_t, py::object, py::object>(), named, arg("window") = 0,
           arg("first_key") = none, arg("num_keys") = none)
      .def_readonly("window", &Visibility::window)
      .def_readonly("first_key", &Visibility::first_key)
      .def_readonly("num_keys", &Visibility::num_keys);
  py::class_<Chunk>(module, "Chunk", kChunkDoc)
      .def(py::init<py::object, py::object, py::object, double, double,
                    const std::optional<Visibility>&>(),
           named, arg("q"), arg("k"), arg("v"), arg("scale"), arg("cap") = 0.0,
           arg("visibility") = none)
      .def_readonly("q", &Chunk::q)
      .def_readonly("k", &Chunk::k)
      .def_readonly("v", &Chunk::v)
      .def_readonly("scale", &Chunk::scale)
      .def_readonly("cap", &Chunk::cap)
      .def_readonly("visibility", &Chunk::visibility);
  py::class_<Wave>(module, "Wave", kWaveDoc)
      .def(py::init<int64_t, int64_t, bool, bool, std::optional<bool>>(), named, arg("begin") = 0,
           arg("end") = 0, arg("first") = true, arg("last") = true, arg("own_chunk") = none)
      .def_readonly("begin", &Wave::begin)
      .def_readonly("end", &Wave::end)
      .def_readonly("first", &Wave::first)
      .def_readonly("last", &Wave::last)
      .def_readonly("own_chunk", &Wave::own_chunk);
  py::class_<PastPages>(module, "PastPages", kPastPagesDoc)
      .def(py::init<int64_t, const std::optional<PagePool>&, py::object, int64_t, py::object>(),
           named, arg("page_size"), arg("pool") = none, arg("block_table") = none,
           arg("num_tokens") = 0, arg("selection") = none)
      .def_readonly("page_size", &PastPages::page_size)
      .def_readonly("pool", &PastPages::pool)
      .def_readonly("block_table", &PastPages::block_table)
      .def_readonly("num_tokens", &PastPages::num_tokens)
      .def_readonly("selection", &PastPages::selection);
  py::class_<GradientPages>(module, "GradientPages", kGradientPagesDoc)
      .def(py::init<const PagePool&, py::object, const std::string&, uint64_t>(), named,
           arg("pool"), arg("table"), arg("dtype") = "float32", arg("rounding_seed") = 0)
      .def_readonly("pool", &GradientPages::pool)
      .def_readonly("table", &GradientPages::table)
      .def_property_readonly("dtype",
                             [](const GradientPages& self) { return oomb::name_of(self.dtype); })
      .def_readonly("rounding_seed", &GradientPages::rounding_seed);
  py::class_<SoftmaxState>(module, "SoftmaxState", kSoftmaxStateDoc)
      .def(py::init<py::object, py::object, py::object>(), named, arg("acc"), arg("max"),
           arg("sum"))
      .def_readonly("acc", &SoftmaxState::acc)
      .def_readonly("max", &SoftmaxState::max)
      .def_readonly("sum", &SoftmaxState::sum);
  py::class_<BackwardState>(module, "BackwardState", kBackwardStateDoc)
      .def(py::init<py::object, py::object>(), named, arg("delta"), arg("dq_acc") = none)
      .def_readonly("delta", &BackwardState::delta)
      .def_readonly("dq_acc", &BackwardState::dq_acc);
  py::class_<Output>(module, "Output", kOutputDoc)
      .def(py::init<py::object, py::object>(), named, arg("o") = none, arg("lse") = none)
      .def_readonly("o", &Output::o)
      .def_readonly("lse", &Output::lse);
  py::class_<ChunkGradients>(module, "ChunkGradients", kChunkGradientsDoc)
      .def(py::init<py::object, py::object, py::object>(), named, arg("dq") = none,
           arg("dk") = none, arg("dv") = none)
      .def_readonly("dq", &ChunkGradients::dq)
      .def_readonly("dk", &ChunkGradients::dk)
      .def_readonly("dv", &ChunkGradients::dv);
}

}  // namespace oomb::bindings

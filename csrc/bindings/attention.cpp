// The attention operations of _C: nouns in, parameter structs out, one launch each.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "attention/cpu/cpu.h"
#include "attention/dispatch.h"
#include "attention/params.h"
#include "bindings/attention_arguments.h"
#include "bindings/nouns.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

using namespace attention;

// No wave: all pages in one launch.
nouns::Wave wave_of(const nouns::PastPages& past, const std::optional<nouns::Wave>& wave) {
  return wave ? *wave : past.whole();
}

// State that waves hand on, where a launch is not the only one.
template <typename State>
const State& required(const State* state, const char* expected) {
  expect(state != nullptr, "state", expected, "None");
  return *state;
}

void attention_forward(const nouns::Chunk& chunk, const nouns::PastPages& past,
                       const nouns::Output& output, const std::optional<nouns::Wave>& wave,
                       const nouns::SoftmaxState* state, py::object workspace, int64_t stream) {
  ForwardParams params;
  const Geometry geometry = chunk.fill(params, past.page_size);
  const nouns::Wave part = wave_of(past, wave);
  part.fill(params);
  params.past = past.of(geometry, part);
  if (!part.first || !part.last) {
    params.state = required(state, "a SoftmaxState, as there are other waves").of(geometry);
  }
  if (part.last) {
    const Tensor o = tensor_like(output.o, "o", geometry.queries());
    params.o = o.data;
    params.o_strides = strides_of(o);
    params.lse = tensor_like(output.lse, "lse", geometry.statistics()).data;
  }
  if (geometry.empty()) return;
  const py::object keep = provide_workspace(
      params, workspace, geometry.device,
      geometry.device.cuda && !workspace.is_none() ? cuda::forward_workspace_bytes(params) : 0);
  params.stream = pointer_to(stream);
  launch(geometry.device, params, &cpu::forward, &cuda::forward);
}

void attention_backward(const nouns::Chunk& chunk, const nouns::PastPages& past,
                        const nouns::Output& output, const nouns::Output& d_output,
                        const nouns::ChunkGradients& d_chunk, const nouns::BackwardState& state,
                        const nouns::GradientPages* gradients,
                        const std::optional<nouns::Wave>& wave, bool deterministic,
                        py::object workspace, int64_t stream) {
  BackwardParams params;
  const Geometry geometry = chunk.fill(params, past.page_size);
  const nouns::Wave part = wave_of(past, wave);
  part.fill(params);
  params.past = past.of(geometry, part);
  if (gradients != nullptr) {
    const int64_t columns = params.past.table_stride;
    params.grads = gradients->of(geometry, geometry.table({geometry.shape.batch, columns, 2}),
                                 part.begin, part.end);
  }
  params.deterministic = deterministic;
  const Tensor o = tensor_like(output.o, "o", geometry.queries());
  const Tensor d_o = tensor_like(d_output.o, "d_output.o", geometry.queries());
  params.o = o.data;
  params.d_o = d_o.data;
  params.o_strides = strides_of(o);
  params.do_strides = strides_of(d_o);
  params.lse = tensor_like(output.lse, "lse", geometry.statistics()).data;
  params.d_lse = optional_like(d_output.lse, "d_output.lse", geometry.statistics());
  if (!part.first || !part.last) {
    params.dq_acc = tensor_like(state.dq_acc, "dq_acc", geometry.accumulator()).data;
  }
  params.delta = tensor_like(state.delta, "delta", geometry.statistics()).data;
  if (part.last) {
    const Tensor dq = tensor_like(d_chunk.dq, "dq", geometry.queries());
    params.dq = dq.data;
    params.dq_strides = strides_of(dq);
  }
  if (part.own_chunk) {
    const Tensor dk = tensor_like(d_chunk.dk, "dk", geometry.keys());
    const Tensor dv = tensor_like(d_chunk.dv, "dv", geometry.keys());
    params.dk = dk.data;
    params.dv = dv.data;
    params.dk_strides = strides_of(dk);
    params.dv_strides = strides_of(dv);
  }
  if (geometry.empty()) return;
  const py::object keep =
      provide_workspace(params, workspace, geometry.device,
                        geometry.device.cuda ? cuda::backward_workspace_bytes(params)
                                             : cpu::backward_workspace_bytes(params));
  params.stream = pointer_to(stream);
  launch(geometry.device, params, &cpu::backward, &cuda::backward);
}

// A RuntimeWarning at the line that made the call; an exception where the filters say so.
void warn(const std::string& text) {
  const py::gil_scoped_acquire locked;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

}  // namespace

void bind_nouns(py::module_& module);
void bind_attention_pages(py::module_& module);

void bind_attention(py::module_& module) {
  using py::arg;
  const py::none none;
  bind_nouns(module);
  module.def("attention_forward", &attention_forward, py::kw_only(), arg("chunk"), arg("past"),
             arg("output"), arg("wave") = none, arg("state") = none, arg("workspace") = none,
             arg("stream") = 0);
  module.def("attention_backward", &attention_backward, py::kw_only(), arg("chunk"), arg("past"),
             arg("output"), arg("d_output"), arg("d_chunk"), arg("state"), arg("gradients") = none,
             arg("wave") = none, arg("deterministic") = true, arg("workspace") = none,
             arg("stream") = 0);
  bind_attention_pages(module);
  cuda::set_warning_hook(warn);
  module.def("force_attention", &cuda::force, arg("implementation"),
             "Makes CUDA calls use sm90, sm80, sm80-small or plain; None chooses.");
  module.def("attention_key_tile", &cuda::key_tile,
             "Tokens at whose multiples waves of pages must end on a GPU, so that where they end "
             "changes no bit of a result.");
  module.def("attention_page_sizes", &cuda::fast_page_sizes,
             "Tokens of a page that every fast kernel for GPUs takes.");
  module.def(
      "attention_head_dim", &cuda::padded_head_dim, arg("head_dim"), arg("capability"),
      "Head dim of at least that size, and twice that at most, for which kernels are fast on "
      "a GPU of this compute capability (90 for 9.0), in 16 bits; that size if there is none.");
  module.def("set_num_threads", &cpu::set_num_threads, arg("count"));
  module.def("num_threads", &cpu::num_threads);
  module.def("cpu_instruction_set", &cpu::instruction_set);
}

}  // namespace oomb::bindings

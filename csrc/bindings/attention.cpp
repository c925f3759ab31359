// The attention operations of _C: tensors in, parameter structs out, one launch each.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "attention/cpu/cpu.h"
#include "attention/dispatch.h"
#include "attention/params.h"
#include "bindings/attention_arguments.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

using namespace attention;

void attention_forward(py::object q, py::object k, py::object v, py::object o, py::object lse,
                       double scale, int64_t page_size, int64_t window, py::object first_key,
                       py::object num_keys, int64_t kv_pool, int64_t kv_slot_bytes,
                       int64_t kv_num_slots, py::object block_table, int64_t num_past,
                       int64_t page_begin, int64_t page_end, py::object selection, bool own_chunk,
                       bool first_wave, bool last_wave, py::object acc, py::object max,
                       py::object sum, py::object workspace, int64_t stream) {
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
  if (chunk.empty()) return;
  const py::object keep = provide_workspace(
      params, workspace, chunk.device,
      chunk.device.cuda && !workspace.is_none() ? cuda::forward_workspace_bytes(params) : 0);
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
                        int64_t dkv_pool, int64_t dkv_unit_bytes, int64_t dkv_num_units,
                        py::object dkv_table, const std::string& dkv_dtype, uint64_t rounding_seed,
                        bool deterministic, py::object dq_acc, py::object workspace,
                        int64_t stream) {
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
  params.grads = gradients_of(chunk, {dkv_pool, dkv_unit_bytes, dkv_num_units, dkv_table,
                                      chunk.table({chunk.shape.batch, params.past.table_stride, 2}),
                                      dkv_dtype, rounding_seed, page_begin, page_end});
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
  if (chunk.empty()) return;
  const py::object keep =
      provide_workspace(params, workspace, chunk.device,
                        chunk.device.cuda ? cuda::backward_workspace_bytes(params)
                                          : cpu::backward_workspace_bytes(params));
  params.stream = pointer_to(stream);
  launch(chunk.device, params, &cpu::backward, &cuda::backward);
}

// A RuntimeWarning at the line that made the call; an exception where the filters say so.
void warn(const std::string& text) {
  const py::gil_scoped_acquire locked;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

}  // namespace

void bind_attention_pages(py::module_& module);

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
             arg("workspace") = none, arg("stream") = 0);
  module.def("attention_backward", &attention_backward, py::kw_only(), arg("q"), arg("k"), arg("v"),
             arg("o"), arg("d_o"), arg("lse"), arg("dq"), arg("dk"), arg("dv"), arg("delta"),
             arg("scale"), arg("page_size"), arg("d_lse") = none, arg("window") = 0,
             arg("first_key") = none, arg("num_keys") = none, arg("kv_pool") = 0,
             arg("kv_slot_bytes") = 0, arg("kv_num_slots") = 0, arg("block_table") = none,
             arg("num_past") = 0, arg("page_begin") = 0, arg("page_end") = 0,
             arg("selection") = none, arg("own_chunk") = true, arg("first_wave") = true,
             arg("last_wave") = true, arg("dkv_pool") = 0, arg("dkv_unit_bytes") = 0,
             arg("dkv_num_units") = 0, arg("dkv_table") = none, arg("dkv_dtype") = "float32",
             arg("rounding_seed") = 0, arg("deterministic") = true, arg("dq_acc") = none,
             arg("workspace") = none, arg("stream") = 0);
  bind_attention_pages(module);
  cuda::set_warning_hook(warn);
  module.def("force_attention", &cuda::force, arg("implementation"),
             "Makes CUDA calls use sm90, sm80 or plain; None chooses by device and shape.");
  module.def("attention_key_tile", &cuda::key_tile,
             "Tokens at whose multiples waves of pages must end on a GPU, so that where they end "
             "changes no bit of a result.");
  module.def("set_num_threads", &cpu::set_num_threads, arg("count"));
  module.def("num_threads", &cpu::num_threads);
  module.def("cpu_instruction_set", &cpu::instruction_set);
}

}  // namespace oomb::bindings

// Sums of parameter gradients in _C.

#include <pybind11/pybind11.h>

#include "bindings/attention_arguments.h"
#include "sums/rounded_add.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

void rounded_add(py::object sum, py::object addend, uint64_t seed, int64_t stream) {
  const Tensor total = to_tensor(sum, "sum", 1);
  check(total, {{Extents::kAny}, total.device, Element::kBFloat16, true});
  const Tensor values = to_tensor(addend, "addend", 1);
  const Element element = values.element == Element::kBFloat16 ? values.element : Element::kFloat32;
  check(values, {{total.shape[0]}, total.device, element, true});
  expect(total.shape[0] < int64_t{1} << 33, "sum", "fewer than 2^33 elements", total.shape[0]);
  sums::RoundedAddParams params;
  params.elements = total.shape[0];
  params.sum = total.data;
  params.addend = values.data;
  params.addend_dtype = values.dtype();
  params.seed = seed;
  params.stream = pointer_to(stream);
  params.device = total.device.index;
  launch(total.device, params, &sums::rounded_add, &sums::cuda::rounded_add);
}

}  // namespace

void bind_sums(py::module_& module) {
  module.def("rounded_add", &rounded_add, py::kw_only(), py::arg("sum"), py::arg("addend"),
             py::arg("seed"), py::arg("stream") = 0,
             "Add to a bfloat16 sum with stochastic rounding.\n\n"
             "sum: [n] bfloat16; addend: [n] float32 or bfloat16. The noise is a function of seed\n"
             "and element alone.");
}

}  // namespace oomb::bindings

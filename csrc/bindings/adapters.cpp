// What passes between the products of adapters, in _C.

#include <pybind11/pybind11.h>

#include "adapters/row_factor.h"
#include "bindings/attention_arguments.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

void row_factor(py::object halves, py::object factor, double scale, int64_t stream) {
  const Tensor sums = to_tensor(halves, "halves", 2);
  expect(sums.shape[1] % 2 == 0, "halves", "an even number of columns", sums.shape[1]);
  const int64_t rows = sums.shape[0], rank = sums.shape[1] / 2;
  check(sums, {{rows, 2 * rank}, sums.device, Element::kFloat32, true});
  const Tensor result = to_tensor(factor, "factor", 2);
  check(result, {{rows, 3 * rank}, sums.device, Element::kBFloat16, true});
  adapters::RowFactorParams params;
  params.rows = rows;
  params.rank = rank;
  params.halves = static_cast<const float*>(sums.data);
  params.factor = static_cast<uint16_t*>(result.data);
  params.scale = static_cast<float>(scale);
  params.stream = pointer_to(stream);
  params.device = sums.device.index;
  launch(sums.device, params, &adapters::row_factor, &adapters::cuda::row_factor);
}

}  // namespace

void bind_adapters(py::module_& module) {
  module.def(
      "row_factor", &row_factor, py::kw_only(), py::arg("halves"), py::arg("factor"),
      py::arg("scale"), py::arg("stream") = 0,
      "Values in float as the left factor of a product of bfloat16 numbers.\n\n"
      "halves: [rows, 2 r] float32, whose right half is added to the left one, and the sum\n"
      "multiplied by scale: u. factor: [rows, 3 r] bfloat16, gets u1, u1 and u2 beside each\n"
      "other, where u1 is u rounded to nearest and u2 what was left, rounded too.");
}

}  // namespace oomb::bindings

#include <pybind11/pybind11.h>

namespace oomb::bindings {

void bind_adapters(pybind11::module_& module);
void bind_exceptions(pybind11::module_& module);
void bind_build_info(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_paging(pybind11::module_& module);
void bind_peers(pybind11::module_& module);
void bind_sums(pybind11::module_& module);

}  // namespace oomb::bindings

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native core of oomb: kernels, page manager, copy engine.";
  oomb::bindings::bind_exceptions(module);
  oomb::bindings::bind_build_info(module);
  oomb::bindings::bind_attention(module);
  oomb::bindings::bind_paging(module);
  oomb::bindings::bind_peers(module);
  oomb::bindings::bind_sums(module);
  oomb::bindings::bind_adapters(module);
}

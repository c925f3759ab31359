// What was built and what this machine offers, for `oomb doctor` and for tests.

#include <pybind11/pybind11.h>

#include "common/devices.h"

namespace oomb::bindings {

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = OOMB_VERSION;
  info["compiler"] = OOMB_COMPILER;
  info["build_type"] = OOMB_BUILD_TYPE;
  info["cuda"] = static_cast<bool>(OOMB_WITH_CUDA);
  info["cuda_compiler"] = OOMB_CUDA_COMPILER;
  info["cuda_architectures"] = py::str(OOMB_CUDA_ARCHITECTURES).attr("split")();
  return info;
}

py::dict describe(const DeviceInfo& device) {
  py::dict info;
  info["index"] = device.index;
  info["name"] = device.name;
  info["capability"] = py::make_tuple(device.major, device.minor);
  info["multiprocessors"] = device.multiprocessors;
  info["total_bytes"] = device.total_bytes;
  info["problem"] = device.problem;
  return info;
}

py::dict cuda_status_dict() {
  CudaStatus status;
  {
    const py::gil_scoped_release release;  // starting the driver takes a second
    status = cuda_status();
  }
  py::list devices;
  for (const DeviceInfo& device : status.devices) devices.append(describe(device));
  py::dict info;
  info["built"] = status.built;
  info["runtime_version"] = status.runtime_version;
  info["driver_version"] = status.driver_version;
  info["devices"] = devices;
  info["problem"] = status.problem;
  return info;
}

}  // namespace

void bind_build_info(py::module_& module) {
  module.def("build_info", &build_info, "Version, compiler and CUDA architectures of this build.");
  module.def("cuda_status", &cuda_status_dict,
             "Runtime and driver versions, devices, and what keeps them from being used.");
}

}  // namespace oomb::bindings

// Exceptions of the core as Python sees them:
//
//   InvalidArgument  -> ValueError
//   OutOfMemory      -> oomb.errors.OutOfMemoryError(message, needed_bytes=, available_bytes=)
//   other Error      -> oomb.errors.Error
//
// oomb.errors is imported when something is thrown, not with this module: it imports torch, and the
// module must load without.

#include <pybind11/pybind11.h>

#include <exception>

#include "common/error.h"

namespace oomb::bindings {

namespace py = pybind11;

namespace {

void raise(const char* type_name, const py::dict& attributes, const char* message) {
  const py::object type = py::module_::import("oomb.errors").attr(type_name);
  const py::object instance = type(message, **attributes);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const OutOfMemory& error) {
    py::dict attributes;
    attributes["needed_bytes"] = error.needed_bytes();
    attributes["available_bytes"] = error.available_bytes();
    raise("OutOfMemoryError", attributes, error.what());
  } catch (const Error& error) {
    raise("Error", py::dict(), error.what());
  }
}

}  // namespace

void bind_exceptions(py::module_&) { py::register_local_exception_translator(translate); }

}  // namespace oomb::bindings

#include "bindings/tensor.h"

#include <algorithm>
#include <sstream>

#include "bindings/dlpack.h"
#include "common/checked.h"
#include "common/error.h"

namespace py = pybind11;

namespace oomb::bindings {
namespace {

Element element_of(const dlpack::Tensor& view) {
  if (view.type_lanes != 1) return Element::kOther;
  if (view.type_code == dlpack::kInt && view.type_bits == 32) return Element::kInt32;
  if (view.type_code == dlpack::kUInt && view.type_bits == 8) return Element::kUInt8;
  if (view.type_code == dlpack::kBFloat && view.type_bits == 16) return Element::kBFloat16;
  if (view.type_code != dlpack::kFloat) return Element::kOther;
  if (view.type_bits == 64) return Element::kFloat64;
  if (view.type_bits == 32) return Element::kFloat32;
  return view.type_bits == 16 ? Element::kFloat16 : Element::kOther;
}

Tensor from_view(const dlpack::Tensor& view, const char* name, int ndim) {
  expect(view.ndim == ndim, name, Parts(ndim, " dimensions"), view.ndim);
  expect(view.device_type == dlpack::kCpu || view.device_type == dlpack::kCuda, name,
         "a tensor on cpu or cuda", Parts("DLPack device type ", view.device_type));
  Tensor tensor;
  tensor.name = name;
  tensor.data = static_cast<char*>(view.data) + view.byte_offset;
  tensor.device = {view.device_type == dlpack::kCuda,
                   view.device_type == dlpack::kCuda ? view.device_index : 0};
  tensor.element = element_of(view);
  tensor.ndim = ndim;
  const int64_t bytes = std::max(1, view.type_bits / 8);
  expect(reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(bytes) == 0, name,
         Parts("memory aligned to its elements of ", bytes, " bytes"), tensor.data);
  // Without the zeros: a tensor of no elements may name sizes that no other could have.
  int64_t elements = bytes;
  int64_t contiguous = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    tensor.shape[i] = view.shape[i];
    tensor.strides[i] = view.strides != nullptr ? view.strides[i] : contiguous;
    elements = checked_product(name, elements, std::max<int64_t>(view.shape[i], 1));
    contiguous *= view.shape[i];
  }
  return tensor;
}

// The function table of the object's type, null where it offers none we can read. Tensors of one
// call share their type, so the last answer is kept.
const dlpack::ExchangeApi* exchange_api(py::handle object) {
  static PyTypeObject* last_type = nullptr;
  static const dlpack::ExchangeApi* last_api = nullptr;
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (type == last_type) return last_api;
  const dlpack::ExchangeApi* api = nullptr;
  const py::handle type_object(reinterpret_cast<PyObject*>(type));
  const py::object capsule = py::getattr(type_object, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->major_version != 1) api = api->previous;
  }
  Py_INCREF(type);  // keeps the address from being taken by another type
  last_type = type;
  last_api = api;
  return api;
}

// Through the Python method, for libraries without the table. The producer orders nothing: the
// caller of a kernel passes the stream.
Tensor from_capsule(py::handle object, const char* name, int ndim) {
  expect(py::hasattr(object, "__dlpack__"), name, "a tensor", Py_TYPE(object.ptr())->tp_name);
  py::object source = py::reinterpret_borrow<py::object>(object);
  if (py::hasattr(source, "detach")) source = source.attr("detach")();
  const py::object capsule = source.attr("__dlpack__")();
  auto* managed =
      static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  return from_view(managed->tensor, name, ndim);
}

std::string list(const int64_t* values, int count) {
  std::ostringstream text;
  text << "[";
  for (int i = 0; i < count; ++i) {
    text << (i > 0 ? ", " : "");
    values[i] == Extents::kAny ? text << "*" : text << values[i];
  }
  text << "]";
  return text.str();
}

}  // namespace

std::string name_of(const Device& device) {
  return device.cuda ? concat("cuda:", device.index) : "cpu";
}

const char* name_of(Element element) {
  switch (element) {
    case Element::kFloat64: return "float64";
    case Element::kFloat32: return "float32";
    case Element::kFloat16: return "float16";
    case Element::kBFloat16: return "bfloat16";
    case Element::kInt32: return "int32";
    case Element::kUInt8: return "uint8";
    case Element::kOther: break;
  }
  return "another type";
}

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return Element::kFloat64;
    case DType::kFloat32: return Element::kFloat32;
    case DType::kFloat16: return Element::kFloat16;
    case DType::kBFloat16: return Element::kBFloat16;
  }
  return Element::kOther;
}

DType Tensor::dtype() const {
  switch (element) {
    case Element::kFloat64: return DType::kFloat64;
    case Element::kFloat32: return DType::kFloat32;
    case Element::kFloat16: return DType::kFloat16;
    case Element::kBFloat16: return DType::kBFloat16;
    case Element::kInt32:
    case Element::kUInt8:
    case Element::kOther: break;
  }
  throw InvalidArgument(
      concat(name, ": expected float64, float32, float16 or bfloat16, got ", name_of(element)));
}

void check(const Tensor& tensor, const Expected& expected) {
  const int ndim = expected.shape.ndim;
  expect(tensor.ndim == ndim, tensor.name, Parts(ndim, " dimensions"), tensor.ndim);
  if (tensor.device != expected.device) {
    expect(false, tensor.name, concat("a tensor on ", name_of(expected.device)),
           name_of(tensor.device));
  }
  expect(tensor.element == expected.element, tensor.name, name_of(expected.element),
         name_of(tensor.element));
  const int64_t* shape = expected.shape.sizes.data();
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == Extents::kAny || shape[i] == tensor.shape[i]) continue;
    expect(false, tensor.name, concat("shape ", list(shape, ndim)),
           list(tensor.shape.data(), ndim));
  }
  const int64_t* end = tensor.shape.data() + ndim;
  if (std::find(tensor.shape.data(), end, 0) != end) return;  // nothing to stride over
  int64_t stride = 1;
  const int first = !expected.contiguous ? ndim - 1 : expected.strided_rows ? 1 : 0;
  for (int i = ndim - 1; i >= first; --i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != stride) {
      expect(false, tensor.name,
             expected.contiguous ? "contiguous memory" : "a contiguous last dimension",
             concat("strides ", list(tensor.strides.data(), ndim)));
    }
    stride *= tensor.shape[i];
  }
}

Tensor to_tensor(py::handle object, const char* name, int ndim) {
  if (const dlpack::ExchangeApi* api = exchange_api(object)) {
    dlpack::Tensor view;
    if (api->view_of_object(object.ptr(), &view) == 0) return from_view(view, name, ndim);
    PyErr_Clear();  // the method below says what is wrong, or detaches
  }
  return from_capsule(object, name, ndim);
}

std::optional<Tensor> to_optional_tensor(py::handle object, const char* name, int ndim) {
  if (object.is_none()) return std::nullopt;
  return to_tensor(object, name, ndim);
}

}  // namespace oomb::bindings

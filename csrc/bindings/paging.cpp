#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "bindings/paging_docs.h"
#include "bindings/shared_manager.h"
#include "common/error.h"
#include "offload/cpu_page_manager.h"
#include "paging/page_manager.h"
#if OOMB_WITH_CUDA
#include "memory/cuda/fault_injection.h"
#include "offload/cuda/cuda_page_manager.h"
#include "offload/cuda/slot_kernels.h"
#endif

namespace py = pybind11;

namespace oomb::bindings {

namespace {

using paging::PageManager;
using Int32Array = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// "cuda" is device 0, "cuda:3" device 3.
int device_index(const std::string& device) {
  const std::string digits = device.size() > 5 ? device.substr(5) : "0";
  const bool ok = digits.find_first_not_of("0123456789") == std::string::npos && digits.size() < 4;
  expect(ok && (device.size() == 4 || device[4] == ':'), "device", "cpu or cuda:<index>", device);
  return std::stoi(digits);
}

void* as_stream(uintptr_t stream) { return reinterpret_cast<void*>(stream); }

std::unique_ptr<SharedManager> make_manager(const std::string& device, int64_t slot_bytes,
                                            int64_t device_slots, int64_t host_slots,
                                            std::optional<uint64_t> copy_delay_seed,
                                            std::optional<uint64_t> shuffle_seed,
                                            const std::optional<std::string>& disabled_wait,
                                            bool poison, bool explicit_host_memory, bool dry,
                                            bool map_device_memory) {
  std::optional<paging::Wait> disabled;
  if (disabled_wait) {
    disabled = paging::wait_named(*disabled_wait);
    expect(disabled.has_value(), "disabled_wait", "the name of a wait (_C.page_waits())",
           *disabled_wait);
  }
  const paging::PageManagerOptions paging = {.disabled_wait = disabled, .poison = poison};
  if (device.starts_with("cuda") && !dry) {
    [[maybe_unused]] const int index = device_index(device);
#if OOMB_WITH_CUDA
    const offload::CudaPageManagerOptions options = {.device = index,
                                                     .slot_bytes = slot_bytes,
                                                     .device_slots = device_slots,
                                                     .host_slots = host_slots,
                                                     .explicit_host_memory = explicit_host_memory,
                                                     .map_device_memory = map_device_memory,
                                                     .copy_delay_seed = copy_delay_seed,
                                                     .shuffle_seed = shuffle_seed,
                                                     .paging = paging};
    return std::make_unique<SharedManager>(offload::make_cuda_page_manager(options), index);
#else
    expect(false, "device", "cpu: this build has no CUDA", device);
#endif
  }
  expect(device == "cpu", "device", dry ? "cpu, for a dry run" : "cpu or cuda:<index>", device);
  // A CPU has neither pinned memory nor a choice of mapping.
  static_cast<void>(explicit_host_memory);
  static_cast<void>(map_device_memory);
  return std::make_unique<SharedManager>(
      offload::make_cpu_page_manager({.slot_bytes = slot_bytes,
                                      .device_slots = device_slots,
                                      .host_slots = host_slots,
                                      .copy_delay_seed = copy_delay_seed,
                                      .shuffle_seed = shuffle_seed,
                                      .dry = dry,
                                      .paging = paging}));
}

std::vector<paging::Visit> to_visits(const Int32Array& rows) {
  expect(rows.ndim() == 2 && rows.shape(1) == 4, "visits",
         "int32 [visits, 4]: layer, kind, first page, last page + 1",
         concat("an array of ", rows.ndim(), " dimensions"));
  std::vector<paging::Visit> visits;
  visits.reserve(static_cast<size_t>(rows.shape(0)));
  const auto view = rows.unchecked<2>();
  for (py::ssize_t i = 0; i < view.shape(0); ++i) {
    visits.push_back(
        {view(i, 0), static_cast<paging::VisitKind>(view(i, 1)), view(i, 2), view(i, 3)});
  }
  return visits;
}

// int32 on a GPU, contiguous, as a DLPack capsule.
py::object device_view(int32_t* data, int device, std::vector<int64_t> shape) {
  struct View {
    dlpack::ManagedTensor managed;
    std::vector<int64_t> shape;
  };
  auto view = std::make_unique<View>();
  view->shape = std::move(shape);
  view->managed.tensor = {.data = data,
                          .device_type = dlpack::kCuda,
                          .device_index = device,
                          .ndim = static_cast<int32_t>(view->shape.size()),
                          .type_code = dlpack::kInt,
                          .type_bits = 32,
                          .type_lanes = 1,
                          .shape = view->shape.data(),
                          .strides = nullptr,
                          .byte_offset = 0};
  view->managed.context = view.get();
  view->managed.release = [](dlpack::ManagedTensor* managed) {
    delete static_cast<View*>(managed->context);
  };
  PyObject* capsule = PyCapsule_New(&view->managed, "dltensor", [](PyObject* object) {
    // Whoever took the tensor over has renamed the capsule and will release it.
    if (PyCapsule_IsValid(object, "dltensor") == 0) return;
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(object, "dltensor"));
    managed->release(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  view.release();  // NOLINT: owned by the capsule now
  return py::reinterpret_steal<py::object>(capsule);
}

// A part of the tables where kernels read it: a NumPy array over the host's, a DLPack capsule over
// the device's. The array shares the tables' ownership, so it stays readable after the call; the
// device's belong to the manager.
py::object table_view(SharedManager& manager, int64_t begin, std::vector<py::ssize_t> shape) {
  using Entries = std::shared_ptr<std::vector<int32_t>>;
  // A call that could not begin has left no tables for its pages.
  const int64_t entries =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
  if (begin + entries > (*manager).tables().size())
    throw Error("no call has begun on this page manager");
  if (manager.device() >= 0) {
    return device_view(const_cast<int32_t*>((*manager).device_tables()) + begin, manager.device(),
                       {shape.begin(), shape.end()});
  }
  const Entries& tables = (*manager).tables().entries();
  const py::capsule owner(new Entries(tables),
                          [](void* shared) { delete static_cast<Entries*>(shared); });
  return py::array_t<int32_t>(std::move(shape), tables->data() + begin, owner);
}

// float64 [2, visits]: seconds that compute stood still in each visit, for loads and for stores.
py::array_t<double> waits_of(SharedManager& manager) {
  const paging::CallTimes times = manager.with([](const PageManager& m) { return m.times(); });
  py::array_t<double> waits({py::ssize_t{2}, std::ssize(times.waits_for_loads())});
  std::ranges::copy(times.waits_for_loads(), waits.mutable_data(0));
  std::ranges::copy(times.waits_for_stores(), waits.mutable_data(1));
  return waits;
}

}  // namespace

#if OOMB_WITH_CUDA
void bind_page_copier(py::module_& module);
#endif

void bind_page_statistics(py::module_& module);

void bind_paging(py::module_& module) {
  bind_page_statistics(module);
  module.def("page_waits", [] {
    std::vector<std::string> names;
    for (const paging::WaitSite& site : paging::kWaitSites) names.emplace_back(site.name);
    return names;
  });
  module.def("smallest_device_slots", &PageManager::smallest_device_slots, py::kw_only(),
             py::arg("batch"), py::arg("grad_slots"), py::arg("backward"),
             py::arg("wave_pages") = 1);

#if OOMB_WITH_CUDA
  bind_page_copier(module);
  module.def("fail_cuda_call", &memory::fail_cuda_call, py::arg("k"));
  module.def("cuda_calls_made", &memory::cuda_calls_made);
  module.def(
      "copy_mapped",
      [](int64_t source, int64_t destination, int64_t words, int64_t stream) {
        expect(source != 0, "source", "an address that the device can read", source);
        expect(destination != 0, "destination", "an address that the device can write",
               destination);
        expect(words >= 0, "words", "0 or more", words);
        offload::launch_copy_mapped(reinterpret_cast<const int32_t*>(source),
                                    reinterpret_cast<int32_t*>(destination), words,
                                    reinterpret_cast<cudaStream_t>(stream));
      },
      py::kw_only(), py::arg("source"), py::arg("destination"), py::arg("words"),
      py::arg("stream"));
#endif

  py::class_<SharedManager>(module, "PageManager", kPageManagerDoc)
      .def(py::init(&make_manager), py::kw_only(), py::arg("device"), py::arg("slot_bytes"),
           py::arg("device_slots"), py::arg("host_slots"), py::arg("copy_delay_seed") = py::none(),
           py::arg("shuffle_seed") = py::none(), py::arg("disabled_wait") = py::none(),
           py::arg("poison") = false, py::arg("explicit_host_memory") = false,
           py::arg("dry") = false, py::arg("map_device_memory") = true)
      .def(
          "begin_call",
          [](SharedManager& self, int64_t num_layers, std::vector<int32_t> pages_per_sequence,
             int grad_slots, const Int32Array& visits, bool exact, int64_t wave_pages,
             std::optional<int64_t> device_slots, int64_t outputs) {
            paging::CallPlan plan{.num_layers = num_layers,
                                  .pages_per_sequence = std::move(pages_per_sequence),
                                  .grad_slots = grad_slots,
                                  .visits = to_visits(visits),
                                  .outputs = outputs,
                                  .exact = exact,
                                  .wave_pages = wave_pages,
                                  .device_slots = device_slots};
            self.with([&](PageManager& manager) { manager.begin_call(std::move(plan)); });
          },
          py::kw_only(), py::arg("num_layers"), py::arg("pages_per_sequence"),
          py::arg("grad_slots"), py::arg("visits"), py::arg("exact") = true,
          py::arg("wave_pages") = 1, py::arg("device_slots") = py::none(), py::arg("outputs") = 0,
          kBeginCallDoc)
      .def(
          "set_visit_pages",
          [](SharedManager& self, int32_t visit, const Int64Array& pages) {
            std::vector<int64_t> list(pages.data(), pages.data() + pages.size());
            self.with(
                [&](PageManager& manager) { manager.set_visit_pages(visit, std::move(list)); });
          },
          py::arg("visit"), py::arg("pages"), kSetVisitPagesDoc)
      .def(
          "end_call", [](SharedManager& self) { self.with([](PageManager& m) { m.end_call(); }); },
          kEndCallDoc)
      .def("close", &SharedManager::close, kCloseDoc)
      .def(
          "pool_address",
          [](SharedManager& self) { return reinterpret_cast<uintptr_t>((*self).pool_address()); },
          kPoolAddressDoc)
      .def_property_readonly("slot_bytes", [](SharedManager& self) { return (*self).slot_bytes(); })
      .def_property_readonly("device_slots",
                             [](SharedManager& self) { return (*self).device_slots(); })
      .def_property_readonly("device_capacity",
                             [](SharedManager& self) { return (*self).device_capacity(); })
      .def_property_readonly("keeps_device_memory",
                             [](SharedManager& self) { return (*self).keeps_device_memory(); })
      .def(
          "block_table",
          [](SharedManager& self, int64_t layer) {
            const paging::PageSpace& space = (*self).space();
            expect(layer >= 0 && layer < space.num_layers(), "layer", "a layer of the call", layer);
            return table_view(self, (*self).tables().kv_entry(layer),
                              {space.batch(), space.max_pages()});
          },
          py::arg("layer"), kBlockTableDoc)
      .def(
          "gradient_table",
          [](SharedManager& self, int64_t layer) {
            const paging::PageSpace& space = (*self).space();
            expect(layer >= 0 && layer < space.num_layers(), "layer", "a layer of the call", layer);
            return table_view(self, (*self).tables().gradient_entry(layer),
                              {space.batch(), space.max_pages(), 2});
          },
          py::arg("layer"), kGradientTableDoc)
      .def(
          "max_create", [](SharedManager& self) { return (*self).max_create(); }, kMaxCreateDoc)
      .def(
          "max_gradients", [](SharedManager& self) { return (*self).max_gradients(); },
          kMaxGradientsDoc)
      .def(
          "max_outputs", [](SharedManager& self) { return (*self).max_outputs(); }, kMaxOutputsDoc)
      .def(
          "write_output",
          [](SharedManager& self, int32_t layer, int64_t begin, int64_t end, uintptr_t source,
             int64_t num_bytes, uintptr_t stream) {
            expect(source != 0, "source", "the address of an output", source);
            self.with([&](PageManager& m) {
              m.write_output(layer, begin, end, reinterpret_cast<const std::byte*>(source),
                             num_bytes, as_stream(stream));
            });
          },
          py::kw_only(), py::arg("layer"), py::arg("begin"), py::arg("end"), py::arg("source"),
          py::arg("num_bytes"), py::arg("stream") = 0, kWriteOutputDoc)
      .def(
          "read_output",
          [](SharedManager& self, int32_t visit, int64_t begin, int64_t end, uintptr_t target,
             int64_t num_bytes, uintptr_t stream) {
            expect(target != 0, "target", "the address of an output", target);
            self.with([&](PageManager& m) {
              m.read_output(visit, begin, end, reinterpret_cast<std::byte*>(target), num_bytes,
                            as_stream(stream));
            });
          },
          py::kw_only(), py::arg("visit"), py::arg("begin"), py::arg("end"), py::arg("target"),
          py::arg("num_bytes"), py::arg("stream") = 0, kReadOutputDoc)
      .def(
          "create",
          [](SharedManager& self, int32_t layer, int64_t begin, int64_t end, uintptr_t stream) {
            self.with([&](PageManager& m) { m.create(layer, begin, end, as_stream(stream)); });
          },
          py::arg("layer"), py::arg("page_begin"), py::arg("page_end"), py::arg("stream") = 0,
          kCreateDoc)
      .def(
          "commit",
          [](SharedManager& self, int32_t layer, int64_t begin, int64_t end, uintptr_t stream) {
            self.with([&](PageManager& m) { m.commit(layer, begin, end, as_stream(stream)); });
          },
          py::arg("layer"), py::arg("page_begin"), py::arg("page_end"), py::arg("stream") = 0,
          kCommitDoc)
      .def(
          "create_gradients",
          [](SharedManager& self, int32_t layer, int64_t begin, int64_t end) {
            self.with([&](PageManager& m) { m.create_gradients(layer, begin, end); });
          },
          py::arg("layer"), py::arg("page_begin"), py::arg("page_end"), kCreateGradientsDoc)
      .def(
          "waves",
          [](SharedManager& self, int32_t visit) {
            return self.with([&](PageManager& m) { return m.waves(visit); });
          },
          py::arg("visit"), kWavesDoc)
      .def(
          "own_alone",
          [](SharedManager& self, int32_t visit, int64_t begin, int64_t end) {
            return self.with([&](PageManager& m) { return m.own_alone(visit, begin, end); });
          },
          py::arg("visit"), py::arg("begin"), py::arg("end"), kOwnAloneDoc)
      .def(
          "acquire",
          [](SharedManager& self, int32_t visit, int64_t begin, int64_t end, uintptr_t stream) {
            self.with([&](PageManager& m) { m.acquire(visit, begin, end, as_stream(stream)); });
          },
          py::arg("visit"), py::arg("begin"), py::arg("end"), py::arg("stream") = 0, kAcquireDoc)
      .def(
          "release",
          [](SharedManager& self, int32_t visit, int64_t begin, int64_t end, uintptr_t stream) {
            self.with([&](PageManager& m) { m.release(visit, begin, end, as_stream(stream)); });
          },
          py::arg("visit"), py::arg("begin"), py::arg("end"), py::arg("stream") = 0, kReleaseDoc)
      .def(
          "acquire_gradients",
          [](SharedManager& self, int32_t layer, int64_t begin, int64_t end, uintptr_t stream) {
            self.with(
                [&](PageManager& m) { m.acquire_gradients(layer, begin, end, as_stream(stream)); });
          },
          py::arg("layer"), py::arg("page_begin"), py::arg("page_end"), py::arg("stream") = 0,
          kAcquireGradientsDoc)
      .def(
          "drop",
          [](SharedManager& self, int32_t layer, int64_t begin, int64_t end, bool kv, bool grads,
             uintptr_t stream) {
            self.with(
                [&](PageManager& m) { m.drop(layer, begin, end, kv, grads, as_stream(stream)); });
          },
          py::arg("layer"), py::arg("page_begin"), py::arg("page_end"), py::arg("kv") = true,
          py::arg("grads") = true, py::arg("stream") = 0, kDropDoc)
      .def(
          "stats",
          [](SharedManager& self) {
            return self.with([](const PageManager& m) { return m.statistics(); });
          },
          kStatsDoc)
      .def("waits", &waits_of, kWaitsDoc)
      .def(
          "snapshot",
          [](SharedManager& self) {
            return self.with([](PageManager& manager) { return manager.snapshot(); });
          },
          kSnapshotDoc)
      .def(
          "check_integrity",
          [](SharedManager& self) {
            self.with([](PageManager& manager) { manager.check_integrity(); });
          },
          kCheckIntegrityDoc);
}

}  // namespace oomb::bindings

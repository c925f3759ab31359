#if OOMB_WITH_CUDA

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "common/error.h"
#include "memory/cuda/device_resource.h"
#include "memory/cuda/pinned_memory.h"
#include "memory/slot_pool.h"
#include "offload/cuda/cuda_copy_engine.h"

namespace py = pybind11;

namespace oomb::bindings {

namespace {

using SlotArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// The copy engine and its two memories without a page manager: what bench/page_copy.py measures.
class PageCopier {
 public:
  PageCopier(int device, int64_t slot_bytes, int64_t device_slots, int64_t host_slots,
             int64_t piece_bytes, bool huge_pages, bool batched, bool overlap_hint)
      : device_slots_(checked(slot_bytes, device_slots, "device_slots")),
        host_slots_(checked(slot_bytes, host_slots, "host_slots")),
        device_(memory::make_device_resource(device, device_slots * slot_bytes)),
        host_(memory::make_pinned_memory(device, {.capacity = host_slots * slot_bytes,
                                                  .piece_bytes = piece_bytes,
                                                  .slot_bytes = slot_bytes,
                                                  .huge_pages = huge_pages,
                                                  .explicit_size = true})) {
    device_->commit(device_slots * slot_bytes);
    engine_ = offload::make_cuda_copy_engine({.device = device,
                                              .device_base = device_->base(),
                                              .host_base = host_->base(),
                                              .slot_bytes = slot_bytes,
                                              .batched = batched,
                                              .overlap_hint = overlap_hint});
  }

  // Starts getting host memory in the background.
  void prepare_host() { host_->prepare(host_->capacity()); }
  // Waits for so much of it, or gets it; for all of it by default.
  void commit_host(std::optional<int64_t> bytes) {
    const py::gil_scoped_release release;
    host_->commit(bytes.value_or(host_->capacity()));
  }
  int64_t ready_host_bytes() const { return host_->ready(); }
  void release_host() {
    const py::gil_scoped_release release;
    host_->release();
  }

  void copy(bool to_host, const SlotArray& device_slots, const SlotArray& host_slots) {
    expect(device_slots.size() == host_slots.size(), "host_slots",
           concat(device_slots.size(), " slots"), host_slots.size());
    check_slots("device_slots", device_slots, device_slots_);
    check_slots("host_slots", host_slots, host_slots_);
    std::vector<paging::PageCopy> pages;
    pages.reserve(static_cast<size_t>(device_slots.size()));
    for (py::ssize_t i = 0; i < device_slots.size(); ++i) {
      pages.push_back({device_slots.data()[i], host_slots.data()[i]});
    }
    const py::gil_scoped_release release;
    engine_->copy(to_host ? paging::Lane::kStore : paging::Lane::kLoad, pages);
  }

  void drain() {
    const py::gil_scoped_release release;
    engine_->drain();
  }

 private:
  static int64_t checked(int64_t slot_bytes, int64_t slots, const char* name) {
    memory::check_pool_size(slot_bytes, slots, name);
    return slots;
  }
  static void check_slots(const char* name, const SlotArray& slots, int64_t count) {
    for (py::ssize_t i = 0; i < slots.size(); ++i) {
      const int32_t slot = slots.data()[i];
      expect(slot >= 0 && slot < count, name, concat("slots below ", count), slot);
    }
  }

  int64_t device_slots_, host_slots_;
  std::unique_ptr<memory::MemoryResource> device_;
  std::unique_ptr<memory::PinnedResource> host_;
  std::unique_ptr<paging::CopyEngine> engine_;
};

}  // namespace

void bind_page_copier(py::module_& module) {
  py::class_<PageCopier>(
      module, "PageCopier",
      "Copies slots between a device tier and a pinned host tier, without a page manager: what\n"
      "bench/page_copy.py measures. Slots of both tiers are numbered from 0; ``copy`` moves\n"
      "device_slots[i] to or from host_slots[i], and ``drain`` waits for all copies. Host memory\n"
      "comes with ``commit_host``, in the background after ``prepare_host``.")
      .def(py::init<int, int64_t, int64_t, int64_t, int64_t, bool, bool, bool>(), py::kw_only(),
           py::arg("device"), py::arg("slot_bytes"), py::arg("device_slots"), py::arg("host_slots"),
           py::arg("piece_bytes") = int64_t{1} << 30, py::arg("huge_pages") = true,
           py::arg("batched") = true, py::arg("overlap_hint") = true)
      .def("prepare_host", &PageCopier::prepare_host)
      .def("commit_host", &PageCopier::commit_host, py::arg("bytes") = py::none())
      .def("ready_host_bytes", &PageCopier::ready_host_bytes)
      .def("release_host", &PageCopier::release_host)
      .def("copy", &PageCopier::copy, py::arg("to_host"), py::arg("device_slots"),
           py::arg("host_slots"))
      .def("drain", &PageCopier::drain);
}

}  // namespace oomb::bindings

#endif  // OOMB_WITH_CUDA

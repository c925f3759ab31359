// The counters of a page manager as classes of _C.

#include <pybind11/pybind11.h>

#include "paging/page_manager.h"

namespace py = pybind11;

namespace oomb::bindings {

void bind_page_statistics(py::module_& module) {
  using memory::SlotPoolState;
  using paging::PageStatistics;
  py::class_<SlotPoolState>(module, "SlotPoolState", "How much of a tier there is and is in use.")
      .def_readonly("slot_bytes", &SlotPoolState::slot_bytes)
      .def_readonly("max_slots", &SlotPoolState::max_slots)
      .def_readonly("mapped_slots", &SlotPoolState::mapped_slots)
      .def_readonly("taken_slots", &SlotPoolState::taken_slots)
      .def_readonly("free_slots", &SlotPoolState::free_slots)
      .def_readonly("committed_bytes", &SlotPoolState::committed_bytes)
      .def_readonly("ready_bytes", &SlotPoolState::ready_bytes)
      .def_property_readonly("taken_bytes", &SlotPoolState::taken_bytes);
  py::class_<PageStatistics>(module, "PageStatistics", "Counters of a call, as PageManager.stats.")
      .def_readonly("device_peak_bytes", &PageStatistics::device_peak_bytes)
      .def_readonly("host_peak_bytes", &PageStatistics::host_peak_bytes)
      .def_readonly("h2d_bytes", &PageStatistics::h2d_bytes)
      .def_readonly("d2h_bytes", &PageStatistics::d2h_bytes)
      .def_readonly("h2d_seconds", &PageStatistics::h2d_seconds)
      .def_readonly("d2h_seconds", &PageStatistics::d2h_seconds)
      .def_readonly("loaded_runs", &PageStatistics::loaded_runs)
      .def_readonly("stored_runs", &PageStatistics::stored_runs)
      .def_readonly("exposed_copy_seconds", &PageStatistics::exposed_copy_seconds)
      .def_readonly("exposed_growth_seconds", &PageStatistics::exposed_growth_seconds)
      .def_readonly("hits", &PageStatistics::hits)
      .def_readonly("misses", &PageStatistics::misses)
      .def_readonly("device", &PageStatistics::device)
      .def_readonly("host", &PageStatistics::host);
}

}  // namespace oomb::bindings

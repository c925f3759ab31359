#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace oomb::paging {

// Where the truth about a page is.
//
//              create / first touch
//     free ──────────────────────────▶ dirty ◀──────────────┐
//      ▲                                 │ store issued      │ written
//      │ drop, from any state            ▼                   │
//      │                              storing ──stored──▶ resident
//      │                                 │                 │  ▲
//      │                       slot taken│       slot taken│  │ loaded
//      │                                 ▼                 ▼  │
//      └──────────────────────────── host-only ─────────▶ loading
//                                        ▲  load issued      │ slot taken before use
//                                        └───────────────────┘
enum class Residency : uint8_t { kFree, kLoading, kResident, kDirty, kStoring, kHostOnly };

constexpr int kNumResidencies = 6;

constexpr const char* name_of(Residency state) {
  constexpr std::array<const char*, kNumResidencies> kNames = {"free",  "loading", "resident",
                                                               "dirty", "storing", "host-only"};
  return kNames[static_cast<size_t>(state)];
}

constexpr bool is_legal(Residency from, Residency to) {
  if (to == Residency::kFree) return from != Residency::kFree;
  switch (from) {
    case Residency::kFree: return to == Residency::kDirty;
    case Residency::kLoading: return to == Residency::kResident || to == Residency::kHostOnly;
    case Residency::kResident: return to == Residency::kDirty || to == Residency::kHostOnly;
    case Residency::kDirty: return to == Residency::kStoring;
    case Residency::kStoring: return to == Residency::kResident || to == Residency::kHostOnly;
    case Residency::kHostOnly: return to == Residency::kLoading;
  }
  return false;
}

constexpr bool on_device(Residency state) {
  return state != Residency::kFree && state != Residency::kHostOnly;
}

}  // namespace oomb::paging

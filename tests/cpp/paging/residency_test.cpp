#include "paging/residency.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace oomb::paging {
namespace {

TEST(Residency, ExactlyTheDrawnTransitionsAreLegal) {
  using enum Residency;
  const std::set<std::pair<Residency, Residency>> drawn = {
      {kFree, kDirty},       {kDirty, kStoring},     {kStoring, kResident}, {kStoring, kHostOnly},
      {kResident, kDirty},   {kResident, kHostOnly}, {kHostOnly, kLoading}, {kLoading, kResident},
      {kLoading, kHostOnly}, {kLoading, kFree},      {kResident, kFree},    {kDirty, kFree},
      {kStoring, kFree},     {kHostOnly, kFree},
  };
  for (int from = 0; from < kNumResidencies; ++from) {
    for (int to = 0; to < kNumResidencies; ++to) {
      const std::pair move(static_cast<Residency>(from), static_cast<Residency>(to));
      EXPECT_EQ(is_legal(move.first, move.second), drawn.contains(move))
          << name_of(move.first) << " to " << name_of(move.second);
    }
  }
}

}  // namespace
}  // namespace oomb::paging

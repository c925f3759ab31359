#include "paging/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace oomb::paging {
namespace {

// The definition, visit by visit.
int32_t next_use_by_search(const PageSpace& space, const Schedule& schedule, PageKind kind,
                           int32_t layer, int64_t position, int32_t after) {
  for (int32_t t = std::max(0, after + 1); t < schedule.size(); ++t) {
    const Visit& visit = schedule[t];
    if (visit.layer != layer || !visit.touches(kind)) continue;
    const int64_t page = position % space.max_pages();
    if (schedule.has_pages(t)) {
      const auto list = schedule.pages(t);
      if (std::find(list.begin(), list.end(), position) != list.end()) return t;
    } else if (visit.first <= page && page < visit.last) {
      return t;
    }
  }
  return schedule.size();
}

TEST(Schedule, NextUseEqualsSearchForRangesAndLists) {
  int heirs = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t limit) {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(limit));
    };
    const PageSpace space(1 + below(3), {5, 9, 7});
    std::vector<Visit> visits;
    const int number = seed % 2 == 0 ? 40 : 400;
    for (int i = 0; i < number; ++i) {
      const int32_t first = below(9);
      visits.push_back({below(space.num_layers()), static_cast<VisitKind>(below(3)), first,
                        first + below(10 - first)});
    }
    Schedule schedule(space, visits);
    for (int round = 0; round < 60; ++round) {
      if (round > 0) {
        std::vector<int64_t> list;
        for (int i = below(8); i > 0; --i) list.push_back(below(space.positions()));
        schedule.set_pages(below(schedule.size()), list);
      }
      for (int query = 0; query < 40; ++query) {
        const auto kind = static_cast<PageKind>(below(2));
        const int32_t layer = below(space.num_layers());
        const int64_t position = below(space.positions());
        const int32_t after = below(schedule.size() + 1) - 1;
        ASSERT_EQ(schedule.next_use(kind, layer, position, after),
                  next_use_by_search(space, schedule, kind, layer, position, after))
            << "seed " << seed << " layer " << layer << " position " << position;
      }
      const int32_t visit = below(schedule.size());
      const int32_t heir = schedule.heir(visit);
      heirs += heir >= 0 ? 1 : 0;
      for (int64_t position = 0; heir >= 0 && position < space.positions(); ++position) {
        const int64_t page = position % space.max_pages();
        if (page < visits[static_cast<size_t>(visit)].first) continue;
        if (page >= visits[static_cast<size_t>(visit)].last) continue;
        ASSERT_EQ(next_use_by_search(space, schedule, PageKind::kKeyValue,
                                     visits[static_cast<size_t>(visit)].layer, position, visit),
                  heir)
            << "seed " << seed << " visit " << visit << " position " << position;
      }
    }
  }
  EXPECT_GT(heirs, 100);
}

TEST(Schedule, PagesReadAreThoseOfSomeRange) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t limit) {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(limit));
    };
    const PageSpace space(3, {5, 9, 0, 7});
    std::vector<Visit> visits;
    for (int i = below(8); i > 0; --i) {
      const int32_t first = below(10);
      visits.push_back(
          {below(2), static_cast<VisitKind>(below(3)), first, first + below(10 - first)});
    }
    const Schedule schedule(space, visits);
    int64_t expected = 0;
    for (int32_t layer = 0; layer < 3; ++layer) {
      space.for_each_position(0, 9, [&](int64_t position) {
        expected += next_use_by_search(space, schedule, PageKind::kKeyValue, layer, position, -1) <
                    schedule.size();
      });
    }
    ASSERT_EQ(schedule.pages_read(), expected) << "seed " << seed;
  }
}

TEST(Schedule, ListsAreOrderedByPageThenSequence) {
  const PageSpace space(1, {4, 4});
  Schedule schedule(space, {{0, VisitKind::kRead, 0, 4}});
  schedule.set_pages(0, {5, 0, 4, 1, 3, 5});
  const auto list = schedule.pages(0);
  EXPECT_EQ(std::vector<int64_t>(list.begin(), list.end()), (std::vector<int64_t>{0, 4, 1, 5, 3}));
  const auto part = schedule.pages_between(list, 1, 3);
  EXPECT_EQ(std::vector<int64_t>(part.begin(), part.end()), (std::vector<int64_t>{1, 5}));
  EXPECT_TRUE(schedule.pages_between(list, 2, 3).empty());
}

TEST(PageSpace, IndexAndIdAreInverse) {
  const PageSpace space(3, {2, 5, 1});
  EXPECT_EQ(space.max_pages(), 5);
  EXPECT_EQ(space.size(), 2 * 3 * 15);
  PageIndex expected = 0;
  for (const PageKind kind : {PageKind::kKeyValue, PageKind::kGradient}) {
    for (int32_t layer = 0; layer < 3; ++layer) {
      for (int32_t position = 0; position < 15; ++position) {
        const PageIndex index = space.index(kind, layer, position);
        ASSERT_EQ(index, expected++);
        const PageId id = space.id(index);
        ASSERT_EQ(id.kind, kind);
        ASSERT_EQ(id.layer, layer);
        ASSERT_EQ(id.sequence * 5 + id.page, position);
        ASSERT_EQ(space.position(index), position);
      }
    }
  }
}

}  // namespace
}  // namespace oomb::paging

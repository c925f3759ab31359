#include "paging/victim_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "common/error.h"

namespace oomb::paging {
namespace {

using memory::kNoSlot;
using memory::Slot;

std::vector<Slot> order_of(const VictimQueue& queue) {
  std::vector<Slot> order;
  for (Slot slot = queue.first(); slot != kNoSlot; slot = queue.after(slot)) order.push_back(slot);
  return order;
}

TEST(VictimQueue, FarthestNextUseGoesFirst) {
  VictimQueue queue;
  queue.reset(4, 100, VictimQueue::Ties::kNewestFirst);
  queue.insert(0, 7);
  queue.insert(1, 99);
  queue.insert(2, 0);
  EXPECT_EQ(order_of(queue), (std::vector<Slot>{1, 0, 2}));
  EXPECT_EQ(queue.nearest_key(), 0);
}

TEST(VictimQueue, TiesGoByAge) {
  VictimQueue queue;
  queue.reset(3, 1, VictimQueue::Ties::kNewestFirst);
  for (Slot slot : {0, 1, 2}) queue.insert(slot, 0);
  EXPECT_EQ(order_of(queue), (std::vector<Slot>{2, 1, 0}));
  queue.reset(3, 1, VictimQueue::Ties::kOldestFirst);
  for (Slot slot : {0, 1, 2}) queue.insert(slot, 0);
  EXPECT_EQ(order_of(queue), (std::vector<Slot>{0, 1, 2}));
}

TEST(VictimQueue, RefusesDoubleInsertAndUnknownRemove) {
  VictimQueue queue;
  queue.reset(2, 2, VictimQueue::Ties::kNewestFirst);
  queue.insert(0, 1);
  EXPECT_THROW(queue.insert(0, 0), Error);
  EXPECT_THROW(queue.remove(1), Error);
}

TEST(VictimQueue, EqualsAMapOfListsUnderRandomUse) {
  for (const auto ties : {VictimQueue::Ties::kNewestFirst, VictimQueue::Ties::kOldestFirst}) {
    std::mt19937_64 random(1);
    VictimQueue queue;
    queue.reset(50, 12, ties);
    std::map<int32_t, std::list<Slot>> model;
    std::map<Slot, int32_t> keys;
    for (int step = 0; step < 5000; ++step) {
      const auto slot = static_cast<Slot>(random() % 50);
      if (random() % 10 == 0) {
        const auto from = static_cast<int32_t>(random() % 12);
        const auto to = static_cast<int32_t>(random() % 12);
        queue.move_all(from, to);
        if (from != to) {
          for (const Slot moved : model[from]) keys[moved] = to;
          auto& target = model[to];
          target.splice(ties == VictimQueue::Ties::kOldestFirst ? target.begin() : target.end(),
                        model[from]);
        }
      } else if (keys.contains(slot)) {
        queue.remove(slot);
        model[keys[slot]].remove(slot);
        keys.erase(slot);
      } else {
        const auto key = static_cast<int32_t>(random() % 12);
        queue.insert(slot, key);
        keys[slot] = key;
        if (ties == VictimQueue::Ties::kNewestFirst) {
          model[key].push_front(slot);
        } else {
          model[key].push_back(slot);
        }
      }
      std::vector<Slot> expected;
      for (auto it = model.rbegin(); it != model.rend(); ++it) {
        expected.insert(expected.end(), it->second.begin(), it->second.end());
      }
      ASSERT_EQ(order_of(queue), expected);
      ASSERT_EQ(queue.size(), static_cast<int64_t>(keys.size()));
      for (const auto& [member, key] : keys) ASSERT_EQ(queue.key(member), key);
      const auto listed = queue.with_key(5);
      ASSERT_EQ(listed.size(), model[5].size());
    }
  }
}

}  // namespace
}  // namespace oomb::paging

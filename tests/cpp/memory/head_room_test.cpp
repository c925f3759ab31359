#include "memory/head_room.h"

#include <gtest/gtest.h>

#include "common/bytes.h"

namespace oomb::memory {
namespace {

TEST(HeadRoom, IsPartOfTheMachinesMemory) {
  const HeadRoom room = read_head_room();
  EXPECT_GT(room.total, 64 * kMiB);
  EXPECT_GT(room.available, 0);
  EXPECT_LT(room.available, room.total);
}

}  // namespace
}  // namespace oomb::memory

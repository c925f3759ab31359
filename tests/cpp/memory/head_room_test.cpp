#include "memory/head_room.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "common/bytes.h"

namespace oomb::memory {
namespace {

TEST(HeadRoom, IsPartOfTheMachinesMemory) {
  const HeadRoom room = read_head_room();
  EXPECT_GT(room.total, 64 * kMiB);
  EXPECT_GT(room.available, 0);
  EXPECT_LT(room.available, room.total);
}

TEST(HeadRoom, IsAskedOfTheSystemWhereProcIsHidden) {
  const HeadRoom room = head_room_of("/nowhere/meminfo", "/nowhere/");
  EXPECT_EQ(room.total / kMiB, read_head_room().total / kMiB);
  EXPECT_GT(room.available, 0);
  EXPECT_LT(room.available, room.total);
}

TEST(HeadRoom, DoesWithoutWhatAFileDoesNotSay) {
  const std::string path = ::testing::TempDir() + "meminfo";
  std::ofstream(path) << "MemTotal\nMemAvailable: none\nMemTotal: 7 kB\nMemAvailable: 3 kB\n";
  const HeadRoom room = head_room_of(path, "/nowhere/");
  EXPECT_EQ(room.available, 0) << "the first line counts";
}

}  // namespace
}  // namespace oomb::memory

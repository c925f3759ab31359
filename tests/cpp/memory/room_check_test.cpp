#include "memory/room_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "common/bytes.h"
#include "common/error.h"

namespace oomb::memory {
namespace {

// A machine with 64 GiB, of which 2 are available; 1 of them is left to others.
struct Machine {
  HeadRoom room = {.available = 2 * kGiB, .total = 64 * kGiB};
  int64_t grows_to = 64 * kGiB;  // a little at each look
  int looks = 0;

  RoomCheck check(bool patient) {
    return RoomCheck({.patient = patient,
                      .patience = std::chrono::milliseconds(20),
                      .interval = std::chrono::milliseconds(1),
                      .read = [this] { return look(); }});
  }
  HeadRoom look() {
    ++looks;
    const int64_t growth = std::min(8 * kMiB, grows_to - room.total);
    room.available += growth;
    room.total += growth;
    return room;
  }
};

TEST(RoomCheck, LeavesRoomForOthers) {
  Machine machine;
  RoomCheck check = machine.check(true);
  check.require(kGiB, 0);
  EXPECT_EQ(machine.looks, 1);
  try {
    check.require(kGiB + 1, 3 * kGiB);
    FAIL() << "there is no room";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.needed_bytes(), kGiB + 1);
    EXPECT_EQ(error.available_bytes(), 2 * kGiB);
    EXPECT_NE(std::string(error.what()).find("beside 3.00 GiB pinned"), std::string::npos)
        << error.what();
  }
}

TEST(RoomCheck, WaitsWhileMemoryGrows) {
  Machine machine;
  machine.grows_to = 72 * kGiB;  // what is needed takes several times the patience
  RoomCheck check = machine.check(true);
  check.require(kGiB + kGiB / 2, 0);
  EXPECT_GT(machine.looks, 1);
  EXPECT_THROW(machine.check(false).require(4 * kGiB, 0), OutOfMemory);
}

// Each refused growth would wait again, and a call that spills meets many.
TEST(RoomCheck, WaitsInVainButOnce) {
  Machine machine;
  RoomCheck check = machine.check(true);
  EXPECT_THROW(check.require(kGiB + kMiB, 0), OutOfMemory);
  EXPECT_GT(machine.looks, 1);
  machine.looks = 0;
  EXPECT_THROW(check.require(kGiB + kMiB, 0), OutOfMemory);
  EXPECT_EQ(machine.looks, 1);

  machine.grows_to = 64 * kGiB + 1;  // there is more in all: it may go on growing
  EXPECT_THROW(check.require(kGiB + kMiB, 0), OutOfMemory);
  EXPECT_GT(machine.looks, 2);
}

TEST(RoomCheck, DoesNotWaitForWhatIsFarAway) {
  Machine machine;
  EXPECT_THROW(machine.check(true).require(3 * kGiB, 0), OutOfMemory);
  EXPECT_EQ(machine.looks, 1);
  EXPECT_THROW(machine.check(false).require(kGiB + kMiB, 0), OutOfMemory);
  EXPECT_EQ(machine.looks, 2);
}

}  // namespace
}  // namespace oomb::memory

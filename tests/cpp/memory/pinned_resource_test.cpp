// Pinned memory: its pieces, what a failure or a release leaves.

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "memory/recorded_pinning.h"

namespace oomb::memory {
namespace {

TEST(PinnedResource, RegistersPieceByPieceFromTheFront) {
  Record record;
  PinnedOptions options = pieces(3);
  options.capacity += 2 * kPage;  // the last piece is short
  PinnedResource resource = make(record, options);
  resource.commit(1);
  EXPECT_GE(resource.committed(), kPiece);
  resource.commit(options.capacity);
  EXPECT_EQ(resource.committed(), options.capacity);
  std::memset(resource.base(), 0x5A, static_cast<size_t>(options.capacity));
  std::byte* next = resource.base();
  for (const auto& [begin, bytes] : record.registered) {
    EXPECT_EQ(begin, next);
    next += bytes;
  }
  EXPECT_EQ(next, resource.base() + options.capacity);
}

TEST(PinnedResource, NoSlotLiesAcrossTwoPieces) {
  for (const int64_t slot : {kPage, 3 * kPage, 5 * kPage, kPiece, 3 * kPage / 2}) {
    Record record;
    PinnedOptions options = pieces(4);
    options.slot_bytes = slot;
    PinnedResource resource = make(record, options);
    resource.commit(resource.capacity());
    for (const auto& [begin, bytes] : record.registered) {
      EXPECT_EQ((begin - resource.base()) % slot, 0) << slot;
      EXPECT_LE(bytes, std::max(kPiece, 2 * slot)) << slot;
    }
  }
}

TEST(PinnedResource, WhatWasReadyBeforeAFailureStaysAndGrowthGoesOn) {
  for (const bool foretold : {false, true}) {
    for (int refused = 0; refused < 6; ++refused) {
      Record record;
      record.refuse_at = static_cast<size_t>(refused);
      record.touch = 5ms;
      PinnedResource resource = make(record, pieces(6));
      if (foretold) resource.prepare(6 * kPiece);
      int64_t committed = 0;
      try {
        for (; committed < 6; ++committed) resource.commit((committed + 1) * kPiece);
        FAIL() << "piece " << refused << " is refused";
      } catch (const OutOfMemory& error) {
        EXPECT_EQ(error.needed_bytes(), kPiece);
        EXPECT_NE(std::string(error.what()).find("not today"), std::string::npos);
      }
      EXPECT_EQ(committed, refused);
      EXPECT_EQ(resource.committed(), refused * kPiece);
      EXPECT_EQ(record.bytes(), refused * kPiece);
      EXPECT_EQ(resident_pages(resource), refused * kPiece / kPage);
      if (refused > 0) std::memset(resource.base(), 1, static_cast<size_t>(refused * kPiece));
      record.refuse_at = 6;
      resource.commit(6 * kPiece);
      EXPECT_EQ(record.bytes(), 6 * kPiece);
    }
  }
}

TEST(PinnedResource, WhatWasRefusedAheadIsAskedForAgain) {
  Record record;
  record.refuse_at = 2;
  PinnedResource resource = make(record, pieces(6));
  resource.prepare(6 * kPiece);
  wait_until_ready(resource, 2 * kPiece);
  wait_until([&] { return record.calls >= 3; });
  resource.commit(2 * kPiece);
  EXPECT_EQ(resource.committed(), 2 * kPiece);
  record.refuse_at = 6;
  try {
    resource.commit(6 * kPiece);
  } catch (const OutOfMemory&) {  // the refusal came while it waited
    resource.commit(6 * kPiece);
  }
  EXPECT_EQ(resource.committed(), 6 * kPiece);
}

TEST(PinnedResource, LeavesOthersTheirRoom) {
  Record record;
  PinnedOptions options = pieces(6);
  std::atomic<int64_t> taken = 0;
  options.read_room = [&] {
    return HeadRoom{.available = 512 * kMiB + 3 * kPiece - taken, .total = kGiB};
  };
  options.touch = [&](std::byte*, int64_t bytes, int) { taken += bytes; };
  PinnedResource resource = make(record, options);
  resource.commit(3 * kPiece);
  try {
    resource.commit(4 * kPiece);
    FAIL() << "there is no room";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.needed_bytes(), kPiece);
    EXPECT_EQ(error.available_bytes(), 512 * kMiB);
  }
}

TEST(PinnedResource, SlowHugePagesAreNotAskedForAgain) {
  for (const bool slow : {false, true}) {
    Record record;
    record.touch = slow ? 700ms : 0ms;  // 500 ms are slow; a busy machine may stall for 100
    PinnedOptions options = pieces(1);
    options.huge_pages = true;
    options.piece_bytes = 64 * kMiB;
    options.capacity = 128 * kMiB;
    options.touch = [](std::byte*, int64_t, int) {};  // this machine's memory may be slow, too
    PinnedResource resource = make(record, options);
    EXPECT_TRUE(resource.asks_for_huge_pages());
    resource.commit(1);
    EXPECT_EQ(resource.asks_for_huge_pages(), !slow);
    resource.commit(options.capacity);
    EXPECT_EQ(resource.asks_for_huge_pages(), !slow);
    resource.release();
    EXPECT_TRUE(resource.asks_for_huge_pages());
  }
}

TEST(PinnedResource, ReleaseUnregistersEverythingAtAnyTime) {
  Record record;
  record.registration = 1ms;
  PinnedResource resource = make(record, pieces(12));
  for (int round = 0; round < 8; ++round) {
    resource.prepare(12 * kPiece);
    if (round % 2 == 0) resource.commit((round + 1) * kPiece);
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    resource.release();
    EXPECT_EQ(record.bytes(), 0);
    EXPECT_EQ(resource.ready(), 0);
    EXPECT_EQ(resource.committed(), 0);
    EXPECT_EQ(resident_pages(resource), 0);
  }
  resource.commit(12 * kPiece);
  EXPECT_EQ(resource.base()[12 * kPiece - 1], std::byte{0});
}

TEST(PinnedResource, DestructionUnregistersWhatIsAhead) {
  Record record;
  {
    PinnedResource resource = make(record, pieces(12));
    resource.prepare(12 * kPiece);
    resource.commit(kPiece);
  }
  EXPECT_EQ(record.bytes(), 0);
}

}  // namespace
}  // namespace oomb::memory

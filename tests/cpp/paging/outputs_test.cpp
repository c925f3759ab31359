// Attention's outputs kept as pages of their own kind.

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "paging/managed_tiers.h"
#include "paging/page_manager.h"

namespace oomb::paging {
namespace {

constexpr Visit read_output(int32_t layer, int32_t first, int32_t last) {
  return {layer, VisitKind::kReadOutput, first, last};
}

CallPlan with_outputs(int64_t layers, std::vector<Visit> visits, int64_t outputs,
                      std::vector<int32_t> pages = {8}) {
  CallPlan call = plan(layers, std::move(pages), std::move(visits));
  call.outputs = outputs;
  return call;
}

std::vector<std::byte> bytes(int64_t size, int first) {
  std::vector<std::byte> result(static_cast<size_t>(size));
  for (size_t i = 0; i < result.size(); ++i) result[i] = std::byte((first + 7 * i) % 251);
  return result;
}

TEST(KeptOutputs, NumbersGoThereAndBack) {
  const PageSpace space(3, {4, 2}, 5);
  EXPECT_EQ(space.size(), 2 * 3 * 8 + 3 * 5);
  for (PageIndex index = 0; index < space.size(); ++index) {
    EXPECT_EQ(space.index(space.kind(index), space.layer(index), space.position(index)), index);
    const PageId id = space.id(index);
    EXPECT_EQ(id.kind, space.kind(index));
    EXPECT_EQ(id.page, space.page(index));
    EXPECT_EQ(id.layer, space.layer(index));
  }
  EXPECT_EQ(space.kind(2 * 3 * 8), PageKind::kOutput);
  EXPECT_EQ(space.kind(2 * 3 * 8 - 1), PageKind::kGradient);
}

TEST(KeptOutputs, BytesComeBackThroughATierTooSmallForOne) {
  constexpr int64_t kPieces = 9;
  constexpr int64_t kSize = kPieces * kSlotBytes - 13;
  ManagedTiers f(4);
  f.manager.begin_call(with_outputs(2, {read_output(1, 0, 9), read_output(0, 0, 9)}, kPieces));
  const std::vector<std::byte> written = bytes(kSize, 3);
  for (int32_t layer = 0; layer < 2; ++layer) {
    const int64_t step = f.manager.max_outputs();
    EXPECT_EQ(step, 4);
    for (int64_t begin = 0; begin < kPieces; begin += step) {
      const int64_t end = std::min(begin + step, kPieces);
      const int64_t size = std::min(kSize - begin * kSlotBytes, (end - begin) * kSlotBytes);
      f.manager.write_output(layer, begin, end, written.data() + begin * kSlotBytes, size, nullptr);
      f.manager.check_integrity();
    }
  }
  for (int32_t visit = 0; visit < 2; ++visit) {
    std::vector<std::byte> found(written.size());
    for (const auto& [begin, end] : f.manager.waves(visit)) {
      const int64_t size = std::min(kSize - begin * kSlotBytes, (end - begin) * kSlotBytes);
      f.manager.read_output(visit, begin, end, found.data() + begin * kSlotBytes, size, nullptr);
      f.manager.check_integrity();
    }
    EXPECT_EQ(found, written);
  }
  EXPECT_EQ(f.tiers.manager->statistics().h2d_bytes % kSlotBytes, 0);
  EXPECT_CONTAINS(f.manager.snapshot(), "\"outputs\": {\"free\": 9");
}

TEST(KeptOutputs, WhatIsReadLaterGoesFirst) {
  ManagedTiers f(12);
  std::vector<Visit> visits = {{0, VisitKind::kRead, 0, 4}, read_output(0, 4, 8)};
  visits.resize(10, {0, VisitKind::kRead, 0, 1});
  visits.push_back(read_output(0, 0, 4));
  f.manager.begin_call(with_outputs(1, visits, 8));
  const std::vector<std::byte> written = bytes(4 * kSlotBytes, 1);
  f.manager.write_output(0, 0, 4, written.data(), 4 * kSlotBytes, nullptr);
  f.manager.write_output(0, 4, 8, written.data(), 4 * kSlotBytes, nullptr);
  f.write(0, 0, 6);  // two slots more than there are
  f.visit(0);
  EXPECT_EQ(f.manager.statistics().h2d_bytes, 0) << "neither keys nor the next output had to go";
  std::vector<std::byte> found(written.size());
  f.manager.read_output(1, 4, 8, found.data(), 4 * kSlotBytes, nullptr);
  EXPECT_EQ(found, written);
  EXPECT_EQ(f.manager.statistics().misses, 0);
}

TEST(KeptOutputs, TheyAreLoadedAheadWherePagesAreAGuess) {
  ManagedTiers f(16);
  CallPlan call = with_outputs(
      1, {{0, VisitKind::kRead, 0, 8}, {0, VisitKind::kRead, 0, 8}, read_output(0, 0, 4)}, 4);
  call.exact = false;
  f.manager.begin_call(call);
  const std::vector<std::byte> written = bytes(4 * kSlotBytes, 1);
  f.manager.write_output(0, 0, 4, written.data(), 4 * kSlotBytes, nullptr);
  f.write(0, 0, 8);
  f.visit(0);
  f.visit(1);
  std::vector<std::byte> found(written.size());
  f.manager.read_output(2, 0, 4, found.data(), 4 * kSlotBytes, nullptr);
  EXPECT_EQ(found, written);
  EXPECT_EQ(f.manager.statistics().misses, 0);
}

TEST(KeptOutputs, MisuseIsRefusedByName) {
  ManagedTiers f(8);
  CallPlan beyond = with_outputs(1, {read_output(0, 0, 5)}, 4);
  EXPECT_CONTAINS(message_of([&] { f.manager.begin_call(beyond); }), "visits: ");
  CallPlan negative = with_outputs(1, {}, -1);
  EXPECT_CONTAINS(message_of([&] { f.manager.begin_call(negative); }), "outputs: ");
  f.manager.begin_call(with_outputs(1, {read_output(0, 0, 2), {0, VisitKind::kRead, 0, 2}}, 4));
  std::vector<std::byte> memory(3 * kSlotBytes);
  const auto write = [&](int32_t layer, int64_t begin, int64_t end, int64_t size) {
    return message_of(
        [&] { f.manager.write_output(layer, begin, end, memory.data(), size, nullptr); });
  };
  EXPECT_CONTAINS(write(0, 0, 2, 2 * kSlotBytes + 1), "num_bytes: ");
  EXPECT_CONTAINS(write(0, 3, 5, kSlotBytes), "outputs: ");
  EXPECT_CONTAINS(write(1, 0, 1, kSlotBytes), "layer: ");
  EXPECT_EQ(write(0, 0, 2, 2 * kSlotBytes), "no error");
  EXPECT_CONTAINS(write(0, 1, 2, kSlotBytes), "kept twice");
  const auto read = [&](int32_t visit, int64_t end, int64_t size) {
    return message_of([&] { f.manager.read_output(visit, 0, end, memory.data(), size, nullptr); });
  };
  EXPECT_CONTAINS(read(1, 2, kSlotBytes), "visit: ");
  EXPECT_CONTAINS(read(0, 2, 3 * kSlotBytes), "num_bytes: ");
  EXPECT_CONTAINS(message_of([&] { f.manager.set_visit_pages(0, {0}); }), "visit: ");
  EXPECT_EQ(read(0, 2, 2 * kSlotBytes), "no error");
  EXPECT_CONTAINS(read(0, 2, 2 * kSlotBytes), "holds nothing");
  f.manager.check_integrity();
}

}  // namespace
}  // namespace oomb::paging

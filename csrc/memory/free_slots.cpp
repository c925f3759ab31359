#include "memory/free_slots.h"

#include <bit>
#include <deque>
#include <random>
#include <utility>
#include <vector>

namespace oomb::memory {

namespace {

class FreedFirst final : public FreeSlots {
 public:
  explicit FreedFirst(std::optional<uint64_t> shuffle_seed)
      : shuffles_(shuffle_seed.has_value()), random_(shuffle_seed.value_or(0)) {}

  void add(Slot slot) override { slots_.push_back(slot); }
  Slot take() override {
    if (shuffles_) std::swap(slots_.front(), slots_[random_() % slots_.size()]);
    const Slot slot = slots_.front();
    slots_.pop_front();
    return slot;
  }
  void clear() override { slots_.clear(); }

 private:
  bool shuffles_;
  std::mt19937_64 random_;
  std::deque<Slot> slots_;
};

// A bit for each slot, and above them a bit for each word of those: where nearly all slots are
// taken, going from free one to free one would read all words in between.
class Round final : public FreeSlots {
 public:
  void add(Slot slot) override {
    const auto index = static_cast<size_t>(slot);
    const size_t word = index / kBits;
    if (word >= free_.size()) free_.resize(word + 1, 0);
    if (word / kBits >= some_free_.size()) some_free_.resize(word / kBits + 1, 0);
    free_[word] |= bit(index);
    some_free_[word / kBits] |= bit(word);
  }

  Slot take() override {
    size_t word = next_ / kBits % free_.size();
    // What is left of the word in which the last one lay; further on, all of a word.
    uint64_t left = free_[word] & from(next_);
    if (left == 0) {
      word = word_with_a_free_slot(word + 1);
      left = free_[word];
    }
    const size_t slot = word * kBits + static_cast<size_t>(std::countr_zero(left));
    free_[word] &= ~bit(slot);
    if (free_[word] == 0) some_free_[word / kBits] &= ~bit(word);
    next_ = slot + 1;
    return static_cast<Slot>(slot);
  }

  void clear() override {
    free_.clear();
    some_free_.clear();
    next_ = 0;
  }

 private:
  static constexpr size_t kBits = 64;
  static uint64_t bit(size_t index) { return uint64_t{1} << (index % kBits); }
  static uint64_t from(size_t index) { return ~(bit(index) - 1); }

  // The first from `word` on, round and round.
  size_t word_with_a_free_slot(size_t word) const {
    size_t part = word / kBits % some_free_.size();
    uint64_t left = some_free_[part] & from(word);
    while (left == 0) {
      part = (part + 1) % some_free_.size();
      left = some_free_[part];
    }
    return part * kBits + static_cast<size_t>(std::countr_zero(left));
  }

  std::vector<uint64_t> free_;       // bit s % 64 of word s / 64: slot s is free
  std::vector<uint64_t> some_free_;  // bit w % 64 of word w / 64: word w of the above is not 0
  size_t next_ = 0;
};

}  // namespace

std::unique_ptr<FreeSlots> make_free_slots(SlotOrder order, std::optional<uint64_t> shuffle_seed) {
  if (order == SlotOrder::kFreedFirst || shuffle_seed) {
    return std::make_unique<FreedFirst>(shuffle_seed);
  }
  return std::make_unique<Round>();
}

}  // namespace oomb::memory

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

class Round final : public FreeSlots {
 public:
  void add(Slot slot) override {
    const auto word = static_cast<size_t>(slot) / kBits;
    if (word >= words_.size()) words_.resize(word + 1, 0);
    words_[word] |= bit(slot);
  }

  Slot take() override {
    size_t word = static_cast<size_t>(next_) / kBits % words_.size();
    // What is left of the word in which the last one lay; further on, all of a word.
    uint64_t left = words_[word] & ~(bit(next_) - 1);
    while (left == 0) {
      word = (word + 1) % words_.size();
      left = words_[word];
    }
    const auto slot = static_cast<Slot>(word * kBits + static_cast<size_t>(std::countr_zero(left)));
    words_[word] &= ~bit(slot);
    next_ = slot + 1;
    return slot;
  }

  void clear() override {
    words_.clear();
    next_ = 0;
  }

 private:
  static constexpr size_t kBits = 64;
  static uint64_t bit(Slot slot) { return uint64_t{1} << (static_cast<size_t>(slot) % kBits); }

  std::vector<uint64_t> words_;  // bit s % 64 of word s / 64: slot s is free
  Slot next_ = 0;
};

}  // namespace

std::unique_ptr<FreeSlots> make_free_slots(SlotOrder order, std::optional<uint64_t> shuffle_seed) {
  if (order == SlotOrder::kFreedFirst || shuffle_seed) {
    return std::make_unique<FreedFirst>(shuffle_seed);
  }
  return std::make_unique<Round>();
}

}  // namespace oomb::memory

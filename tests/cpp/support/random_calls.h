#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "paging/page_manager.h"
#include "support/page_oracle.h"
#include "support/test_tiers.h"

namespace oomb::testing {

// Drives a page manager through random calls. Each is made up beforehand as a script (creations,
// visits over ranges and lists, gradients read and dropped, outputs kept and taken back), because
// the manager wants to know its visits; then it is played, some growths failing on the way. After
// every operation `check` runs. Of ten steps `output_share` are of kept outputs.
class RandomCalls {
 public:
  RandomCalls(TestTiers& tiers, PageOracle& oracle, uint64_t seed, bool inject_failures,
              std::function<void()> check, int64_t output_share = 3);

  // Plays until this many operations are done.
  void run(int64_t operations);

  int64_t operations() const { return operations_; }
  int64_t injected() const { return injected_; }

 private:
  struct Step {
    enum class Kind : uint8_t {
      kCreate,
      kVisit,
      kReadGradients,
      kDrop,
      kKeepOutput,
      kTakeOutput
    } kind = Kind::kCreate;
    int32_t layer = 0;
    int64_t begin = 0;
    int64_t end = 0;
    int32_t visit = -1;
    std::optional<std::vector<int64_t>> list = std::nullopt;
    bool announced = false;  // the list is set before the first step; else just before its visit
  };

  int64_t below(int64_t limit) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit));
  }
  void begin_call();
  void play(const Step& step);
  void visit(const Step& step);
  void script_output(Step& step);
  void keep_output(const Step& step);
  void take_output(const Step& step);
  // Runs one operation; if an injected failure hits it, checks and runs it again without.
  void operate(const std::function<void()>& operation);
  void end_failures();
  template <typename Visitor>
  void for_each(int64_t begin, int64_t end, Visitor visitor) const;

  TestTiers& tiers_;
  PageOracle& oracle_;
  std::mt19937_64 random_;
  bool inject_failures_;
  std::function<void()> check_;
  int64_t operations_ = 0;
  int64_t injected_ = 0;

  paging::PageSpace space_;
  int grad_slots_ = 1;
  int64_t output_share_;
  std::vector<std::vector<Step>> kept_;  // of each layer, outputs that wait for their visit
  std::vector<int32_t> outputs_;         // and pieces until now
  std::vector<paging::Visit> visits_;
  std::vector<Step> script_;
};

}  // namespace oomb::testing

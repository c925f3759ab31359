#include "support/random_calls.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace oomb::testing {

using paging::CallPlan;
using paging::PageIndex;
using paging::PageKind;
using paging::PageManager;
using paging::PageSpace;
using paging::Visit;
using paging::VisitKind;

RandomCalls::RandomCalls(TestTiers& tiers, PageOracle& oracle, uint64_t seed, bool inject_failures,
                         std::function<void()> check, int64_t output_share)
    : tiers_(tiers),
      oracle_(oracle),
      random_(seed),
      inject_failures_(inject_failures),
      check_(std::move(check)),
      output_share_(output_share) {}

void RandomCalls::run(int64_t operations) {
  while (operations_ < operations) {
    begin_call();
    for (const Step& step : script_) {
      if (operations_ >= operations) break;
      play(step);
    }
    tiers_.manager->end_call();
    check_();
  }
}

template <typename Visitor>
void RandomCalls::for_each(int64_t begin, int64_t end, Visitor visitor) const {
  for (int64_t b = 0; b < space_.batch(); ++b) {
    for (int64_t page = begin; page < std::min(end, space_.pages_of(b)); ++page) {
      visitor(b * space_.max_pages() + page);
    }
  }
}

void RandomCalls::begin_call() {
  const int64_t layers = 1 + below(3);
  grad_slots_ = 1 + static_cast<int>(below(2));
  std::vector<int32_t> pages;
  const int64_t most_sequences =
      std::max<int64_t>(1, tiers_.manager->device_slots() / (1 + grad_slots_));
  for (int64_t b = 0; b <= below(std::min<int64_t>(2, most_sequences)); ++b) {
    pages.push_back(static_cast<int32_t>(4 + below(12)));
  }
  space_ = PageSpace(layers, pages);
  visits_.clear();
  script_.clear();

  // Pages [alive_from, written) of a layer exist.
  std::vector<int64_t> alive_from(static_cast<size_t>(layers), 0);
  std::vector<int64_t> written(static_cast<size_t>(layers), 0);
  kept_.assign(static_cast<size_t>(layers), {});
  outputs_.assign(static_cast<size_t>(layers), 0);
  for (int i = 0; i < 150; ++i) {
    Step step;
    step.layer = static_cast<int32_t>(below(layers));
    if (below(10) < output_share_) {
      script_output(step);
      script_.push_back(step);
      continue;
    }
    int64_t& first = alive_from[static_cast<size_t>(step.layer)];
    int64_t& last = written[static_cast<size_t>(step.layer)];
    const int64_t choice = below(10);
    if (last == first || (choice < 3 && last < space_.max_pages())) {
      if (last == space_.max_pages()) continue;
      step.kind = Step::Kind::kCreate;
      step.begin = last;
      last = step.end = std::min(last + 1 + below(3), space_.max_pages());
    } else if (choice < 8) {
      step.kind = Step::Kind::kVisit;
      step.begin = first + below(last - first);
      step.end = step.begin + 1 + below(last - step.begin);
      step.visit = static_cast<int32_t>(visits_.size());
      visits_.push_back({step.layer, below(2) == 0 ? VisitKind::kRead : VisitKind::kAccumulate,
                         static_cast<int32_t>(step.begin), static_cast<int32_t>(step.end)});
      if (below(3) == 0) {
        step.list.emplace();
        for_each(step.begin, step.end, [&](int64_t position) {
          if (below(2) == 0) step.list->push_back(position);
        });
        step.announced = below(2) == 0;
      }
    } else {
      step.kind = choice == 8 ? Step::Kind::kReadGradients : Step::Kind::kDrop;
      step.begin = first;
      step.end = first = std::min(first + 1 + below(2), last);
      if (step.kind == Step::Kind::kReadGradients) {
        step.visit = static_cast<int32_t>(visits_.size());
        visits_.push_back({step.layer, VisitKind::kReadGradient, static_cast<int32_t>(step.begin),
                           static_cast<int32_t>(step.end)});
      }
    }
    script_.push_back(step);
  }
  oracle_.begin_call();
  const CallPlan plan = {.num_layers = layers,
                         .pages_per_sequence = pages,
                         .grad_slots = grad_slots_,
                         .visits = visits_,
                         .outputs = *std::max_element(outputs_.begin(), outputs_.end()),
                         .exact = below(2) == 0};
  operate([&] { tiers_.manager->begin_call(plan); });
  for (int32_t layer = 0; layer < layers; ++layer) {
    const int64_t wanted = below(space_.max_pages() + 1);
    operate([&] { tiers_.manager->create_gradients(layer, 0, wanted); });
  }
  for (const Step& step : script_) {
    if (!step.announced) continue;
    operate([&] { tiers_.manager->set_visit_pages(step.visit, *step.list); });
  }
}

void RandomCalls::play(const Step& step) {
  PageManager& manager = *tiers_.manager;
  switch (step.kind) {
    case Step::Kind::kCreate: {
      for (int64_t page = step.begin; page < step.end;) {
        const int64_t stop = std::min(step.end, page + std::max<int64_t>(1, manager.max_create()));
        operate([&] { manager.create(step.layer, page, stop, nullptr); });
        for_each(page, stop, [&](int64_t position) { oracle_.write_keys(step.layer, position); });
        operate([&] { manager.commit(step.layer, page, stop, nullptr); });
        page = stop;
      }
      return;
    }
    case Step::Kind::kVisit: return visit(step);
    case Step::Kind::kKeepOutput: return keep_output(step);
    case Step::Kind::kTakeOutput: return take_output(step);
    case Step::Kind::kReadGradients: {
      for (int64_t page = step.begin; page < step.end; ++page) {
        operate([&] { manager.acquire_gradients(step.layer, page, page + 1, nullptr); });
        for_each(page, page + 1, [&](int64_t position) {
          if (oracle_.has_gradient(step.layer, position)) {
            oracle_.check_gradient(step.layer, position);
          }
        });
        operate([&] { manager.drop(step.layer, page, page + 1, true, true, nullptr); });
      }
      break;
    }
    case Step::Kind::kDrop:
      operate([&] { manager.drop(step.layer, step.begin, step.end, true, true, nullptr); });
      break;
  }
  for_each(step.begin, step.end, [&](int64_t position) {
    oracle_.forget_keys(step.layer, position);
    oracle_.forget_gradient(step.layer, position);
  });
}

// A new output, or one of those kept: not always the latest. Some are never taken back.
void RandomCalls::script_output(Step& step) {
  const auto layer = static_cast<size_t>(step.layer);
  std::vector<Step>& kept = kept_[layer];
  if (kept.empty() || (below(2) == 0 && kept.size() < 12)) {
    step.kind = Step::Kind::kKeepOutput;
    step.begin = outputs_[layer];
    step.end = outputs_[layer] += static_cast<int32_t>(1 + below(6));
    kept.push_back(step);
    return;
  }
  const auto taken = kept.end() - 1 - (below(3) == 0 ? below(std::ssize(kept)) : 0);
  step = *taken;
  kept.erase(taken);
  step.kind = Step::Kind::kTakeOutput;
  step.visit = static_cast<int32_t>(visits_.size());
  visits_.push_back({step.layer, VisitKind::kReadOutput, static_cast<int32_t>(step.begin),
                     static_cast<int32_t>(step.end)});
}

void RandomCalls::keep_output(const Step& step) {
  PageManager& manager = *tiers_.manager;
  const int64_t slot = manager.slot_bytes();
  oracle_.keep_output(
      step.layer, step.begin, step.end - step.begin, [&](const std::byte* source, int64_t bytes) {
        for (int64_t begin = step.begin; begin < step.end;) {
          const int64_t end = std::min(step.end, begin + manager.max_outputs());
          const int64_t from = (begin - step.begin) * slot;
          const int64_t size = std::min(bytes - from, (end - begin) * slot);
          operate(
              [&] { manager.write_output(step.layer, begin, end, source + from, size, nullptr); });
          begin = end;
        }
      });
}

void RandomCalls::take_output(const Step& step) {
  PageManager& manager = *tiers_.manager;
  const int64_t slot = manager.slot_bytes();
  oracle_.take_output(step.layer, step.begin, [&](std::byte* target, int64_t bytes) {
    for (const auto& [begin, end] : manager.waves(step.visit)) {
      const int64_t to = (begin - step.begin) * slot;
      const int64_t size = std::min(bytes - to, (end - begin) * slot);
      operate([&] { manager.read_output(step.visit, begin, end, target + to, size, nullptr); });
    }
  });
}

void RandomCalls::visit(const Step& step) {
  PageManager& manager = *tiers_.manager;
  if (step.list && !step.announced) {
    operate([&] { manager.set_visit_pages(step.visit, *step.list); });
  }
  const bool accumulates = visits_[static_cast<size_t>(step.visit)].kind == VisitKind::kAccumulate;
  // Mostly in the manager's waves; sometimes all at once, which leaves nothing to its foresight.
  auto waves = manager.waves(step.visit);
  const int64_t slots = (step.end - step.begin) * space_.batch() * (1 + grad_slots_);
  if (slots <= manager.device_slots() && below(2) == 0) waves = {{step.begin, step.end}};
  for (const auto& [first, last] : waves) {
    if (below(2) == 0) manager.own_alone(step.visit, first, last);
    operate([&] { manager.acquire(step.visit, first, last, nullptr); });
    for_each(first, last, [&](int64_t position) {
      const auto& pages = step.list;
      if (pages && std::find(pages->begin(), pages->end(), position) == pages->end()) return;
      oracle_.check_keys(step.layer, position);
      const int64_t entry = manager.tables().gradient_entry(step.layer) + 2 * position;
      if (accumulates && manager.tables()[entry] >= 0) oracle_.add_gradient(step.layer, position);
    });
    operate([&] { manager.release(step.visit, first, last, nullptr); });
  }
}

void RandomCalls::operate(const std::function<void()>& operation) {
  if (inject_failures_ && below(2) == 0) {
    FailureSwitch& failures = below(2) == 0 ? *tiers_.device_failures : *tiers_.host_failures;
    // One growth fails, or every one until the operation is over.
    (below(2) == 0 ? failures.countdown : failures.most_bytes) = below(3);
  }
  try {
    operation();
  } catch (const OutOfMemory&) {
    ++injected_;
    check_();
    end_failures();
    operation();
  }
  end_failures();
  ++operations_;
  check_();
}

void RandomCalls::end_failures() {
  for (const auto& failures : {tiers_.device_failures, tiers_.host_failures}) {
    failures->countdown = failures->most_bytes = -1;
  }
}

}  // namespace oomb::testing

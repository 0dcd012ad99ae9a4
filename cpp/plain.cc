#include "plain.h"

#include <algorithm>
#include <cstdint>
#include <queue>
#include <span>
#include <tuple>
#include <utility>

#include "draft.h"
#include "plain_builder.h"

namespace soapstone {

void Plain::Place(std::int32_t block, const Placement& placement) {
  strategy_[block] = placement;
  is_known_ = false;
}

double Plain::Makespan() {
  if (!is_known_) makespan_s_ = Simulated();
  is_known_ = true;
  return makespan_s_;
}

double Plain::Propose(std::span<const Change> changes, double) {
  ++counters_.built;
  ++counters_.run;
  replaced_.assign(changes.begin(), changes.end());
  for (Change& change : replaced_) std::swap(strategy_[change.block], change.placement);
  proposed_s_ = Simulated();
  return proposed_s_;
}

void Plain::Accept() {
  if (replaced_.empty()) return;
  makespan_s_ = proposed_s_;
  replaced_.clear();
}

void Plain::Reject() {
  for (Change& change : replaced_) std::swap(strategy_[change.block], change.placement);
  replaced_.clear();
}

std::int32_t Plain::task_count() const {
  PlainBuilder builder(problem_, tables_, strategy_);
  return DraftView(builder.Built()).tasks();
}

// The makespan of the strategy, by Algorithm 1.
double Plain::Simulated() {
  PlainBuilder builder(problem_, tables_, strategy_);
  const DraftView draft(builder.Built());
  counters_.simulated += draft.tasks();
  return RunInOrder(draft, problem_.machine.device_count + problem_.machine.link_count).makespan_s;
}

PlainTimes RunInOrder(const DraftView& draft, std::int32_t resources) {
  const std::int32_t count = draft.tasks() + draft.gates();
  std::vector<std::vector<std::int32_t>> next(count);
  std::vector<std::int32_t> waits(count, 0);
  draft.ForEachEdge([&](std::int32_t before, std::int32_t task) {
    next[before].push_back(task);
    ++waits[task];
  });
  using Ready = std::tuple<double, TaskOrder, std::int32_t>;
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> queue;
  std::vector<double> ready_s(count, 0);
  std::vector<double> free_s(resources, 0);
  PlainTimes times{std::vector<double>(draft.tasks(), 0), std::vector<double>(draft.tasks(), 0), 0};
  for (std::int32_t task = 0; task < draft.tasks(); ++task) {
    if (waits[task] == 0) queue.emplace(0.0, draft.order(task), task);
  }
  const auto arrive = [&](const auto& self, std::int32_t task, double end_s) -> void {
    ready_s[task] = std::max(ready_s[task], end_s);
    if (--waits[task] > 0) return;
    if (task < draft.tasks()) {
      queue.emplace(ready_s[task], draft.order(task), task);
    } else {
      for (const std::int32_t after : next[task]) self(self, after, ready_s[task]);
    }
  };
  while (!queue.empty()) {
    const auto [when_s, order, task] = queue.top();
    queue.pop();
    double& until_s = free_s[draft.resource(task)];
    times.start_s[task] = std::max(when_s, until_s);
    until_s = times.end_s[task] = times.start_s[task] + draft.duration_s(task);
    times.makespan_s = std::max(times.makespan_s, until_s);
    for (const std::int32_t after : next[task]) arrive(arrive, after, until_s);
  }
  return times;
}

}  // namespace soapstone

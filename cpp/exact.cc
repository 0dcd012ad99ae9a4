#include "exact.h"

#include <cstdlib>
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace soapstone {

Exact::Exact(const Problem* problem, double tolerance)
    : problem_(problem),
      tolerance_(tolerance),
      space_(problem),
      symmetry_(problem->machine),
      partial_(problem, &space_, &symmetry_),
      engine_(problem, space_.tables()),
      chosen_(problem->blocks.size(), Partial::kUnplaced),
      least_left_out_s_(std::numeric_limits<double>::infinity()),
      best_s_(std::numeric_limits<double>::infinity()),
      entered_(problem->blocks.size() + 1, 0) {
  SetOrder();
  Frame root;
  root.fixing.resize(symmetry_.relabellings().size());
  std::iota(root.fixing.begin(), root.fixing.end(), 0);
  root.bound_s = partial_.Bound(chosen_, std::numeric_limits<double>::infinity());
  frames_.push_back(std::move(root));
}

// The blocks with the most work first, each followed by those that share its weights.
void Exact::SetOrder() {
  std::vector<std::int32_t> by_work(problem_->blocks.size());
  std::iota(by_work.begin(), by_work.end(), 0);
  if (!getenv("SOAP_ORDER")) std::stable_sort(by_work.begin(), by_work.end(), [this](std::int32_t a, std::int32_t b) {
    return partial_.least_work_s(a) > partial_.least_work_s(b);
  });
  std::vector<std::uint8_t> is_listed(problem_->blocks.size(), 0);
  const auto list = [&](std::int32_t block) {
    if (!std::exchange(is_listed[block], 1)) order_.push_back(block);
  };
  for (const std::int32_t block : by_work) {
    list(block);
    for (const std::int32_t sharer : partial_.sharers(block)) list(sharer);
  }
}

void Exact::Offer(const std::vector<Placement>& strategy) { Simulate(strategy); }

std::vector<double> Exact::Bounds(const std::vector<Placement>& strategy) {
  const double no_limit_s = std::numeric_limits<double>::infinity();
  std::vector<std::int32_t> chosen(problem_->blocks.size(), Partial::kUnplaced);
  std::vector<double> bounds_s = {partial_.Bound(chosen, no_limit_s)};
  for (const std::int32_t block : order_) {
    const std::vector<Placement>& domain = partial_.domain(block);
    const auto found = std::find_if(domain.begin(), domain.end(), [&](const Placement& each) {
      return each.layout == strategy[block].layout && each.devices == strategy[block].devices;
    });
    chosen[block] = static_cast<std::int32_t>(found - domain.begin());
    bounds_s.push_back(partial_.Bound(chosen, no_limit_s));
  }
  return bounds_s;
}

void Exact::Simulate(const std::vector<Placement>& strategy) {
  for (const std::vector<std::int32_t>& to : symmetry_.relabellings()) {
    std::vector<Placement> relabelled = strategy;
    for (std::size_t block = 0; block < relabelled.size(); ++block) {
      for (std::int32_t& device : relabelled[block].devices) device = to[device];
      engine_.Place(static_cast<std::int32_t>(block), relabelled[block]);
    }
    ++simulated_;
    const double makespan_s = engine_.Makespan();
    if (makespan_s >= best_s_) continue;
    best_s_ = makespan_s;
    best_ = std::move(relabelled);
  }
}

double Exact::lower_bound_s() const {
  double least_s = std::min(best_s_, least_left_out_s_);
  for (const Frame& frame : frames_) {
    const bool is_bounded = frame.next_choice == partial_.domain(order_[&frame - frames_.data()]).size();
    if (!is_bounded) {
      least_s = std::min(least_s, frame.bound_s);
    } else if (frame.next_child < frame.children.size()) {
      least_s = std::min(least_s, frame.children[frame.next_child].bound_s);
    }
  }
  return least_s;
}

void Exact::BoundNext(Frame* frame) {
  const std::int32_t block = order_[frames_.size() - 1];
  const auto choice = static_cast<std::int32_t>(frame->next_choice++);
  const Placement& placement = partial_.domain(block)[choice];
  if (!symmetry_.IsLeast(frame->fixing, placement.devices)) return;
  chosen_[block] = choice;
  ++bounded_;
  const double bound_s = std::max(frame->bound_s, partial_.Bound(chosen_, best_s_ * (1 - tolerance_)));
  chosen_[block] = Partial::kUnplaced;
  if (IsTooHigh(bound_s)) {
    least_left_out_s_ = std::min(least_left_out_s_, bound_s);
  } else {
    frame->children.push_back({bound_s, choice});
  }
}

// Places the next block of the order, or simulates if all are placed.
void Exact::Enter(double bound_s) {
  ++entered_[frames_.size()];
  if (frames_.size() == order_.size()) {
    std::vector<Placement> strategy;
    for (std::size_t block = 0; block < order_.size(); ++block) {
      strategy.push_back(partial_.domain(static_cast<std::int32_t>(block))[chosen_[block]]);
    }
    Simulate(strategy);
    return;
  }
  Frame frame;
  const std::int32_t block = order_[frames_.size() - 1];
  frame.bound_s = bound_s;
  frame.fixing = symmetry_.Fixing(frames_.back().fixing, partial_.domain(block)[chosen_[block]].devices);
  frames_.push_back(std::move(frame));
}

bool Exact::Step(std::int64_t count) {
  for (const std::int64_t until = bounded_ + count; !frames_.empty() && bounded_ < until;) {
    Frame& frame = frames_.back();
    const std::int32_t block = order_[frames_.size() - 1];
    if (frame.next_choice < partial_.domain(block).size()) {
      BoundNext(&frame);
      if (frame.next_choice < partial_.domain(block).size()) continue;
      std::stable_sort(frame.children.begin(), frame.children.end(),
                       [](const Child& a, const Child& b) { return a.bound_s < b.bound_s; });
    }
    if (frame.next_child == frame.children.size()) {
      chosen_[block] = Partial::kUnplaced;
      frames_.pop_back();
      continue;
    }
    const Child child = frame.children[frame.next_child++];
    if (IsTooHigh(child.bound_s)) {
      least_left_out_s_ = std::min(least_left_out_s_, child.bound_s);
      frame.next_child = frame.children.size();
      continue;
    }
    chosen_[block] = child.choice;
    Enter(child.bound_s);
  }
  return frames_.empty();
}

}  // namespace soapstone

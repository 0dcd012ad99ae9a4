#include "exact.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace soapstone {
namespace {

// [choice] What is below a partial strategy is taken to grow exponentially with the distance of its bound from
// the best: so many times e over the whole distance at hand.
constexpr double kGrowth = 40;

}  // namespace

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
  Frame root;
  root.fixing.resize(symmetry_.relabellings().size());
  std::iota(root.fixing.begin(), root.fixing.end(), 0);
  root.bound_s = partial_.Bound(chosen_, std::numeric_limits<double>::infinity());
  root.left.resize(chosen_.size());
  for (std::int32_t block = 0; block < blocks(); ++block) {
    for (std::size_t choice = 0; choice < partial_.domain(block).size(); ++choice) {
      root.left[block].push_back({root.bound_s, static_cast<std::int32_t>(choice)});
    }
  }
  frames_.push_back(std::move(root));
}

void Exact::Offer(const std::vector<Placement>& strategy) { Simulate(strategy); }

std::vector<double> Exact::Bounds(const std::vector<Placement>& strategy) {
  const double no_limit_s = std::numeric_limits<double>::infinity();
  std::vector<std::int32_t> chosen(chosen_.size(), Partial::kUnplaced);
  std::vector<double> bounds_s = {partial_.Bound(chosen, no_limit_s)};
  for (std::int32_t block = 0; block < blocks(); ++block) {
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
    if (frame.branch < 0) {
      least_s = std::min(least_s, frame.bound_s);
    } else if (frame.next_child < frame.left[frame.branch].size()) {
      least_s = std::min(least_s, frame.left[frame.branch][frame.next_child].bound_s);
    }
  }
  return least_s;
}

// Tries one placement of the frame's block.
void Exact::SortOut(Frame* frame) {
  std::vector<Child>& left = frame->left[frame->block];
  if (frame->placed >= 0 && !partial_.AreNear(frame->placed, frame->block)) {
    frame->at = frame->kept = left.size();  // nothing new is known of it
  }
  if (frame->at < left.size()) {
    Child child = left[frame->at++];
    if (!IsTooHigh(child.bound_s)) {
      chosen_[frame->block] = child.choice;
      child.bound_s = std::max(child.bound_s, partial_.Bound(chosen_, best_s_ * (1 - tolerance_)));
      chosen_[frame->block] = Partial::kUnplaced;
      ++bounded_;
    }
    if (IsTooHigh(child.bound_s)) {
      LeaveOut(child.bound_s);
    } else {
      left[frame->kept++] = child;
    }
  }
  if (frame->at == left.size()) EndBlock(frame);
}

// Goes on to the next block, or to the children.
void Exact::EndBlock(Frame* frame) {
  std::vector<Child>& left = frame->left[frame->block];
  if (chosen_[frame->block] == Partial::kUnplaced) {
    left.resize(frame->kept);
    double least_s = std::numeric_limits<double>::infinity();
    for (const Child& child : left) least_s = std::min(least_s, child.bound_s);
    frame->bound_s = std::max(frame->bound_s, least_s);
  }
  frame->at = frame->kept = 0;
  if (++frame->block == blocks() || IsTooHigh(frame->bound_s)) ChooseBranch(frame);
}

void Exact::ChooseBranch(Frame* frame) {
  if (IsTooHigh(frame->bound_s)) return Leave();
  if (frame->placed < 0) {
    // At the root, what is left may make bounds better.
    std::vector<std::vector<std::int32_t>> left(chosen_.size());
    for (std::size_t block = 0; block < left.size(); ++block) {
      for (const Child& child : frame->left[block]) left[block].push_back(child.choice);
    }
    if (partial_.Restrict(std::move(left))) {
      frame->block = 0;
      return;
    }
  }
  const double slack_s = best_s_ - frame->bound_s;
  double least = std::numeric_limits<double>::infinity();
  for (std::int32_t block = 0; block < blocks(); ++block) {
    if (chosen_[block] != Partial::kUnplaced) continue;
    double size = 0;
    for (const Child& child : frame->left[block]) {
      size += std::exp(kGrowth * (best_s_ - std::max(child.bound_s, frame->bound_s)) / slack_s);
    }
    if (size >= least) continue;
    least = size;
    frame->branch = block;
  }
  std::stable_sort(frame->left[frame->branch].begin(), frame->left[frame->branch].end(),
                   [](const Child& a, const Child& b) { return a.bound_s < b.bound_s; });
}

// Places the frame's branch; simulates if all blocks are placed.
void Exact::Enter(Child child) {
  const Frame& above = frames_.back();
  const std::int32_t block = above.branch;
  chosen_[block] = child.choice;
  if (!known_.insert(partial_.Key(chosen_)).second) {
    chosen_[block] = Partial::kUnplaced;
    return;
  }
  ++entered_[frames_.size()];
  if (frames_.size() == chosen_.size()) {
    std::vector<Placement> strategy;
    for (std::int32_t each = 0; each < blocks(); ++each) strategy.push_back(partial_.domain(each)[chosen_[each]]);
    Simulate(strategy);
    chosen_[block] = Partial::kUnplaced;
    return;
  }
  Frame frame;
  frame.placed = block;
  frame.bound_s = std::max(above.bound_s, child.bound_s);
  frame.fixing = symmetry_.Fixing(above.fixing, partial_.domain(block)[child.choice].devices);
  frame.left = above.left;
  frame.left[block].clear();
  frames_.push_back(std::move(frame));
}

void Exact::Leave() {
  if (frames_.back().placed >= 0) chosen_[frames_.back().placed] = Partial::kUnplaced;
  frames_.pop_back();
}

bool Exact::Step(std::int64_t count) {
  for (const std::int64_t until = bounded_ + count; !frames_.empty() && bounded_ < until;) {
    Frame& frame = frames_.back();
    if (frame.branch < 0) {
      SortOut(&frame);
      continue;
    }
    if (frame.next_child == frame.left[frame.branch].size()) {
      Leave();
      continue;
    }
    const Child child = frame.left[frame.branch][frame.next_child++];
    if (IsTooHigh(child.bound_s)) {
      LeaveOut(child.bound_s);
    } else if (symmetry_.IsLeast(frame.fixing, partial_.domain(frame.branch)[child.choice].devices)) {
      Enter(child);
    }
  }
  return frames_.empty();
}

}  // namespace soapstone

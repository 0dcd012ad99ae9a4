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

// [choice] After the first restart, the search begins anew after so many times as many bounds, up to the last.
constexpr std::int64_t kRestartGrowth = 4;
constexpr std::int64_t kLastRestart = 400'000;

}  // namespace

Exact::Exact(const Problem* problem, double tolerance, DeviceLists lists, std::int64_t first_restart)
    : problem_(problem),
      tolerance_(tolerance),
      space_(problem),
      symmetry_(problem->machine, lists),
      partial_(problem, &space_, &symmetry_, lists),
      engine_(problem, space_.tables()),
      chosen_(problem->blocks.size(), Partial::kUnplaced),
      restart_at_(first_restart),
      weight_(problem->blocks.size(), 1),
      least_left_out_s_(std::numeric_limits<double>::infinity()),
      best_s_(std::numeric_limits<double>::infinity()),
      beat_s_(std::numeric_limits<double>::infinity()),
      entered_(problem->blocks.size() + 1, 0) {
  Frame root;
  root.fixing.resize(symmetry_.relabellings().size());
  std::iota(root.fixing.begin(), root.fixing.end(), 0);
  root.bound_s = partial_.Bound(chosen_, std::numeric_limits<double>::infinity());
  root.left.resize(chosen_.size());
  root.is_sorted.assign(chosen_.size(), 0);
  for (std::int32_t block = blocks(); block-- > 0;) SetDue(&root, block);
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
  double least_s = std::min({best_s_, beat_s_, least_left_out_s_});
  for (const Frame& frame : frames_) {
    if (frame.branch < 0) {
      least_s = std::min(least_s, frame.bound_s);
    } else if (frame.next_child < frame.left[frame.branch].size()) {
      const double next_s = frame.left[frame.branch][frame.next_child].bound_s;
      least_s = std::min(least_s, std::max(frame.bound_s, next_s));
    }
  }
  return least_s;
}

void Exact::SetDue(Frame* frame, std::int32_t block) {
  frame->due.push_back(block);
  frame->is_sorted[block] = 1;
}

// Tries one placement of the block that is due.
void Exact::SortOut(Frame* frame) {
  const std::int32_t block = frame->due.back();
  std::vector<Child>& left = frame->left[block];
  if (frame->at < left.size()) {
    Child child = left[frame->at++];
    if (!IsTooHigh(child.bound_s)) {
      chosen_[block] = child.choice;
      child.bound_s = std::max(child.bound_s, partial_.Bound(chosen_, limit_s()));
      chosen_[block] = Partial::kUnplaced;
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
  const std::int32_t block = frame->due.back();
  std::vector<Child>& left = frame->left[block];
  left.resize(frame->kept);
  double least_s = std::numeric_limits<double>::infinity();
  for (const Child& child : left) least_s = std::min(least_s, child.bound_s);
  frame->bound_s = std::max(frame->bound_s, least_s);
  frame->at = frame->kept = 0;
  frame->due.pop_back();
  if (IsTooHigh(frame->bound_s)) {
    culprit_ = block;
    ++weight_[block];
    if (frame->placed >= 0) ++weight_[frame->placed];
    Leave();
  } else if (frame->due.empty()) {
    ChooseBranch(frame);
  }
}

// Whether the block that made the search turn back is to be sorted out here too. The children that were looked
// into are forgotten, since another block may be placed next; which is why relabellings must not stand for each
// other here: the child that stands for them may be among those left.
bool Exact::Reconsider(Frame* frame) {
  if (frame->next_child < frame->reconsider_at || frame->placed < 0 || frame->fixing.size() > 1) return false;
  frame->reconsider_at = 2 * frame->next_child;
  std::vector<Child>& left = frame->left[frame->branch];
  left.erase(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(frame->next_child));
  frame->next_child = 0;
  frame->branch = -1;
  if (culprit_ >= 0 && chosen_[culprit_] == Partial::kUnplaced && frame->is_sorted[culprit_] == 0) {
    SetDue(frame, culprit_);
  } else {
    ChooseBranch(frame);
  }
  return true;
}

void Exact::ChooseBranch(Frame* frame) {
  if (frame->placed < 0) {
    // At the root, what is left may make bounds better.
    std::vector<std::vector<std::int32_t>> left(chosen_.size());
    for (std::size_t block = 0; block < left.size(); ++block) {
      for (const Child& child : frame->left[block]) left[block].push_back(child.choice);
    }
    if (partial_.Restrict(std::move(left))) {
      for (std::int32_t block = blocks(); block-- > 0;) SetDue(frame, block);
      return;
    }
  }
  if (frame->placed < 0) root_ = *frame;
  const double known_s = std::min(best_s_, beat_s_);
  const double slack_s = known_s - frame->bound_s;
  double least = std::numeric_limits<double>::infinity();
  std::int32_t branch = -1;
  for (std::int32_t block = 0; block < blocks(); ++block) {
    if (chosen_[block] != Partial::kUnplaced) continue;
    double size = 0;
    for (const Child& child : frame->left[block]) {
      size += std::exp(kGrowth * (known_s - std::max(child.bound_s, frame->bound_s)) / slack_s);
    }
    size /= weight_[block];
    if (branch >= 0 && !(size < least)) continue;  // where there is no slack, sizes are no numbers
    least = size;
    branch = block;
  }
  if (frame->placed < 0 && first_ >= 0) branch = first_;
  if (frame->is_sorted[branch] == 0) return SetDue(frame, branch);
  frame->branch = branch;
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
  frame.is_sorted.assign(chosen_.size(), 0);
  for (std::int32_t each = blocks(); each-- > 0;) {
    if (chosen_[each] == Partial::kUnplaced && partial_.AreNear(block, each)) SetDue(&frame, each);
  }
  if (culprit_ >= 0 && chosen_[culprit_] == Partial::kUnplaced) {
    if (frame.is_sorted[culprit_] != 0) std::erase(frame.due, culprit_);
    SetDue(&frame, culprit_);
  }
  if (frame.due.empty()) ChooseBranch(&frame);
  frames_.push_back(std::move(frame));
}

void Exact::Leave() {
  if (frames_.back().placed >= 0) chosen_[frames_.back().placed] = Partial::kUnplaced;
  frames_.pop_back();
}

// Which block to place first is found out by turning back; nothing that was looked into counts.
void Exact::Restart() {
  if (has_settled() || root_.left.empty()) return;
  restart_at_ *= kRestartGrowth;
  BeginAnew();
}

bool Exact::has_settled() const { return restart_at_ > kLastRestart; }

void Exact::Split(std::int32_t block, std::int32_t part, std::int32_t parts) {
  first_ = block;
  part_ = part;
  parts_ = parts;
  restart_at_ = std::numeric_limits<std::int64_t>::max();
  if (!root_.left.empty()) BeginAnew();
}

void Exact::BeginAnew() {
  std::fill(chosen_.begin(), chosen_.end(), Partial::kUnplaced);
  known_.clear();
  frames_.assign(1, root_);
  ChooseBranch(&frames_.back());
}

bool Exact::Step(std::int64_t count) {
  for (const std::int64_t until = bounded_ + count; !frames_.empty() && bounded_ < until;) {
    if (bounded_ >= restart_at_) Restart();
    Frame& frame = frames_.back();
    if (frame.branch < 0) {
      SortOut(&frame);
      continue;
    }
    if (frame.next_child == frame.left[frame.branch].size()) {
      Leave();
      continue;
    }
    if (Reconsider(&frame)) continue;
    const Child child = frame.left[frame.branch][frame.next_child++];
    if (IsTooHigh(child.bound_s)) {
      LeaveOut(child.bound_s);
    } else if (frame.placed < 0 && child.choice % parts_ != part_) {
      continue;  // another search looks into it
    } else if (symmetry_.IsLeast(frame.fixing, partial_.domain(frame.branch)[child.choice].devices)) {
      Enter(child);
    }
  }
  return frames_.empty();
}

}  // namespace soapstone

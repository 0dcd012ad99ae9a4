#include "engine.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace soapstone {
namespace {

constexpr std::int32_t kLater = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kLeastBetweenSnapshots = 16;
constexpr std::int32_t kMostSnapshots = 64;
// From what part of the makespan on the longest path is worth looking at.
constexpr double kClosePath = 0.9;
// From what part of it on the tail is.
constexpr double kLongTail = 0.002;
// How many proposals the tail is tried on, and what part of them it has to drop to be kept.
constexpr std::int32_t kTailTries = 64;
constexpr std::int64_t kLeastTailDrops = 4;
constexpr std::int32_t kBetweenLooksAtBounds = 256;  // accepted proposals until that is asked again
// Added to what a task waits for while not all of that is known.
constexpr std::int32_t kPending = 1 << 24;
// How many slots lie in a cache near enough not to be asked for early.
constexpr std::int32_t kMostNear = 1 << 13;
constexpr std::int32_t kBetweenLooks = 32;  // tasks between looks at all resources, at least

// A little more than the threshold, so that rounding drops nothing that should stand.
double LimitOf(double threshold_s) { return threshold_s * kFemto * (1 + 1e-12); }

}  // namespace

Engine::Engine(const Problem* problem, BoxTables* tables, EngineOptions options)
    : graph_(problem, tables),
      path_(problem, tables, &graph_),
      tail_bound_(problem, &graph_, &path_),
      options_(options),
      devices_(problem->machine.device_count),
      resources_(problem->machine.device_count + problem->machine.link_count),
      work_fs_(resources_, 0),
      compute_fs_(devices_, 0),
      new_compute_fs_(devices_, 0),
      first_forward_(problem->blocks.size(), 0),
      first_backward_(problem->blocks.size(), 0),
      has_root_(problem->blocks.size(), 0),
      predecessors_(&graph_),
      awaited_in_(problem->blocks.size(), 0),
      pending_in_(problem->blocks.size(), 0),
      rebuilt_in_(graph_.groups().size(), 0),
      free_s_(resources_, 0),
      left_fs_(resources_, 0),
      done_compute_fs_(devices_, 0) {}

void Engine::Place(std::int32_t block, const Placement& placement) {
  graph_.Place(block, placement);
  is_known_ = false;
}

double Engine::Makespan() {
  if (is_known_) return makespan_s_;
  graph_.Refresh();
  std::fill(work_fs_.begin(), work_fs_.end(), 0);
  std::fill(compute_fs_.begin(), compute_fs_.end(), 0);
  for (const Group& group : graph_.groups()) Count(group, 1);
  for (std::int32_t block = 0; block < graph_.block_count(); ++block) {
    const Group& group = graph_.groups()[block];
    has_root_[block] = HasRoot(block);
    for (std::int32_t i = 0; i < graph_.ComputeTasks(block); ++i) {
      const Slot& slot = graph_.slots()[group.first + i];
      compute_fs_[slot.resource] += Femtoseconds(slot.duration_s);
    }
  }
  predecessors_.ForgetAll();
  std::fill(first_forward_.begin(), first_forward_.end(), kLater);
  std::fill(first_backward_.begin(), first_backward_.end(), kLater);
  last_moment_ = graph_.task_count();
  last_start_ = last_moment_;
  snapshot_count_ = 0;
  changes_ = {};
  awaits_backward_ = false;
  tail_ = {};
  Reserve();
  NextRun();
  proposed_s_ = Run(0, kNever);
  Commit();
  LookAtBounds();
  is_known_ = true;
  return makespan_s_;
}

double Engine::Propose(std::span<const Change> changes, double threshold_s) {
  if (!options_.uses_threshold) threshold_s = kNever;
  const double limit_fs = LimitOf(threshold_s);
  changes_ = changes;
  is_begun_ = false;
  NextRun();
  tail_ = NextTail();
  if (!FitsCompute(limit_fs)) return kNever;
  if (uses_path_ && path_.Propose(changes) * kFemto > limit_fs) return kNever;
  is_begun_ = true;
  ++counters_.built;
  saved_work_fs_ = work_fs_;
  had_root_.clear();
  for (const Change& change : changes) had_root_.push_back(has_root_[change.block]);
  graph_.Begin(changes);
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t group : graph_.affected(pass)) {
      Count(graph_.groups()[group], -1);
      rebuilt_in_[group] = run_;
    }
  }
  if (!Build(kForwardPass, limit_fs)) return kNever;
  for (const Change& change : changes) has_root_[change.block] = HasRoot(change.block);
  const auto awaits_gradient = [this](const Change& change) { return graph_.AwaitsGradient(change.block); };
  if (std::all_of(changes.begin(), changes.end(), awaits_gradient)) {
    PutOffBackward();
  } else {
    awaits_backward_ = false;
    if (!Build(kBackwardPass, limit_fs)) return kNever;
  }
  ++counters_.run;
  proposed_s_ = Run(options_.uses_rewind ? FirstMoment() : 0, threshold_s);
  return proposed_s_;
}

// Rebuilds the groups of one pass. False if that shows that the limit cannot be met.
bool Engine::Build(Pass pass, double limit_fs) {
  Ledger ledger{&work_fs_, limit_fs};
  for (const std::int32_t group : graph_.affected(pass)) {
    if (!graph_.Rebuild(group, &ledger)) return false;
  }
  graph_.Link(pass);
  Reserve();
  return true;
}

// Puts off rebuilding the groups of the backward pass until they matter, which for most proposals they
// never do: until a backward task is taken that gives to them, or one is ready whose waiting for them is not
// yet known.
void Engine::PutOffBackward() {
  awaits_backward_ = true;
  is_backward_due_ = false;
  for (const std::int32_t group : graph_.affected(kBackwardPass)) {
    for (const Attachment& attachment : graph_.groups()[group].attached) awaited_in_[attachment.block] = run_;
  }
  pending_.clear();
  const auto put_off = [this](std::int32_t block) {
    if (std::exchange(pending_in_[block], run_) != run_) pending_.push_back(block);
  };
  for (const Change& change : changes_) {
    awaited_in_[change.block] = run_;
    put_off(change.block);
    for (const std::int32_t writer : graph_.writers(change.block)) put_off(writer);
  }
}

bool Engine::CatchUpBackward(double limit_fs) {
  awaits_backward_ = false;
  const auto for_each_pending = [this](const auto& visit) {
    for (const std::int32_t block : pending_) {
      const std::int32_t first = graph_.groups()[block].first;
      for (std::int32_t i = graph_.PassTasks(block); i < graph_.ComputeTasks(block); ++i) {
        if (graph_.slots()[first + i].live.run == run_) visit(graph_.slot(first + i));
      }
    }
  };
  for_each_pending([this](Slot* slot) { slot->live.remaining -= PendingOf(*slot) + slot->waits; });
  for (std::int32_t r = 0; r < resources_; ++r) left_fs_[r] -= work_fs_[r];
  if (!Build(kBackwardPass, limit_fs)) return false;
  for_each_pending([this](Slot* slot) {
    slot->live.remaining += slot->waits;
    const auto number = static_cast<std::int32_t>(slot - graph_.slots().data());
    if (slot->live.remaining == 0) queue_.Push({slot->live.ready_s, slot->order, number});
  });
  for (std::int32_t r = 0; r < resources_; ++r) left_fs_[r] += work_fs_[r];
  return true;
}

// Numbers the next run; when the numbers are used up, what was marked with them is forgotten.
void Engine::NextRun() {
  if (++run_ < kLater) return;
  run_ = 1;
  for (std::size_t i = 0; i < graph_.slots().size(); ++i) graph_.slot(static_cast<std::int32_t>(i))->live.run = 0;
  for (std::vector<std::int32_t>* marks : {&rebuilt_in_, &awaited_in_, &pending_in_}) {
    std::fill(marks->begin(), marks->end(), 0);
  }
}

// Makes room for what is known by slot.
void Engine::Reserve() {
  if (graph_.slots().size() > done_.size()) done_.resize(graph_.slots().capacity());
}

void Engine::Accept() {
  if (changes_.empty()) return;
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t group : graph_.affected(pass)) predecessors_.Forget(group);
  }
  compute_fs_.swap(new_compute_fs_);
  if (uses_path_) path_.Accept();
  graph_.Keep();
  Commit();
  if (--until_look_ == 0) {
    LookAtBounds();
  } else if (uses_tail_) {
    tail_bound_.Reset();
  }
  changes_ = {};
}

void Engine::Reject() {
  if (is_begun_ && !changes_.empty()) {
    graph_.Undo();
    work_fs_.swap(saved_work_fs_);
    for (std::size_t i = 0; i < changes_.size(); ++i) has_root_[changes_[i].block] = had_root_[i];
  }
  changes_ = {};
}

double Engine::LinkSeconds() const {
  return static_cast<double>(std::accumulate(work_fs_.begin() + devices_, work_fs_.end(), std::int64_t{0})) / kFemto;
}

std::vector<Simulator::Ended> Engine::Ends() const {
  std::vector<Ended> ends;
  for (const Group& group : graph_.groups()) {
    for (std::int32_t number = group.first; number < group.first + group.tasks; ++number) {
      const Slot& slot = graph_.slots()[number];
      ends.push_back({slot.order, slot.is_batch() ? slot.member_count() : 1, done_[number].end_s});
    }
  }
  std::sort(ends.begin(), ends.end(), [](const Ended& a, const Ended& b) { return a.order < b.order; });
  return ends;
}

// -- bounds -----------------------------------------------------------------------------------------------

// Decides whether the longest path is close enough, and the tail long enough, to be of use.
void Engine::LookAtBounds() {
  until_look_ = kBetweenLooksAtBounds;
  path_.Reset();
  uses_path_ = options_.uses_threshold && path_.current_s() > kClosePath * makespan_s_;
  const auto tail_fs = static_cast<double>(tail_bound_.Reset().tail_fs);
  uses_tail_ = options_.uses_threshold && tail_fs > kLongTail * makespan_s_ * kFemto;
  tail_tries_ = 0;
  tail_drops_ = counters_.by_tail;
}

// The tail of the proposal, unless few of the last ones were dropped by theirs.
TailBound::Tail Engine::NextTail() {
  if (!uses_tail_) return {};
  if (++tail_tries_ > kTailTries) {
    uses_tail_ = counters_.by_tail - tail_drops_ >= kLeastTailDrops;
    tail_tries_ = 0;
    tail_drops_ = counters_.by_tail;
  }
  return tail_bound_.Propose(changes_);
}

// Whether every device could do its compute tasks in time.
bool Engine::FitsCompute(double limit_fs) {
  const std::vector<std::int32_t>& kind = graph_.problem().machine.kind;
  const auto count = [&](const Placement& placed, std::int64_t sign) {
    const Layout& layout = *placed.layout;
    for (std::size_t pc = 0; pc < placed.devices.size(); ++pc) {
      const std::int32_t device = placed.devices[pc];
      const auto shard = static_cast<std::int32_t>(pc) / placed.copies;
      new_compute_fs_[device] += sign * layout.work_fs[kind[device] * layout.parts + shard];
    }
  };
  std::copy(compute_fs_.begin(), compute_fs_.end(), new_compute_fs_.begin());
  for (const Change& change : changes_) {
    count(graph_.placement(change.block), -1);
    count(change.placement, 1);
  }
  const auto fits = [&](const auto& fits_device) {
    return std::all_of(changes_.begin(), changes_.end(), [&](const Change& change) {
      return std::all_of(change.placement.devices.begin(), change.placement.devices.end(), fits_device);
    });
  };
  if (!fits([&](std::int32_t device) { return static_cast<double>(new_compute_fs_[device]) <= limit_fs; })) return false;
  if (tail_.tail_fs == 0) return true;
  std::fill(done_compute_fs_.begin(), done_compute_fs_.end(), 0);
  if (fits([&](std::int32_t device) { return WithTail(device) <= limit_fs; })) return true;
  ++counters_.by_tail;
  return false;
}

void Engine::Count(const Group& group, std::int64_t sign) {
  const Slot* slot = graph_.slots().data() + group.first;
  for (std::int32_t i = 0; i < group.tasks; ++i) {
    slot[i].ForEachTask([&](std::int32_t resource, double seconds) {
      work_fs_[resource] += sign * Femtoseconds(seconds);
    });
  }
}

// Whether every resource could do what it has left, no task of it starting before `now_s`.
bool Engine::FitsLeft(double now_s, double limit_fs) {
  // In a form that compilers turn into vector instructions.
  const double* free_s = free_s_.data();
  const std::int64_t* left_fs = left_fs_.data();
  std::int64_t late = 0;
  for (std::int32_t resource = 0; resource < resources_; ++resource) {
    const double from_s = free_s[resource] > now_s ? free_s[resource] : now_s;
    const double end_fs = from_s * kFemto + static_cast<double>(left_fs[resource]);
    // A resource without work left is done.
    late |= (left_fs[resource] > 0 ? std::int64_t{1} : 0) & (end_fs > limit_fs ? std::int64_t{1} : 0);
  }
  bool fits = late == 0;
  if (!fits || tail_.tail_fs == 0) return fits;
  for (std::int32_t device = 0; device < devices_; ++device) {
    fits &= std::max(now_s, free_s_[device]) * kFemto + WithTail(device) <= limit_fs;
  }
  counters_.by_tail += fits ? 0 : 1;
  return fits;
}

// What a device has left of compute work, and what is sure to come after it, if anything is.
double Engine::WithTail(std::int32_t device) const {
  const std::int64_t left_fs = new_compute_fs_[device] - done_compute_fs_[device];
  return left_fs > tail_.slack_fs ? static_cast<double>(left_fs + tail_.tail_fs) : 0;
}

// Whether some task of a block waits for nothing.
bool Engine::HasRoot(std::int32_t block) const {
  const Group& group = graph_.groups()[block];
  const Slot* slot = graph_.slots().data() + group.first;
  return std::any_of(slot, slot + graph_.ComputeTasks(block), [](const Slot& each) { return each.waits == 0; });
}

// The first moment at which the placements of the changed blocks can matter: when the first is taken of the
// tasks that give to, or compute with, what is rebuilt. Forward tasks of a block's readers come after its own,
// and its own after those of the writers.
std::int32_t Engine::FirstMoment() const {
  std::int32_t first = kLater;
  for (std::size_t i = 0; i < changes_.size(); ++i) {
    const std::int32_t block = changes_[i].block;
    if (had_root_[i] || has_root_[block] || graph_.writers(block).empty()) return 0;
    for (const std::int32_t writer : graph_.writers(block)) first = std::min(first, first_forward_[writer]);
    for (const std::int32_t sharer : graph_.sharers(block)) first = std::min(first, first_backward_[sharer]);
    for (const Pass pass : {kForwardPass, kBackwardPass}) {
      for (const TaskGraph::Touch& touch : graph_.touching(block, pass)) {
        for (const Attachment& attachment : graph_.groups()[touch.group].attached) {
          first = std::min(first, first_backward_[attachment.block]);
        }
      }
    }
  }
  return first;
}

// The last moment that a change of one block can make a proposal start from: no snapshot after it is of use.
std::int32_t Engine::LastStart() const {
  std::int32_t last = 0;
  for (std::int32_t block = 0; block < graph_.block_count(); ++block) {
    if (graph_.writers(block).empty()) continue;
    std::int32_t first = kLater;
    for (const std::int32_t writer : graph_.writers(block)) first = std::min(first, first_forward_[writer]);
    last = std::max(last, first);
  }
  return last;
}

// -- simulation -------------------------------------------------------------------------------------------

void Engine::Start(std::int32_t from, double limit_s) {
  std::size_t at = snapshot_count_;
  while (at > 0 && snapshots_[at - 1].moment > from) --at;
  kept_snapshots_ = at;
  log_.clear();
  opened_.clear();
  taken_count_ = 0;
  const double last_s = limit_s < kNever ? limit_s : 0;
  if (at == 0) {
    start_ = 0;
    so_far_s_ = 0;
    std::fill(free_s_.begin(), free_s_.end(), 0);
    left_fs_ = work_fs_;
    std::fill(done_compute_fs_.begin(), done_compute_fs_.end(), 0);
    queue_.Reset(last_moment_, 0, last_s);
    for (std::int32_t block = 0; block < graph_.block_count(); ++block) {
      if (!has_root_[block]) continue;
      const Group& group = graph_.groups()[block];
      for (std::int32_t number = group.first; number < group.first + graph_.ComputeTasks(block); ++number) {
        Slot* slot = graph_.slot(number);
        if (slot->waits > 0) continue;
        slot->live = {0, 0, run_, 0, slot->live.stood_first};
        queue_.Push({0, slot->order, number});
      }
    }
  } else {
    const Snapshot& snapshot = snapshots_[at - 1];
    start_ = snapshot.moment;
    so_far_s_ = snapshot.makespan_s;
    std::copy(snapshot.free_s.begin(), snapshot.free_s.end(), free_s_.begin());
    for (std::int32_t r = 0; r < resources_; ++r) left_fs_[r] = work_fs_[r] - snapshot.done_fs[r];
    std::copy(snapshot.done_compute_fs.begin(), snapshot.done_compute_fs.end(), done_compute_fs_.begin());
    double first_s = last_s;
    for (const Calendar::Event& event : snapshot.queue) first_s = std::min(first_s, event.ready_s);
    queue_.Reset(last_moment_ - std::min(last_moment_, start_), first_s, last_s);
    for (const Calendar::Event& event : snapshot.queue) {
      for (std::int32_t slot = event.slot; slot < event.slot + event.count; ++slot) {
        Live* live = &graph_.slot(slot)->live;
        *live = {event.ready_s, 0, run_, live->stood_first, live->stood_first};
      }
      queue_.Push(event);
    }
  }
  moment_ = start_;
}

// Arrive() and Revive() are part of the inner loop, and inlined there.

// Works out what a slot that the simulation reaches for the first time still waits for.
__attribute__((always_inline)) inline void Engine::Revive(Slot* slot) {
  Live* live = &slot->live;
  *live = {0, slot->waits, run_, moment_, live->stood_first};
  if (awaits_backward_ && IsPending(*slot)) live->remaining += PendingOf(*slot);
  if (start_ > 0 && live->stood_first < start_ && rebuilt_in_[slot->group] != run_) TakeOver(slot);
}

__attribute__((always_inline)) inline void Engine::Arrive(std::int32_t number, double end_s) {
  Slot* slot = graph_.slot(number);
  Live* live = &slot->live;
  if (live->run != run_) Revive(slot);
  live->ready_s = std::max(live->ready_s, end_s);
  if (--live->remaining > 0) {
    if (live->remaining == kPending) is_backward_due_ = true;
    return;
  }
  if (slot->resource == Slot::kGate) {
    OpenGate(number);
    return;
  }
  __builtin_prefetch(slot->next);
  queue_.Push({live->ready_s, slot->order, number});
}

double Engine::Run(std::int32_t from, double threshold_s) {
  const double limit_fs = LimitOf(threshold_s);
  double scale_s = threshold_s;
  if (threshold_s == kNever) {
    // What the makespan cannot exceed, or about what it will be.
    std::int64_t all_fs = 0;
    for (const std::int64_t work_fs : work_fs_) all_fs += work_fs;
    scale_s = makespan_s_ > 0 ? 1.5 * makespan_s_ : static_cast<double>(all_fs) / kFemto;
  }
  Start(from, scale_s);
  const std::int32_t between = std::max(kLeastBetweenSnapshots, last_moment_ / kMostSnapshots);
  const std::int32_t last_snapshot = options_.uses_rewind ? last_start_ : 0;
  if (threshold_s < kNever && !FitsLeft(0, limit_fs)) return kNever;
  // What is needed next is asked for early: with many tasks, memory is what this loop waits for. Not inlined,
  // a function that does nothing else would be taken for one without effect, and left out.
  const bool is_far = last_moment_ > kMostNear;
  const auto prefetch = [&](const Calendar::Event& later) __attribute__((always_inline)) {
    if (is_far) __builtin_prefetch(&graph_.slots()[later.slot], 1);
  };
  const auto prefetch_successors = [&](const Calendar::Event& soon) __attribute__((always_inline)) {
    if (!is_far) return;
    const Slot& slot = graph_.slots()[soon.slot];
    for (std::int32_t i = 0; i < slot.next_count; ++i) {
      if (slot.next[i] >= 0) __builtin_prefetch(&graph_.slots()[slot.next[i]], 1);
    }
  };
  double* const free_s = free_s_.data();
  std::int64_t* const left_fs = left_fs_.data();
  Calendar::Event event;
  std::int32_t until_snapshot = between;
  const std::int32_t between_looks = std::max(kBetweenLooks, resources_ / 2);
  std::int32_t until_look = between_looks;
  while (true) {
    if (--until_snapshot <= 0) {
      until_snapshot = between;
      // Where much waits, a snapshot costs more, and there are fewer.
      if (moment_ <= last_snapshot) until_snapshot = std::max(between, (TakeSnapshot() + resources_) / 2);
    }
    if (awaits_backward_ && is_backward_due_ && !CatchUpBackward(limit_fs)) return kNever;
    if (!queue_.Pop(&event, prefetch_successors, prefetch)) break;
    until_snapshot -= event.count - 1;
    until_look -= event.count;
    for (std::int32_t number = event.slot; number < event.slot + event.count; ++number) {
      const bool is_due = awaits_backward_ && (is_backward_due_ || IsAwaited(graph_.slots()[number]));
      if (is_due && !CatchUpBackward(limit_fs)) return kNever;
      Slot& slot = *graph_.slot(number);
      counters_.simulated += slot.is_batch() ? slot.member_count() : 1;
      double end_s = 0;
      bool is_late = false;
      slot.ForEachTask([&](std::int32_t resource, double seconds) {
        const double until_s = std::max(event.ready_s, free_s[resource]) + seconds;
        const std::int64_t still_fs = left_fs[resource] - Femtoseconds(seconds);
        free_s[resource] = until_s;
        left_fs[resource] = still_fs;
        end_s = std::max(end_s, until_s);
        is_late |= until_s * kFemto + static_cast<double>(still_fs) > limit_fs;
      });
      const bool is_compute = ClassOf(slot.order) == kComputeClass && OrderPass(slot.order) != kUpdatePass;
      if (is_compute && !slot.is_batch()) {
        done_compute_fs_[slot.resource] += Femtoseconds(slot.duration_s);
        if (tail_.tail_fs > 0 && !is_late && end_s * kFemto + WithTail(slot.resource) > limit_fs) {
          is_late = true;
          ++counters_.by_tail;
        }
      }
      so_far_s_ = std::max(so_far_s_, end_s);
      if (threshold_s < kNever && (is_late || end_s > threshold_s)) return kNever;
      slot.live.ready_s = end_s;
      log_.push_back(number);
      graph_.ForEachSuccessor(slot, [&](std::int32_t next) { Arrive(next, end_s); });
      ++moment_;
    }
    if (threshold_s < kNever && until_look <= 0) {
      until_look = between_looks;
      if (!FitsLeft(event.ready_s, limit_fs)) return kNever;
    }
  }
  return so_far_s_;
}

void Engine::OpenGate(std::int32_t number) {
  const Slot& gate = graph_.slots()[number];
  opened_.push_back({number, moment_});
  for (std::int32_t i = 0; i < gate.next_count; ++i) Arrive(gate.next[i], gate.live.ready_s);
}

// Takes over what had arrived at a slot, in the simulation that stands, before this one starts.
void Engine::TakeOver(Slot* slot) {
  Live* live = &slot->live;
  live->first = live->stood_first;
  // Nothing of what is rebuilt has arrived.
  const auto is_rebuilt = [this](std::int32_t group) { return rebuilt_in_[group] == run_; };
  const auto number = static_cast<std::int32_t>(slot - graph_.slots().data());
  predecessors_.ForEach(number, is_rebuilt, [&](std::int32_t before) {
    if (done_[before].taken_at >= start_) return;
    --live->remaining;
    live->ready_s = std::max(live->ready_s, done_[before].end_s);
  });
}

// What is added to what a task waits for, while that is not yet known. A task of a changed block surely waits
// for something more: a gradient.
std::int32_t Engine::PendingOf(const Slot& slot) const {
  return rebuilt_in_[slot.group] == run_ ? kPending + 1 : kPending;
}

// Whether it is a compute task, in the backward pass, of a block that is marked for this run.
//
// REQUIRES: it is a task of that pass.
bool Engine::IsOfMarked(const std::vector<std::int32_t>& marked_in, const Slot& slot) const {
  const std::int32_t block = slot.group;
  if (block >= graph_.block_count() || marked_in[block] != run_) return false;
  const std::int32_t local = static_cast<std::int32_t>(&slot - graph_.slots().data()) - graph_.groups()[block].first;
  return local >= graph_.PassTasks(block) && local < graph_.ComputeTasks(block);
}

// Returns how much waits.
std::int32_t Engine::TakeSnapshot() {
  if (taken_count_ == taken_.size()) taken_.emplace_back();
  Snapshot& snapshot = taken_[taken_count_++];
  snapshot.moment = moment_;
  snapshot.makespan_s = so_far_s_;
  snapshot.free_s.assign(free_s_.begin(), free_s_.end());
  snapshot.done_fs.resize(resources_);
  for (std::int32_t r = 0; r < resources_; ++r) snapshot.done_fs[r] = work_fs_[r] - left_fs_[r];
  snapshot.done_compute_fs.assign(done_compute_fs_.begin(), done_compute_fs_.end());
  snapshot.queue.clear();
  queue_.ForEach([&](const Calendar::Event& event) { snapshot.queue.push_back(event); });
  return static_cast<std::int32_t>(snapshot.queue.size());
}

// Makes the simulation just run the one that stands.
void Engine::Commit() {
  makespan_s_ = proposed_s_;
  last_moment_ = moment_;
  const std::int32_t blocks = graph_.block_count();
  for (std::int32_t block = 0; block < blocks; ++block) {
    if (first_forward_[block] >= start_) first_forward_[block] = kLater;
    if (first_backward_[block] >= start_) first_backward_[block] = kLater;
  }
  const auto keep = [this](std::int32_t number, std::int32_t taken_at) {
    Live* live = &graph_.slot(number)->live;
    done_[number] = {live->ready_s, taken_at};
    live->stood_first = live->first;
  };
  for (const Opened& opened : opened_) keep(opened.gate, opened.at);
  std::int32_t taken_at = start_;
  for (const std::int32_t number : log_) {
    keep(number, taken_at);
    const std::int32_t block = graph_.slots()[number].group;
    if (block < blocks) {
      const std::int32_t local = number - graph_.groups()[block].first;
      if (local < graph_.ComputeTasks(block)) {
        std::vector<std::int32_t>& first = local < graph_.PassTasks(block) ? first_forward_ : first_backward_;
        first[block] = std::min(first[block], taken_at);
      }
    }
    ++taken_at;
  }
  last_start_ = LastStart();
  snapshot_count_ = kept_snapshots_;
  if (snapshots_.size() < snapshot_count_ + taken_count_) snapshots_.resize(snapshot_count_ + taken_count_);
  for (std::size_t i = 0; i < taken_count_; ++i) std::swap(snapshots_[snapshot_count_++], taken_[i]);
}

}  // namespace soapstone

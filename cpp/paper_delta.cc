#include "paper_delta.h"

#include <algorithm>
#include <utility>

namespace soapstone {

PaperDelta::PaperDelta(const Problem* problem, BoxTables* tables)
    : graph_(problem, tables, Draft::Batches::kApart),
      predecessors_(&graph_),
      lists_(problem->machine.device_count + problem->machine.link_count),
      replaced_in_(graph_.groups().size(), 0),
      list_saved_in_(lists_.size(), 0),
      saved_lists_(lists_.size()) {}

void PaperDelta::Place(std::int32_t block, const Placement& placement) {
  graph_.Place(block, placement);
  is_known_ = false;
}

// To the algorithm, a whole strategy is a change in which every task is new.
double PaperDelta::Makespan() {
  if (is_known_) return makespan_s_;
  graph_.Refresh();
  predecessors_.ForgetAll();
  ++run_;
  for (std::vector<Event>& list : lists_) list.clear();
  for (const Group& group : graph_.groups()) Forget(group);
  for (std::size_t group = 0; group < graph_.groups().size(); ++group) LookAtAll(static_cast<std::int32_t>(group));
  makespan_s_ = Propagate();
  is_known_ = true;
  return makespan_s_;
}

double PaperDelta::Propose(std::span<const Change> changes, double) {
  is_proposed_ = true;
  ++run_;
  ++counters_.built;
  ++counters_.run;
  saved_.clear();
  saved_resources_.clear();
  graph_.Begin(changes);
  TakeOut();
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t group : graph_.affected(pass)) {
      graph_.Rebuild(group);
      predecessors_.PutAside(group);
      Forget(graph_.groups()[group]);
    }
    graph_.Link(pass);
  }
  LookAtAffected();
  proposed_s_ = Propagate();
  return proposed_s_;
}

void PaperDelta::Accept() {
  if (!is_proposed_) return;
  graph_.Keep();
  makespan_s_ = proposed_s_;
  is_proposed_ = false;
}

void PaperDelta::Reject() {
  if (!is_proposed_) return;
  graph_.Undo();
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t group : graph_.affected(pass)) predecessors_.TakeBack(group);
  }
  for (const Saved& saved : saved_) times_[saved.slot] = saved.times;
  for (const std::int32_t resource : saved_resources_) std::swap(lists_[resource], saved_lists_[resource]);
  is_proposed_ = false;
}

// -- the change -------------------------------------------------------------------------------------------

// Takes the tasks of the groups that are to be rebuilt out of the lists.
void PaperDelta::TakeOut() {
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t number : graph_.affected(pass)) {
      replaced_in_[number] = run_;
      const Group& group = graph_.groups()[number];
      for (std::int32_t i = 0; i < group.tasks; ++i) SaveList(graph_.slots()[group.first + i].resource);
    }
  }
  for (const std::int32_t resource : saved_resources_) {
    std::vector<Event>& list = lists_[resource];
    std::size_t kept = 0;
    bool follows_gap = false;
    for (const Event& event : list) {
      const bool is_replaced = replaced_in_[graph_.slots()[event.slot].group] == run_;
      if (!is_replaced) {
        if (follows_gap) left_behind_.push_back(event.slot);
        list[kept++] = event;
      }
      follows_gap = is_replaced;
    }
    list.resize(kept);
  }
}

// Looks at the tasks of the rebuilt groups and at those that these are attached to.
void PaperDelta::LookAtAffected() {
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t number : graph_.affected(pass)) {
      LookAtAll(number);
      for (const Attachment& attachment : graph_.groups()[number].attached) {
        if (replaced_in_[attachment.block] == run_) continue;
        const std::int32_t first = graph_.groups()[attachment.block].first;
        const std::int32_t forward = graph_.PassTasks(attachment.block);
        const std::int32_t begin = pass == kForwardPass ? 0 : forward;
        const std::int32_t end = pass == kForwardPass ? forward : graph_.ComputeTasks(attachment.block);
        for (std::int32_t i = begin; i < end; ++i) LookAt(first + i);
      }
    }
  }
}

void PaperDelta::LookAtAll(std::int32_t number) {
  const Group& group = graph_.groups()[number];
  for (std::int32_t i = 0; i < group.size(); ++i) LookAt(group.first + i);
}

// Nothing is known of new tasks and gates.
void PaperDelta::Forget(const Group& group) {
  if (times_.size() < graph_.slots().size()) {
    times_.resize(graph_.slots().capacity());
    saved_in_.resize(times_.size(), 0);
  }
  std::fill_n(times_.begin() + group.first, group.size(), Times{});
}

// -- Algorithm 2 ------------------------------------------------------------------------------------------

double PaperDelta::Propagate() {
  while (!queue_.empty()) {
    const Event event = queue_.top();
    queue_.pop();
    Times& times = times_[event.slot];
    if (times.queued_s != event.ready_s) continue;  // it has been ready at another time since
    times.queued_s = kUnknown;
    ++counters_.simulated;
    const Slot& slot = graph_.slots()[event.slot];
    const bool is_gate = slot.resource == Slot::kGate;
    if (!is_gate) times.start_s = std::max(times.ready_s, EndBefore(event.slot));
    times.end_s = times.start_s + slot.duration_s;
    graph_.ForEachSuccessor(slot, [this](std::int32_t next) { LookAt(next); });
    if (is_gate) continue;
    const std::vector<Event>& list = lists_[slot.resource];
    const std::size_t next = PlaceInList(event.slot) + 1;
    if (next < list.size()) LookAt(list[next].slot);
  }
  // The last of a resource ends last.
  double makespan_s = 0;
  for (const std::vector<Event>& list : lists_) {
    if (!list.empty()) makespan_s = std::max(makespan_s, times_[list.back().slot].end_s);
  }
  return makespan_s;
}

// Brings a task or gate up to date, and into the queue if that changes it.
void PaperDelta::LookAt(std::int32_t slot) {
  left_behind_.push_back(slot);
  while (!left_behind_.empty()) {
    const std::int32_t each = left_behind_.back();
    left_behind_.pop_back();
    if (!Update(each)) continue;
    Times& times = times_[each];
    if (times.queued_s == times.ready_s) continue;
    times.queued_s = times.ready_s;
    queue_.push({times.ready_s, graph_.slots()[each].order, each});
  }
}

// Works out when a task or gate is ready and starts. True if either is not as it was.
bool PaperDelta::Update(std::int32_t slot) {
  Times& times = times_[slot];
  const double ready_s = ReadyOf(slot);
  if (ready_s == kUnknown) return false;
  const bool is_gate = graph_.slots()[slot].resource == Slot::kGate;
  const bool is_moved = ready_s != times.ready_s;
  if (is_moved) {
    Save(slot);
    if (!is_gate) Move(slot, ready_s);
    times.ready_s = ready_s;
  }
  const double start_s = is_gate ? ready_s : std::max(ready_s, EndBefore(slot));
  if (!is_moved && start_s == times.start_s) return false;
  Save(slot);
  times.start_s = start_s;
  return true;
}

// When the last ends that a task or gate waits for; kUnknown while one has no end.
double PaperDelta::ReadyOf(std::int32_t slot) {
  double ready_s = 0;
  bool is_known = true;
  const auto is_skipped = [](std::int32_t) { return false; };
  predecessors_.ForEach(slot, is_skipped, [&](std::int32_t before) {
    const double end_s = times_[before].end_s;
    is_known = is_known && end_s != kUnknown;
    ready_s = std::max(ready_s, end_s);
  });
  return is_known ? ready_s : kUnknown;
}

// Swaps a task with its neighbours until its list is in order, or puts a new one in.
void PaperDelta::Move(std::int32_t slot, double ready_s) {
  const Slot& what = graph_.slots()[slot];
  SaveList(what.resource);
  std::vector<Event>& list = lists_[what.resource];
  const Event moved{ready_s, what.order, slot};
  const auto to = std::lower_bound(list.begin(), list.end(), moved);
  if (times_[slot].ready_s == kUnknown) {
    list.insert(to, moved);
    return;
  }
  const auto from = list.begin() + static_cast<std::ptrdiff_t>(PlaceInList(slot));
  if (to == from || to == from + 1) {
    from->ready_s = ready_s;
    return;
  }
  if (from + 1 != list.end()) left_behind_.push_back((from + 1)->slot);
  if (to > from) {
    std::move(from + 1, to, from);
    *(to - 1) = moved;
  } else {
    std::move_backward(to, from, from + 1);
    *to = moved;
  }
}

std::size_t PaperDelta::PlaceInList(std::int32_t slot) const {
  const Slot& what = graph_.slots()[slot];
  const std::vector<Event>& list = lists_[what.resource];
  const auto at = std::lower_bound(list.begin(), list.end(), Event{times_[slot].ready_s, what.order, slot});
  return static_cast<std::size_t>(at - list.begin());
}

// When the task before it on its resource ends.
double PaperDelta::EndBefore(std::int32_t slot) const {
  const std::size_t at = PlaceInList(slot);
  return at == 0 ? 0 : times_[lists_[graph_.slots()[slot].resource][at - 1].slot].end_s;
}

// -- taking it back ---------------------------------------------------------------------------------------

// Keeps the times of a slot as they were before the proposal.
void PaperDelta::Save(std::int32_t slot) {
  if (std::exchange(saved_in_[slot], run_) != run_) saved_.push_back({slot, times_[slot]});
}

void PaperDelta::SaveList(std::int32_t resource) {
  if (std::exchange(list_saved_in_[resource], run_) == run_) return;
  saved_resources_.push_back(resource);
  saved_lists_[resource] = lists_[resource];
}

}  // namespace soapstone

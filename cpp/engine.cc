#include "engine.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace soapstone {
namespace {

constexpr double kFemto = 1e15;

// Femtoseconds, rounded down: sums of them are exact in any order, and never more than the seconds.
std::int64_t Femtoseconds(double seconds) { return static_cast<std::int64_t>(seconds * kFemto); }

}  // namespace

Engine::Engine(const Problem* problem, BoxTables* tables)
    : graph_(problem, tables),
      blocks_(static_cast<std::int32_t>(problem->blocks.size())),
      resources_(problem->machine.device_count + problem->machine.link_count),
      waits_(graph_.groups().size()),
      touching_(problem->blocks.size()),
      work_fs_(resources_, 0),
      base_(graph_.groups().size() + 1, 0),
      free_s_(resources_, 0),
      left_fs_(resources_, 0) {
  for (std::int32_t block = 0; block < blocks_; ++block) {
    for (const std::int32_t group : graph_.touched(block)) {
      if (group != block) touching_[block].push_back(group);
    }
  }
}

void Engine::Place(std::int32_t block, Placement placement) { graph_.Place(block, std::move(placement)); }

double Engine::Makespan() {
  graph_.Refresh();
  std::fill(work_fs_.begin(), work_fs_.end(), 0);
  for (std::size_t group = 0; group < waits_.size(); ++group) {
    Count(graph_.groups()[group], 1);
    Adopt(static_cast<std::int32_t>(group));
  }
  for (std::int32_t block = 0; block < blocks_; ++block) SumWaits(block);
  return Run(kNever);
}

double Engine::Propose(std::int32_t block, Placement placement, double threshold_s) {
  proposed_ = block;
  replaced_ = graph_.placement(block);
  saved_.clear();
  graph_.Place(block, std::move(placement));
  std::set<std::int32_t> neighbours;
  for (const std::int32_t group : graph_.touched(block)) {
    saved_.push_back({group, graph_.Rebuilt(group)});
    Count(saved_.back().tasks, -1);
    Count(graph_.groups()[group], 1);
    Adopt(group);
    if (group == block) {
      neighbours.insert(block);
    } else {
      for (const Attachment& attachment : graph_.groups()[group].attached) neighbours.insert(attachment.block);
    }
  }
  for (const std::int32_t neighbour : neighbours) SumWaits(neighbour);
  return Run(threshold_s);
}

void Engine::Accept() {
  if (proposed_ < 0) return;
  proposed_ = -1;
  saved_.clear();
}

void Engine::Reject() {
  if (proposed_ < 0) return;
  graph_.Restore(proposed_, std::move(replaced_));
  std::set<std::int32_t> neighbours;
  for (Saved& saved : saved_) {
    Count(graph_.groups()[saved.group], -1);
    Count(saved.tasks, 1);
    for (const Attachment& attachment : saved.tasks.attached) neighbours.insert(attachment.block);
    graph_.SwapIn(saved.group, &saved.tasks);
    Adopt(saved.group);
  }
  neighbours.insert(proposed_);
  for (const std::int32_t neighbour : neighbours) SumWaits(neighbour);
  proposed_ = -1;
  saved_.clear();
}

std::int64_t Engine::task_count() const {
  std::int64_t count = 0;
  for (const Group& group : graph_.groups()) count += static_cast<std::int64_t>(group.kind.size());
  return count;
}

void Engine::Count(const Group& group, std::int64_t sign) {
  for (std::size_t i = 0; i < group.resource.size(); ++i) {
    work_fs_[group.resource[i]] += sign * Femtoseconds(group.duration_s[i]);
  }
}

void Engine::Adopt(std::int32_t group) { waits_[group] = graph_.groups()[group].waits; }

void Engine::SumWaits(std::int32_t block) {
  std::vector<std::int32_t>& waits = waits_[block];
  waits = graph_.groups()[block].waits;
  for (const std::int32_t group : touching_[block]) {
    for (const Attachment& attachment : graph_.groups()[group].attached) {
      if (attachment.block != block) continue;
      for (std::size_t i = 0; i < attachment.waits.size(); ++i) waits[i] += attachment.waits[i];
    }
  }
}

void Engine::Arrive(TaskRef task, double end_s) {
  const std::int32_t id = base_[task.group] + task.task;
  ready_s_[id] = std::max(ready_s_[id], end_s);
  if (--remaining_[id] == 0) {
    const Group& group = graph_.groups()[task.group];
    if (task.task >= group.task_count()) {  // a gate
      for (std::int32_t e = group.own.begin[task.task]; e < group.own.begin[task.task + 1]; ++e) {
        Arrive(group.own.targets[e], ready_s_[id]);
      }
      return;
    }
    queue_.push_back({ready_s_[id], group.order[task.task], task});
    std::push_heap(queue_.begin(), queue_.end(), [](const Event& a, const Event& b) {
      return a.ready_s != b.ready_s ? a.ready_s > b.ready_s : a.order > b.order;
    });
  }
}

double Engine::Run(double threshold_s) {
  // A little more than the threshold, so that rounding rejects nothing that should stand.
  const double limit_fs = threshold_s * kFemto * (1 + 1e-12);
  const std::vector<Group>& groups = graph_.groups();
  const auto later = [](const Event& a, const Event& b) {
    return a.ready_s != b.ready_s ? a.ready_s > b.ready_s : a.order > b.order;
  };
  for (const std::int64_t work_fs : work_fs_) {
    if (static_cast<double>(work_fs) > limit_fs) return kNever;
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    base_[g + 1] = base_[g] + groups[g].size();
  }
  remaining_.resize(base_.back());
  ready_s_.assign(base_.back(), 0);
  std::fill(free_s_.begin(), free_s_.end(), 0);
  left_fs_ = work_fs_;
  queue_.clear();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::copy(waits_[g].begin(), waits_[g].end(), remaining_.begin() + base_[g]);
    for (std::int32_t t = 0; t < groups[g].task_count(); ++t) {
      if (waits_[g][t] == 0) {
        queue_.push_back({0, groups[g].order[t], {static_cast<std::int32_t>(g), t}});
      }
    }
  }
  std::make_heap(queue_.begin(), queue_.end(), later);
  double makespan_s = 0;
  while (!queue_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end(), later);
    const Event event = queue_.back();
    queue_.pop_back();
    const Group& group = groups[event.task.group];
    const std::int32_t resource = group.resource[event.task.task];
    const double duration_s = group.duration_s[event.task.task];
    const double end_s = std::max(event.ready_s, free_s_[resource]) + duration_s;
    free_s_[resource] = end_s;
    makespan_s = std::max(makespan_s, end_s);
    left_fs_[resource] -= Femtoseconds(duration_s);
    if (end_s * kFemto + static_cast<double>(left_fs_[resource]) > limit_fs) return kNever;
    for (std::int32_t e = group.own.begin[event.task.task]; e < group.own.begin[event.task.task + 1]; ++e) {
      Arrive(group.own.targets[e], end_s);
    }
    if (event.task.group >= blocks_) continue;
    for (const std::int32_t other : touching_[event.task.group]) {
      for (const Attachment& attachment : groups[other].attached) {
        if (attachment.block != event.task.group) continue;
        const Successors& rows = attachment.successors;
        if (event.task.task + 1 >= static_cast<std::int32_t>(rows.begin.size())) continue;
        for (std::int32_t e = rows.begin[event.task.task]; e < rows.begin[event.task.task + 1]; ++e) {
          Arrive(rows.targets[e], end_s);
        }
      }
    }
  }
  return makespan_s;
}

}  // namespace soapstone

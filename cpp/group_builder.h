// Putting a group of tasks together: tasks, gates, edges, and the moves of an exchange.
//
// Thread safety: a GroupBuilder belongs to one thread.

#ifndef SOAPSTONE_CPP_GROUP_BUILDER_H_
#define SOAPSTONE_CPP_GROUP_BUILDER_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "boxtable.h"
#include "exchange.h"
#include "problem.h"
#include "tasks.h"

namespace soapstone {

enum Pass : std::uint64_t { kForwardPass, kBackwardPass, kUpdatePass };
enum Class : std::uint64_t { kComputeClass, kSeamClass, kValueClass, kWeightClass };

inline TaskOrder Order(Pass pass, std::int64_t position, Class what, std::int64_t number, std::int64_t piece,
                std::int64_t first, std::int64_t second) {
  const std::uint64_t high = (static_cast<std::uint64_t>(pass) << 62) |
                             (static_cast<std::uint64_t>(position) << 42) |
                             (static_cast<std::uint64_t>(what) << 40) |
                             (static_cast<std::uint64_t>(number) << 16) | static_cast<std::uint64_t>(piece);
  const std::uint64_t low = (static_cast<std::uint64_t>(first) << 32) | static_cast<std::uint64_t>(second);
  return (static_cast<TaskOrder>(high) << 64) | low;
}

inline TaskKind KindOf(Pattern pattern) {
  switch (pattern) {
    case Pattern::kTransfer:
      return TaskKind::kTransfer;
    case Pattern::kAllGather:
      return TaskKind::kAllGather;
    case Pattern::kReduceScatter:
      return TaskKind::kReduceScatter;
    case Pattern::kAllReduce:
      return TaskKind::kAllReduce;
    case Pattern::kAllToAll:
      return TaskKind::kAllToAll;
  }
  return TaskKind::kTransfer;
}

// Seconds of a collective on the slowest link of its ring, as cost/analytic.py has them.
inline double CollectiveSeconds(Pattern pattern, std::int64_t piece_bytes, std::int64_t count, double bandwidth,
                         double latency) {
  const auto bytes = static_cast<double>(piece_bytes);
  const bool is_all_reduce = pattern == Pattern::kAllReduce;
  const double step_bytes = is_all_reduce ? bytes / static_cast<double>(count) : bytes;
  const auto steps = static_cast<double>((is_all_reduce ? 2 : 1) * (count - 1));
  const double ring = steps * (step_bytes / bandwidth + latency);
  if (!is_all_reduce) return ring;
  const double depth = 2 * std::ceil(std::log2(static_cast<double>(count)));
  return std::min(ring, depth * (bytes / bandwidth + latency));
}

// One box on its way from a device to another, before equal ones are put together.
struct Part {
  std::int32_t from;
  std::int32_t to;
  std::int32_t box;
  std::int32_t sink;    // the box that the receiver wants, of which this is a part
  std::int32_t source;  // as the caller numbers them
  TaskRef taker;
  std::int32_t sum = 0;  // which sum of sources it is part of, among those of this box between the two
};

// Collects the tasks of a group and the edges it is responsible for.
class GroupBuilder {
 public:
  GroupBuilder(const MachineData& machine, std::int32_t own) : machine_(machine), own_(own) {}

  TaskRef Add(TaskKind kind, std::int32_t resource, double duration_s, std::int64_t size_bytes,
              TaskOrder order) {
    group_.kind.push_back(kind);
    group_.resource.push_back(resource);
    group_.duration_s.push_back(duration_s);
    group_.size_bytes.push_back(size_bytes);
    group_.order.push_back(order);
    return {own_, static_cast<std::int32_t>(group_.kind.size()) - 1};
  }

  TaskRef AddGate() { return {own_, kFirstGate + group_.gates++}; }

  void Wait(TaskRef task, TaskRef before) { edges_.emplace_back(before, task); }

  // The tasks of one move, and where to enter and leave them: a transfer, or the hops of a ring behind a
  // gate and before another.
  std::pair<TaskRef, TaskRef> AddMove(Pattern pattern, const std::vector<std::int32_t>& devices,
                                      std::int64_t size_bytes, TaskOrder order) {
    const std::int32_t n = machine_.device_count;
    if (pattern == Pattern::kTransfer) {
      const std::int32_t pair = devices[0] * n + devices[1];
      const double seconds = static_cast<double>(size_bytes) / machine_.bandwidth[pair] + machine_.latency[pair];
      const TaskRef task = Add(TaskKind::kTransfer, n + machine_.link[pair], seconds, size_bytes, order);
      return {task, task};
    }
    const auto count = static_cast<std::int64_t>(devices.size());
    double bandwidth = std::numeric_limits<double>::infinity();
    double latency = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t pair = devices[i] * n + devices[(i + 1) % count];
      bandwidth = std::min(bandwidth, machine_.bandwidth[pair]);
      latency = std::max(latency, machine_.latency[pair]);
    }
    const double seconds = CollectiveSeconds(pattern, size_bytes, count, bandwidth, latency);
    const std::int64_t hop_bytes =
        pattern == Pattern::kAllReduce ? 2 * (count - 1) * size_bytes / count : (count - 1) * size_bytes;
    const TaskRef enter = AddGate();
    const TaskRef leave = AddGate();
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t pair = devices[i] * n + devices[(i + 1) % count];
      const TaskRef hop = Add(KindOf(pattern), n + machine_.link[pair], seconds, hop_bytes,
                              order + static_cast<TaskOrder>(i));
      Wait(hop, enter);
      Wait(leave, hop);
    }
    return {enter, leave};
  }

  // The tasks of an exchange, between those that give and those that take. `order` is that of the first
  // move; moves are numbered from there.
  template <typename Gives, typename Takes>
  void AddExchange(const Exchange& exchange, const std::vector<Sink>& sinks, std::int64_t item_bytes,
                   const Gives& gives, const Takes& takes, TaskOrder order) {
    for (const auto& [source, sink] : exchange.local) {
      for (const TaskRef before : gives(source, sinks[sink].device)) {
        for (const TaskRef task : takes(sink)) Wait(task, before);
      }
    }
    for (std::size_t number = 0; number < exchange.moves.size(); ++number) {
      const Move& move = exchange.moves[number];
      const auto [enter, leave] = AddMove(move.pattern, move.devices, move.elements * item_bytes,
                                          order + (static_cast<TaskOrder>(number) << 32));
      for (const auto& [source, device] : move.sources) {
        for (const TaskRef before : gives(source, device)) Wait(enter, before);
      }
      for (const std::int32_t sink : move.sinks) {
        for (const TaskRef task : takes(sink)) Wait(task, leave);
      }
    }
  }

  // The same from parts: sorts them, puts equal ones together and finds patterns. `gives(source, device,
  // visit)` visits the tasks that give a source; `adds(parts)` says whether different summands among the
  // sources of these parts overlap.
  template <typename Gives, typename Adds>
  void AddParts(std::vector<Part>* parts, const BoxTable& table, std::int64_t item_bytes, const Gives& gives,
                const Adds& adds, TaskOrder order) {
    if (parts->empty()) return;
    std::sort(parts->begin(), parts->end(), [&table](const Part& a, const Part& b) {
      if (a.from != b.from) return a.from < b.from;
      if (a.to != b.to) return a.to < b.to;
      if (a.box != b.box) return table.Less(a.box, b.box);
      return a.sink != b.sink ? a.sink < b.sink : a.source < b.source;
    });
    for (std::size_t i = 0; i < parts->size();) i = NumberSums(parts, i);
    // Runs of equal (from, to, box, sum) are transfers; `first[r]` is where run r begins.
    std::vector<std::size_t> first;
    for (std::size_t i = 0; i < parts->size(); ++i) {
      if (i == 0 || !IsSameBox((*parts)[i], (*parts)[i - 1]) || (*parts)[i].sum != (*parts)[i - 1].sum) {
        first.push_back(i);
      }
    }
    first.push_back(parts->size());
    const std::vector<std::vector<std::size_t>> groups = Connected(*parts, first);
    std::int64_t number = 0;
    for (const std::vector<std::size_t>& runs : groups) {
      std::vector<std::int32_t> devices;
      const Pattern pattern = Recognised(*parts, first, runs, table, adds, &devices);
      if (pattern == Pattern::kTransfer) {
        for (const std::size_t run : runs) {
          const Part& part = (*parts)[first[run]];
          Connect(*parts, {first[run], first[run + 1]}, gives,
                  AddMove(pattern, {part.from, part.to}, table.Volume(part.box) * item_bytes,
                          order + (static_cast<TaskOrder>(number++) << 32)));
        }
        continue;
      }
      const auto ends = AddMove(pattern, devices, table.Volume((*parts)[first[runs[0]]].box) * item_bytes,
                                order + (static_cast<TaskOrder>(number++) << 32));
      // Every device sends a source to all others: one of its runs names each source it gives.
      for (const std::size_t run : runs) Connect(*parts, {first[run], first[run + 1]}, gives, ends);
    }
  }

  // The finished group; `blocks` are those whose tasks it has edges with.
  template <typename TasksOf>
  Group Finished(const std::vector<std::int32_t>& blocks, const TasksOf& tasks_of) {
    const std::int32_t tasks = group_.task_count();
    for (auto& [from, to] : edges_) {
      if (from.task >= kFirstGate) from.task += tasks - kFirstGate;
      if (to.task >= kFirstGate) to.task += tasks - kFirstGate;
    }
    group_.own.begin.assign(group_.size() + 1, 0);
    group_.waits.assign(group_.size(), 0);
    group_.attached.resize(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      Attachment& attachment = group_.attached[i];
      attachment.block = blocks[i];
      attachment.successors.begin.assign(tasks_of(blocks[i]) + 1, 0);
      attachment.waits.assign(tasks_of(blocks[i]), 0);
    }
    for (const auto& [from, to] : edges_) {
      ++RowsOf(from).begin[from.task + 1];
      ++(to.group == own_ ? group_.waits : Attached(to.group).waits)[to.task];
    }
    Reserve(&group_.own);
    for (Attachment& attachment : group_.attached) Reserve(&attachment.successors);
    for (const auto& [from, to] : edges_) {
      Successors& rows = RowsOf(from);
      rows.targets[rows.begin[from.task]++] = to;
    }
    ShiftBack(&group_.own);
    for (Attachment& attachment : group_.attached) ShiftBack(&attachment.successors);
    return std::move(group_);
  }

 private:
  static constexpr std::int32_t kFirstGate = 1 << 30;

  static bool IsSameBox(const Part& a, const Part& b) {
    return a.from == b.from && a.to == b.to && a.box == b.box;
  }

  // From `begin`, the parts of one box between two devices: sinks that want the same sum of sources share
  // it. Numbers the sums, sorts the parts by them, and returns where the next box begins.
  static std::size_t NumberSums(std::vector<Part>* parts, std::size_t begin) {
    std::size_t end = begin + 1;
    bool has_one_sink = true;
    while (end < parts->size() && IsSameBox((*parts)[end], (*parts)[begin])) {
      has_one_sink = has_one_sink && (*parts)[end].sink == (*parts)[begin].sink;
      ++end;
    }
    if (has_one_sink) return end;
    std::vector<std::vector<std::int32_t>> sums;  // sources, by sink as they stand
    for (std::size_t i = begin; i < end; ++i) {
      if (i == begin || (*parts)[i].sink != (*parts)[i - 1].sink) sums.emplace_back();
      if (sums.back().empty() || sums.back().back() != (*parts)[i].source) sums.back().push_back((*parts)[i].source);
    }
    std::vector<std::vector<std::int32_t>> distinct = sums;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    std::size_t sink = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (i > begin && (*parts)[i].sink != (*parts)[i - 1].sink) ++sink;
      (*parts)[i].sum = static_cast<std::int32_t>(
          std::lower_bound(distinct.begin(), distinct.end(), sums[sink]) - distinct.begin());
    }
    std::sort(parts->begin() + static_cast<std::ptrdiff_t>(begin), parts->begin() + static_cast<std::ptrdiff_t>(end),
              [](const Part& a, const Part& b) { return a.sum != b.sum ? a.sum < b.sum : a.source < b.source; });
    return end;
  }

  template <typename Gives>
  void Connect(const std::vector<Part>& parts, std::pair<std::size_t, std::size_t> run, const Gives& gives,
               std::pair<TaskRef, TaskRef> ends) {
    for (std::size_t i = run.first; i < run.second; ++i) {
      if (i == run.first || parts[i].source != parts[i - 1].source) {
        gives(parts[i].source, parts[i].from, [&](TaskRef before) { Wait(ends.first, before); });
      }
      Wait(parts[i].taker, ends.second);
    }
  }

  // The runs, apart for each set of devices that exchange among themselves, in the order of their first.
  std::vector<std::vector<std::size_t>> Connected(const std::vector<Part>& parts,
                                                  const std::vector<std::size_t>& first) const {
    std::vector<std::int32_t> leader(machine_.device_count);
    std::iota(leader.begin(), leader.end(), 0);
    const auto find = [&leader](std::int32_t device) {
      while (leader[device] != device) device = leader[device] = leader[leader[device]];
      return device;
    };
    for (std::size_t run = 0; run + 1 < first.size(); ++run) {
      const std::int32_t a = find(parts[first[run]].from);
      const std::int32_t b = find(parts[first[run]].to);
      leader[std::max(a, b)] = std::min(a, b);
    }
    std::vector<std::vector<std::size_t>> groups;
    std::vector<std::int32_t> place(machine_.device_count, -1);
    for (std::size_t run = 0; run + 1 < first.size(); ++run) {
      const std::int32_t root = find(parts[first[run]].from);
      if (place[root] < 0) {
        place[root] = static_cast<std::int32_t>(groups.size());
        groups.emplace_back();
      }
      groups[place[root]].push_back(run);
    }
    return groups;
  }

  template <typename Adds>
  Pattern Recognised(const std::vector<Part>& parts, const std::vector<std::size_t>& first,
                     const std::vector<std::size_t>& runs, const BoxTable& table, const Adds& adds,
                     std::vector<std::int32_t>* devices) const {
    if (runs.size() < 2) return Pattern::kTransfer;
    for (const std::size_t run : runs) {
      devices->push_back(parts[first[run]].from);
      devices->push_back(parts[first[run]].to);
    }
    std::sort(devices->begin(), devices->end());
    devices->erase(std::unique(devices->begin(), devices->end()), devices->end());
    const std::size_t n = devices->size();
    if (runs.size() != n * (n - 1)) return Pattern::kTransfer;
    const std::int64_t volume = table.Volume(parts[first[runs[0]]].box);
    std::vector<std::int32_t> boxes;
    std::vector<std::int32_t> by_sender(machine_.device_count, BoxTable::kNone);
    std::vector<std::int32_t> by_receiver(machine_.device_count, BoxTable::kNone);
    bool per_sender = true;
    bool per_receiver = true;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Part& part = parts[first[runs[i]]];
      if (table.Volume(part.box) != volume) return Pattern::kTransfer;
      if (i > 0) {
        const Part& before = parts[first[runs[i - 1]]];
        if (part.from == before.from && part.to == before.to) return Pattern::kTransfer;
      }
      boxes.push_back(part.box);
      if (by_sender[part.from] == BoxTable::kNone) by_sender[part.from] = part.box;
      if (by_receiver[part.to] == BoxTable::kNone) by_receiver[part.to] = part.box;
      per_sender = per_sender && by_sender[part.from] == part.box;
      per_receiver = per_receiver && by_receiver[part.to] == part.box;
    }
    std::sort(boxes.begin(), boxes.end());
    const std::size_t distinct = std::unique(boxes.begin(), boxes.end()) - boxes.begin();
    std::vector<std::int32_t> given;
    for (const std::size_t run : runs) {
      for (std::size_t i = first[run]; i < first[run + 1]; ++i) given.push_back(parts[i].source);
    }
    std::sort(given.begin(), given.end());
    given.erase(std::unique(given.begin(), given.end()), given.end());
    if (adds(given)) {
      if (distinct == 1) return Pattern::kAllReduce;
      return per_receiver && distinct == n ? Pattern::kReduceScatter : Pattern::kTransfer;
    }
    if (per_sender && distinct == n) return Pattern::kAllGather;
    return distinct == n * (n - 1) ? Pattern::kAllToAll : Pattern::kTransfer;
  }

  Attachment& Attached(std::int32_t block) {
    for (Attachment& attachment : group_.attached) {
      if (attachment.block == block) return attachment;
    }
    return group_.attached.front();
  }

  Successors& RowsOf(TaskRef from) {
    return from.group == own_ ? group_.own : Attached(from.group).successors;
  }

  static void Reserve(Successors* rows) {
    for (std::size_t i = 1; i < rows->begin.size(); ++i) rows->begin[i] += rows->begin[i - 1];
    rows->targets.resize(rows->begin.back());
  }

  // Filling moved every row's begin to its end, which is the next row's begin.
  static void ShiftBack(Successors* rows) {
    for (std::size_t i = rows->begin.size() - 1; i > 0; --i) rows->begin[i] = rows->begin[i - 1];
    rows->begin[0] = 0;
  }

  const MachineData& machine_;
  std::int32_t own_;
  Group group_;
  std::vector<std::pair<TaskRef, TaskRef>> edges_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_GROUP_BUILDER_H_

#include "draft.h"

#include <cmath>
#include <limits>

namespace soapstone {
namespace {

constexpr std::size_t kFewParts = 16;  // between two devices

TaskKind KindOf(Pattern pattern) {
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

}  // namespace

double CollectiveSeconds(Pattern pattern, std::int64_t piece_bytes, std::int64_t count, double bandwidth,
                         double latency, bool sums_by_one_device) {
  const auto bytes = static_cast<double>(piece_bytes);
  const bool is_all_reduce = pattern == Pattern::kAllReduce;
  const double step_bytes = is_all_reduce ? bytes / static_cast<double>(count) : bytes;
  const auto steps = static_cast<double>((is_all_reduce ? 2 : 1) * (count - 1));
  const double ring = steps * (step_bytes / bandwidth + latency);
  if (!is_all_reduce) return ring;
  if (sums_by_one_device) return steps * (bytes / bandwidth + latency);
  const double depth = 2 * std::ceil(std::log2(static_cast<double>(count)));
  return std::min(ring, depth * (bytes / bandwidth + latency));
}

Draft::Draft(const MachineData* machine, Batches batches)
    : machine_(*machine),
      batches_(batches),
      leader_(machine->device_count, -1),
      place_(machine->device_count, -1),
      by_sender_(machine->device_count),
      by_receiver_(machine->device_count) {}

void Draft::Clear() {
  tasks_.clear();
  edges_.clear();
  members_.clear();
  batched_ = 0;
  gates_ = 0;
}

std::pair<Ref, Ref> Draft::AddMove(Pattern pattern, std::span<const std::int32_t> devices,
                                   std::int64_t size_bytes, TaskOrder* order) {
  const std::int32_t n = machine_.device_count;
  if (pattern == Pattern::kTransfer) {
    const std::int32_t pair = devices[0] * n + devices[1];
    const double seconds = static_cast<double>(size_bytes) / machine_.bandwidth[pair] + machine_.latency[pair];
    const Ref task = Add(TaskKind::kTransfer, n + machine_.link[pair], seconds, size_bytes, (*order)++);
    return {task, AddTakes(pattern, devices, task, order)};
  }
  const auto count = static_cast<std::int64_t>(devices.size());
  double bandwidth = std::numeric_limits<double>::infinity();
  double latency = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t pair = devices[i] * n + devices[i + 1 < count ? i + 1 : 0];
    bandwidth = std::min(bandwidth, machine_.bandwidth[pair]);
    latency = std::max(latency, machine_.latency[pair]);
  }
  const double seconds =
      CollectiveSeconds(pattern, size_bytes, count, bandwidth, latency, machine_.sums_by_one_device);
  const std::int64_t hop_bytes =
      pattern == Pattern::kAllReduce ? 2 * (count - 1) * size_bytes / count : (count - 1) * size_bytes;
  if (has_batches()) {
    for (std::int64_t i = 0; i < count; ++i) {
      AddMember(n + machine_.link[devices[i] * n + devices[i + 1 < count ? i + 1 : 0]], seconds);
    }
    const Ref batch = AddBatch(KindOf(pattern), hop_bytes, *order);
    *order += static_cast<TaskOrder>(count);
    return {batch, AddTakes(pattern, devices, batch, order)};
  }
  const Ref enter = AddGate();
  const Ref leave = AddGate();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t pair = devices[i] * n + devices[i + 1 < count ? i + 1 : 0];
    const Ref hop = Add(KindOf(pattern), n + machine_.link[pair], seconds, hop_bytes, (*order)++);
    Wait(hop, enter);
    Wait(leave, hop);
  }
  return {enter, AddTakes(pattern, devices, leave, order)};
}

std::int32_t Draft::TakeCount(const MachineData& machine, Pattern pattern, std::span<const std::int32_t> devices) {
  std::int32_t count = 0;
  ForEachTaker(machine, pattern, devices, [&](std::int32_t, double) { ++count; });
  return count;
}

Ref Draft::AddTakes(Pattern pattern, std::span<const std::int32_t> devices, Ref moved, TaskOrder* order) {
  const std::int32_t count = TakeCount(machine_, pattern, devices);
  if (count == 0) return moved;
  if (has_batches() && count > 1) {
    ForEachTaker(machine_, pattern, devices,
                 [&](std::int32_t device, double seconds) { AddMember(device, seconds); });
    const Ref batch = AddBatch(TaskKind::kTake, 0, *order);
    *order += static_cast<TaskOrder>(count);
    Wait(batch, moved);
    return batch;
  }
  Ref last = moved;
  const Ref gate = count > 1 ? AddGate() : moved;
  ForEachTaker(machine_, pattern, devices, [&](std::int32_t device, double seconds) {
    last = Add(TaskKind::kTake, device, seconds, 0, (*order)++);
    Wait(last, moved);
    if (count > 1) Wait(gate, last);
  });
  return count > 1 ? gate : last;
}

std::int32_t Draft::BoxOf(const Part& part, BoxTable* table) {
  if (part.volume == table->Volume(part.held)) return part.held;
  if (part.volume == table->Volume(part.wanted)) return part.wanted;
  return table->Overlap(part.held, part.wanted);
}

// By one field that is a device, keeping the order of equal ones.
void Draft::SortBy(std::int32_t Part::*device, std::vector<Part>* parts) {
  begin_.assign(machine_.device_count + 1, 0);
  for (const Part& part : *parts) ++begin_[part.*device + 1];
  for (std::int32_t i = 0; i < machine_.device_count; ++i) begin_[i + 1] += begin_[i];
  sorted_.resize(parts->size());
  for (const Part& part : *parts) sorted_[begin_[part.*device]++] = part;
  parts->swap(sorted_);
}

// By sender, receiver and box.
void Draft::Sort(std::vector<Part>* parts, BoxTable* table) {
  const std::size_t count = parts->size();
  SortBy(&Part::to, parts);
  SortBy(&Part::from, parts);
  for (std::size_t i = 0; i < count;) {
    std::size_t end = i + 1;
    while (end < count && IsSamePair((*parts)[i], (*parts)[end])) ++end;
    if (end - i > 1) SortPair(std::span(*parts).subspan(i, end - i), table);
    i = end;
  }
}

void Draft::SortPair(std::span<Part> parts, BoxTable* table) {
  const auto sort = [&](const auto& is_less) {
    std::sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) {
      if (a.box != b.box) return is_less(a.box, b.box);
      return a.wanted != b.wanted ? a.wanted < b.wanted : a.source < b.source;
    });
  };
  if (parts.size() <= kFewParts) {
    NumberBoxes(parts, *table);
    const std::size_t width = table->width();
    sort([&](std::int32_t a, std::int32_t b) {
      const std::int64_t* first = bounds_.data() + a * width;
      const std::int64_t* second = bounds_.data() + b * width;
      return std::lexicographical_compare(first, first + width, second, second + width);
    });
  } else {
    for (Part& part : parts) part.box = BoxOf(part, table);
    sort([table](std::int32_t a, std::int32_t b) { return table->Less(a, b); });
  }
  for (std::size_t i = 0; i < parts.size();) {
    std::size_t end = i + 1;
    while (end < parts.size() && parts[end].box == parts[i].box) ++end;
    NumberSums(parts.subspan(i, end - i));
    i = end;
  }
}

// Numbers what a few parts move by comparing it all: that takes less than to look it up in the table, which
// is large.
void Draft::NumberBoxes(std::span<Part> parts, const BoxTable& table) {
  const std::size_t width = table.width();
  bounds_.resize(parts.size() * width);
  std::int32_t count = 0;
  for (Part& part : parts) {
    std::int64_t* own = bounds_.data() + count * width;
    table.OverlapInto(part.held, part.wanted, own);
    part.box = 0;
    while (part.box < count && !std::equal(own, own + width, bounds_.data() + part.box * width)) ++part.box;
    if (part.box == count) ++count;
  }
}

// The parts of one box between two devices: those that want the same sum of sources share it. Numbers the
// sums and sorts the parts by them.
void Draft::NumberSums(std::span<Part> parts) {
  if (std::all_of(parts.begin(), parts.end(), [&](const Part& part) { return part.wanted == parts[0].wanted; })) {
    return;
  }
  std::vector<std::vector<std::int32_t>> sums;  // sources, by box wanted, as they stand
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i == 0 || parts[i].wanted != parts[i - 1].wanted) sums.emplace_back();
    if (sums.back().empty() || sums.back().back() != parts[i].source) sums.back().push_back(parts[i].source);
  }
  std::vector<std::vector<std::int32_t>> distinct = sums;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  std::size_t at = 0;
  std::vector<std::int32_t> numbers;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0 && parts[i].wanted != parts[i - 1].wanted) ++at;
    numbers.push_back(
        static_cast<std::int32_t>(std::lower_bound(distinct.begin(), distinct.end(), sums[at]) - distinct.begin()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i].sum = numbers[i];
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.sum != b.sum ? a.sum < b.sum : a.source < b.source; });
}

void Draft::FindRuns(const std::vector<Part>& parts) {
  first_.clear();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i == 0 || !IsSamePair(parts[i], parts[i - 1]) || parts[i].box != parts[i - 1].box ||
        parts[i].sum != parts[i - 1].sum) {
      first_.push_back(static_cast<std::int32_t>(i));
    }
  }
  first_.push_back(static_cast<std::int32_t>(parts.size()));
}

std::int32_t Draft::Leader(std::int32_t device) {
  while (leader_[device] != device) device = leader_[device] = leader_[leader_[device]];
  return device;
}

// The runs, apart for each micro-batch and set of devices that exchange among themselves, in the order of
// their first.
void Draft::FindConnected(const std::vector<Part>& parts) {
  const auto runs = static_cast<std::int32_t>(first_.size()) - 1;
  const std::int32_t devices = machine_.device_count;
  std::int32_t lanes = 1;
  ends_.resize(runs);
  for (std::int32_t run = 0; run < runs; ++run) {
    const Part& part = parts[first_[run]];
    ends_[run] = {part.lane * devices + part.from, part.lane * devices + part.to};
    lanes = std::max(lanes, part.lane + 1);
  }
  if (leader_.size() < static_cast<std::size_t>(lanes) * devices) {
    leader_.resize(static_cast<std::size_t>(lanes) * devices, -1);
    place_.resize(leader_.size(), -1);
  }
  for (const auto& [from, to] : ends_) {
    leader_[from] = from;
    leader_[to] = to;
    place_[from] = place_[to] = -1;
  }
  for (std::int32_t run = 0; run < runs; ++run) {
    // Runs between the same two devices follow each other.
    if (run > 0 && ends_[run] == ends_[run - 1]) continue;
    const std::int32_t a = Leader(ends_[run].first);
    const std::int32_t b = Leader(ends_[run].second);
    leader_[std::max(a, b)] = std::min(a, b);
  }
  // Counted, then filled: place_ is first the number of the set, by leader.
  set_begin_.assign(1, 0);
  set_of_run_.resize(runs);
  for (std::int32_t run = 0; run < runs; ++run) {
    if (run > 0 && ends_[run].first == ends_[run - 1].first) {
      set_of_run_[run] = set_of_run_[run - 1];
    } else {
      const std::int32_t leader = Leader(ends_[run].first);
      if (place_[leader] < 0) {
        place_[leader] = static_cast<std::int32_t>(set_begin_.size()) - 1;
        set_begin_.push_back(0);
      }
      set_of_run_[run] = place_[leader];
    }
    ++set_begin_[set_of_run_[run] + 1];
  }
  for (std::size_t set = 1; set < set_begin_.size(); ++set) set_begin_[set] += set_begin_[set - 1];
  set_runs_.resize(runs);
  for (std::int32_t run = 0; run < runs; ++run) set_runs_[set_begin_[set_of_run_[run]]++] = run;
  // Filling moved every begin to its end, which is the next one's begin.
  for (std::size_t set = set_begin_.size() - 1; set > 0; --set) set_begin_[set] = set_begin_[set - 1];
  set_begin_[0] = 0;
}

bool Draft::IsComplete(const std::vector<Part>& parts, std::span<const std::int32_t> runs) {
  if (runs.size() < 2) return false;
  ring_.clear();
  for (const std::int32_t run : runs) {
    const Part& part = parts[first_[run]];
    if (part.volume != parts[first_[runs[0]]].volume) return false;
    place_[part.from] = place_[part.to] = -1;
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Part& part = parts[first_[runs[i]]];
    for (const std::int32_t device : {part.from, part.to}) {
      if (place_[device] < 0) {
        place_[device] = 0;
        ring_.push_back(device);
      }
    }
    if (ring_.size() * (ring_.size() - 1) > runs.size()) return false;
    if (i > 0 && IsSamePair(part, parts[first_[runs[i - 1]]])) return false;
  }
  std::sort(ring_.begin(), ring_.end());
  return ring_.size() * (ring_.size() - 1) == runs.size();
}

// Whether the boxes held by senders are all apart, and so are those that receivers want: then no two runs
// move the same, which is seen without working out what they move.
bool Draft::IsApart(const std::vector<Part>& parts, std::span<const std::int32_t> runs,
                    const BoxTable& table) {
  for (const std::int32_t device : ring_) by_sender_[device] = by_receiver_[device] = BoxTable::kNone;
  const auto is_only = [](std::int32_t* known, std::int32_t box) {
    if (*known == BoxTable::kNone) *known = box;
    return *known == box;
  };
  for (const std::int32_t run : runs) {
    const Part& part = parts[first_[run]];
    if (!is_only(&by_sender_[part.from], part.held)) return false;
    if (!is_only(&by_receiver_[part.to], part.wanted)) return false;
  }
  for (std::size_t i = 0; i < ring_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (table.Overlaps(by_sender_[ring_[i]], by_sender_[ring_[j]])) return false;
      if (table.Overlaps(by_receiver_[ring_[i]], by_receiver_[ring_[j]])) return false;
    }
  }
  return true;
}

Pattern Draft::PatternOf(const std::vector<Part>& parts, std::span<const std::int32_t> runs, BoxTable* table,
                         bool adds) {
  const std::size_t n = ring_.size();
  if (n > 2 && IsApart(parts, runs, *table)) return adds ? Pattern::kTransfer : Pattern::kAllToAll;
  for (const std::int32_t device : ring_) by_sender_[device] = by_receiver_[device] = BoxTable::kNone;
  bool per_sender = true;
  bool per_receiver = true;
  boxes_.clear();
  for (const std::int32_t run : runs) {
    const Part& part = parts[first_[run]];
    const std::int32_t box = BoxOf(part, table);
    boxes_.push_back(box);
    if (by_sender_[part.from] == BoxTable::kNone) by_sender_[part.from] = box;
    if (by_receiver_[part.to] == BoxTable::kNone) by_receiver_[part.to] = box;
    per_sender = per_sender && by_sender_[part.from] == box;
    per_receiver = per_receiver && by_receiver_[part.to] == box;
  }
  std::sort(boxes_.begin(), boxes_.end());
  const auto distinct = static_cast<std::size_t>(std::unique(boxes_.begin(), boxes_.end()) - boxes_.begin());
  if (adds) {
    if (distinct == 1) return Pattern::kAllReduce;
    return per_receiver && distinct == n ? Pattern::kReduceScatter : Pattern::kTransfer;
  }
  if (per_sender && distinct == n) return Pattern::kAllGather;
  return distinct == n * (n - 1) ? Pattern::kAllToAll : Pattern::kTransfer;
}

}  // namespace soapstone

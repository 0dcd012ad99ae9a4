#include "tasks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace soapstone {
namespace {

enum Pass : std::uint64_t { kForwardPass, kBackwardPass, kUpdatePass };
enum Class : std::uint64_t { kComputeClass, kSeamClass, kValueClass, kWeightClass };

TaskOrder Order(Pass pass, std::int64_t position, Class what, std::int64_t number, std::int64_t piece,
                std::int64_t first, std::int64_t second) {
  const std::uint64_t high = (static_cast<std::uint64_t>(pass) << 62) |
                             (static_cast<std::uint64_t>(position) << 42) |
                             (static_cast<std::uint64_t>(what) << 40) |
                             (static_cast<std::uint64_t>(number) << 16) | static_cast<std::uint64_t>(piece);
  const std::uint64_t low = (static_cast<std::uint64_t>(first) << 32) | static_cast<std::uint64_t>(second);
  return (static_cast<TaskOrder>(high) << 64) | low;
}

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

// Seconds of a collective on the slowest link of its ring, as cost/analytic.py has them.
double CollectiveSeconds(Pattern pattern, std::int64_t piece_bytes, std::int64_t count, double bandwidth,
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

  void Wait(TaskRef task, TaskRef before) { edges_.emplace_back(before, task); }

  // The tasks of an exchange, between those that give and those that take.
  template <typename Gives, typename Takes, typename OrderOf>
  void AddExchange(const Exchange& exchange, const std::vector<Sink>& sinks, std::int64_t item_bytes,
                   const Gives& gives, const Takes& takes, const OrderOf& order) {
    for (const auto& [source, sink] : exchange.local) {
      for (const TaskRef before : gives(source, sinks[sink].device)) {
        for (const TaskRef task : takes(sink)) Wait(task, before);
      }
    }
    for (std::size_t number = 0; number < exchange.moves.size(); ++number) {
      const Move& move = exchange.moves[number];
      const std::vector<TaskRef> hops = AddMove(move, item_bytes, number, order);
      for (const auto& [source, device] : move.sources) {
        for (const TaskRef before : gives(source, device)) {
          for (const TaskRef hop : hops) Wait(hop, before);
        }
      }
      for (const std::int32_t sink : move.sinks) {
        for (const TaskRef task : takes(sink)) {
          for (const TaskRef hop : hops) Wait(task, hop);
        }
      }
    }
  }

  // The finished group. `tasks_of` says how many tasks the group of a block has.
  template <typename TasksOf>
  Group Finished(const std::vector<std::int32_t>& blocks, const TasksOf& tasks_of) {
    std::sort(edges_.begin(), edges_.end());
    edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
    const std::size_t count = group_.kind.size();
    group_.own.begin.assign(count + 1, 0);
    group_.waits.assign(count, 0);
    for (const std::int32_t block : blocks) {
      Attachment attachment;
      attachment.block = block;
      attachment.successors.begin.assign(tasks_of(block) + 1, 0);
      attachment.waits.assign(tasks_of(block), 0);
      group_.attached.push_back(std::move(attachment));
    }
    for (const auto& [from, to] : edges_) {
      Successors& rows = from.group == own_ ? group_.own : Attached(from.group).successors;
      ++rows.begin[from.task + 1];
      rows.targets.push_back(to);  // edges are sorted by (group, task) of `from`, so rows fill in order
      ++(to.group == own_ ? group_.waits : Attached(to.group).waits)[to.task];
    }
    Accumulate(&group_.own);
    for (Attachment& attachment : group_.attached) Accumulate(&attachment.successors);
    return std::move(group_);
  }

 private:
  template <typename OrderOf>
  std::vector<TaskRef> AddMove(const Move& move, std::int64_t item_bytes, std::size_t number,
                               const OrderOf& order) {
    const std::int64_t size_bytes = move.elements * item_bytes;
    const std::int32_t n = machine_.device_count;
    if (move.pattern == Pattern::kTransfer) {
      const std::int32_t pair = move.devices[0] * n + move.devices[1];
      const double seconds = static_cast<double>(size_bytes) / machine_.bandwidth[pair] + machine_.latency[pair];
      return {Add(TaskKind::kTransfer, n + machine_.link[pair], seconds, size_bytes, order(number, 0))};
    }
    const auto count = static_cast<std::int64_t>(move.devices.size());
    double bandwidth = 0;
    double latency = 0;
    std::vector<std::int32_t> pairs;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t pair = move.devices[i] * n + move.devices[(i + 1) % count];
      pairs.push_back(pair);
      bandwidth = i == 0 ? machine_.bandwidth[pair] : std::min(bandwidth, machine_.bandwidth[pair]);
      latency = std::max(latency, machine_.latency[pair]);
    }
    const double seconds = CollectiveSeconds(move.pattern, size_bytes, count, bandwidth, latency);
    const std::int64_t hop_bytes = move.pattern == Pattern::kAllReduce ? 2 * (count - 1) * size_bytes / count
                                                                       : (count - 1) * size_bytes;
    std::vector<TaskRef> hops;
    for (std::int64_t i = 0; i < count; ++i) {
      hops.push_back(Add(KindOf(move.pattern), n + machine_.link[pairs[i]], seconds, hop_bytes, order(number, i)));
    }
    return hops;
  }

  Attachment& Attached(std::int32_t block) {
    for (Attachment& attachment : group_.attached) {
      if (attachment.block == block) return attachment;
    }
    return group_.attached.front();
  }

  static void Accumulate(Successors* rows) {
    for (std::size_t i = 1; i < rows->begin.size(); ++i) rows->begin[i] += rows->begin[i - 1];
  }

  const MachineData& machine_;
  std::int32_t own_;
  Group group_;
  std::vector<std::pair<TaskRef, TaskRef>> edges_;
};

std::span<const std::int32_t> DevicesOf(const Placement& placement, std::int32_t shard) {
  return std::span(placement.devices).subspan(shard * placement.copies, placement.copies);
}

// Where the copies of some shards run, each device once.
std::vector<std::int32_t> DevicesOfAll(const Placement& placement, const std::vector<std::int32_t>& shards) {
  std::vector<std::int32_t> devices;
  for (const std::int32_t shard : shards) {
    for (const std::int32_t device : DevicesOf(placement, shard)) {
      if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
    }
  }
  return devices;
}

// The pieces of boxes cut at each other's borders, so that any two are equal or apart.
std::vector<BoxBounds> Pieces(const std::set<BoxBounds>& boxes) {
  std::vector<BoxBounds> whole(boxes.begin(), boxes.end());
  bool apart = true;
  for (std::size_t i = 0; i < whole.size() && apart; ++i) {
    for (std::size_t j = 0; j < i && apart; ++j) apart = !Intersection(whole[i], whole[j]);
  }
  if (apart) return whole;
  const std::size_t rank = whole[0].size() / 2;
  std::vector<std::vector<std::int64_t>> cuts(rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    std::set<std::int64_t> edges;
    for (const BoxBounds& box : whole) edges.insert({box[2 * axis], box[2 * axis + 1]});
    cuts[axis].assign(edges.begin(), edges.end());
  }
  std::vector<BoxBounds> pieces;
  std::vector<std::size_t> at(rank, 0);
  while (true) {
    BoxBounds atom;
    for (std::size_t axis = 0; axis < rank; ++axis) {
      atom.push_back(cuts[axis][at[axis]]);
      atom.push_back(cuts[axis][at[axis] + 1]);
    }
    for (const BoxBounds& box : whole) {
      if (Intersection(box, atom) == atom) {
        pieces.push_back(atom);
        break;
      }
    }
    std::size_t axis = rank;
    while (axis-- > 0) {
      if (++at[axis] + 1 < cuts[axis].size()) break;
      at[axis] = 0;
    }
    if (axis == static_cast<std::size_t>(-1)) return pieces;
  }
}

// The tasks that wait for each box that a device needs.
using Wanted = std::map<std::pair<std::int32_t, BoxBounds>, std::vector<TaskRef>>;

std::vector<Sink> SinksOf(const Wanted& wanted) {
  std::vector<Sink> sinks;
  for (const auto& [key, tasks] : wanted) sinks.push_back({&key.second, key.first});
  return sinks;
}

std::vector<const std::vector<TaskRef>*> TakersOf(const Wanted& wanted) {
  std::vector<const std::vector<TaskRef>*> takers;
  for (const auto& [key, tasks] : wanted) takers.push_back(&tasks);
  return takers;
}

}  // namespace

TaskGraph::TaskGraph(const Problem* problem)
    : problem_(problem),
      placements_(problem->blocks.size()),
      groups_(problem->blocks.size() + problem->values.size() + problem->weights.size()),
      is_stale_(groups_.size(), 1),
      writer_(problem->values.size(), -1),
      readers_(problem->values.size()),
      users_(problem->weights.size()),
      touched_(problem->blocks.size()) {
  for (std::size_t b = 0; b < problem->blocks.size(); ++b) {
    const auto block = static_cast<std::int32_t>(b);
    std::set<std::int32_t> touched = {block};
    for (const NodeData& node : problem->blocks[b].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value < 0) continue;
        writer_[output.value] = block;
        touched.insert(ValueGroup(output.value));
      }
      for (const Access& operand : node.operands) {
        if (operand.value >= 0) {
          std::vector<std::int32_t>& readers = readers_[operand.value];
          if (readers.empty() || readers.back() != block) readers.push_back(block);
          touched.insert(ValueGroup(operand.value));
        } else if (operand.weight >= 0) {
          std::vector<std::int32_t>& users = users_[operand.weight];
          if (users.empty() || users.back() != block) users.push_back(block);
          touched.insert(WeightGroup(operand.weight));
        }
      }
    }
    touched_[b].assign(touched.begin(), touched.end());
  }
}

std::int32_t TaskGraph::ValueGroup(std::int32_t value) const {
  return static_cast<std::int32_t>(problem_->blocks.size()) + value;
}

std::int32_t TaskGraph::WeightGroup(std::int32_t weight) const {
  return static_cast<std::int32_t>(problem_->blocks.size() + problem_->values.size()) + weight;
}

TaskRef TaskGraph::Forward(std::int32_t block, std::int32_t segment, std::int32_t pc) const {
  return {block, segment * static_cast<std::int32_t>(placements_[block].devices.size()) + pc};
}

TaskRef TaskGraph::Backward(std::int32_t block, std::int32_t segment, std::int32_t pc) const {
  return Forward(block, placements_[block].layout->segments + segment, pc);
}

void TaskGraph::Place(std::int32_t block, Placement placement) {
  placements_[block] = std::move(placement);
  for (const std::int32_t group : touched_[block]) is_stale_[group] = 1;
}

void TaskGraph::Refresh() {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    if (is_stale_[group]) Rebuilt(static_cast<std::int32_t>(group));
  }
}

Group TaskGraph::Rebuilt(std::int32_t group) {
  is_stale_[group] = 0;
  return std::exchange(groups_[group], Build(group));
}

Group TaskGraph::Build(std::int32_t group) const {
  const auto blocks = static_cast<std::int32_t>(problem_->blocks.size());
  const auto values = static_cast<std::int32_t>(problem_->values.size());
  if (group < blocks) return BuildCompute(group);
  return group < blocks + values ? BuildValue(group - blocks) : BuildWeight(group - blocks - values);
}

Group TaskGraph::BuildCompute(std::int32_t block) const {
  const Placement& placement = placements_[block];
  const Layout& layout = *placement.layout;
  const MachineData& machine = problem_->machine;
  const bool has_backward = problem_->blocks[block].needs_backward;
  const std::int64_t back_position = static_cast<std::int64_t>(problem_->blocks.size()) - 1 - block;
  const std::int32_t last = layout.segments - 1;
  const auto tasks = static_cast<std::int32_t>(placement.devices.size());
  GroupBuilder builder(machine, block);
  for (const bool backward : {false, true}) {
    if (backward && !has_backward) break;
    for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
      for (std::int32_t pc = 0; pc < tasks; ++pc) {
        const std::int32_t device = placement.devices[pc];
        const std::int32_t shard = pc / placement.copies;
        const std::int32_t copy = pc % placement.copies;
        const std::size_t cost = (machine.kind[device] * layout.segments + segment) * layout.parts + shard;
        if (backward) {
          const TaskRef task = builder.Add(
              TaskKind::kBackward, device, layout.backward_s[cost], 0,
              Order(kBackwardPass, back_position, kComputeClass, last - segment, 0, shard, copy));
          builder.Wait(task, segment == last ? Forward(block, last, pc) : Backward(block, segment + 1, pc));
        } else {
          const TaskRef task = builder.Add(TaskKind::kForward, device, layout.forward_s[cost], 0,
                                           Order(kForwardPass, block, kComputeClass, segment, 0, shard, copy));
          if (segment > 0) builder.Wait(task, Forward(block, segment - 1, pc));
        }
      }
    }
  }
  std::int64_t number = 0;
  for (std::size_t s = 0; s < layout.seams.size(); ++s) {
    const SeamData& seam = layout.seams[s];
    number = s > 0 && layout.seams[s - 1].segment == seam.segment ? number + 1 : 0;
    const Alike& behind = layout.alike[seam.alike];
    std::vector<std::vector<std::int32_t>> devices;
    std::vector<Source> sources;
    for (const std::vector<std::int32_t>& shards : behind) devices.push_back(DevicesOfAll(placement, shards));
    for (std::size_t i = 0; i < behind.size(); ++i) {
      sources.push_back({seam.summands[i], &seam.boxes[behind[i][0]], devices[i]});
    }
    std::set<std::pair<std::int32_t, BoxBounds>> wanted;
    for (std::int32_t pc = 0; pc < tasks; ++pc) {
      wanted.emplace(placement.devices[pc], seam.boxes[pc / placement.copies]);
    }
    std::vector<Sink> sinks;
    for (const auto& [device, box] : wanted) sinks.push_back({&box, device});
    const Exchange exchange = MakeExchange(machine, sources, sinks);
    for (const bool backward : {false, true}) {
      if (backward && !(seam.is_mutual && has_backward)) break;
      // The tasks of some shards, on one device, in one segment.
      const auto on = [&](const std::vector<std::int32_t>& shards, std::int32_t device, std::int32_t segment) {
        std::vector<TaskRef> found;
        for (const std::int32_t shard : shards) {
          for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
            const std::int32_t pc = shard * placement.copies + copy;
            if (placement.devices[pc] != device) continue;
            found.push_back(backward ? Backward(block, segment, pc) : Forward(block, segment, pc));
          }
        }
        return found;
      };
      const auto gives = [&](std::int32_t source, std::int32_t device) {
        return on(behind[source], device, seam.segment + (backward ? 1 : 0));
      };
      const auto takes = [&](std::int32_t sink) {
        std::vector<TaskRef> found;
        for (std::size_t i = 0; i < behind.size(); ++i) {
          if (!Intersection(*sources[i].box, *sinks[sink].box)) continue;
          const std::vector<TaskRef> more =
              on(behind[i], sinks[sink].device, seam.segment + (backward ? 0 : 1));
          found.insert(found.end(), more.begin(), more.end());
        }
        return found;
      };
      const auto order = [&](std::size_t move, std::int64_t hop) {
        return backward ? Order(kBackwardPass, back_position, kSeamClass, last - seam.segment, number,
                                static_cast<std::int64_t>(move), hop)
                        : Order(kForwardPass, block, kSeamClass, seam.segment, number,
                                static_cast<std::int64_t>(move), hop);
      };
      builder.AddExchange(exchange, sinks, seam.item_bytes, gives, takes, order);
    }
  }
  return builder.Finished({}, [](std::int32_t) { return std::size_t{0}; });
}

void TaskGraph::CollectReadings(std::int32_t block, std::int32_t subject, const std::vector<Port>& ports,
                                std::vector<Reading>* readings) const {
  const Placement& placement = placements_[block];
  for (const Port& port : ports) {
    if (port.subject != subject || !port.gives_gradient) continue;
    for (const std::vector<std::int32_t>& shards : placement.layout->alike[port.alike]) {
      const auto& box = port.boxes[shards[0]];
      if (!box) continue;
      readings->push_back({block, port.segment, &shards, &*box, DevicesOfAll(placement, shards)});
    }
  }
}

std::vector<TaskRef> TaskGraph::Givers(const Reading& reading, std::int32_t device) const {
  std::vector<TaskRef> tasks;
  const Placement& placement = placements_[reading.block];
  for (const std::int32_t shard : *reading.shards) {
    for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
      const std::int32_t pc = shard * placement.copies + copy;
      if (placement.devices[pc] == device) tasks.push_back(Backward(reading.block, reading.segment, pc));
    }
  }
  return tasks;
}

Group TaskGraph::BuildValue(std::int32_t value) const {
  const ValueData& data = problem_->values[value];
  const std::int32_t writer = writer_[value];
  const Placement& written = placements_[writer];
  const std::vector<std::int32_t>& readers = readers_[value];
  const MachineData& machine = problem_->machine;
  GroupBuilder builder(machine, ValueGroup(value));
  const auto is_subject = [value](const Port& port) { return port.subject == value; };
  const auto found = std::find_if(written.layout->written.begin(), written.layout->written.end(), is_subject);
  const Port& out = *found;

  // Forward: what the writer's shards hold, grouped by (summand, box).
  std::map<std::pair<std::int32_t, BoxBounds>, std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>>
      held;  // -> tasks, devices
  for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(written.devices.size()); ++pc) {
    const std::int32_t shard = pc / written.copies;
    const std::int32_t summand = written.layout->is_partial ? written.layout->summands[shard] : 0;
    auto& [tasks, devices] = held[{summand, *out.boxes[shard]}];
    tasks.push_back(pc);
    if (std::find(devices.begin(), devices.end(), written.devices[pc]) == devices.end()) {
      devices.push_back(written.devices[pc]);
    }
  }
  std::vector<Source> sources;
  std::vector<const std::vector<std::int32_t>*> behind;
  for (const auto& [key, holding] : held) {
    sources.push_back({key.first, &key.second, holding.second});
    behind.push_back(&holding.first);
  }
  Wanted wanted;
  for (const std::int32_t reader : readers) {
    const Placement& placement = placements_[reader];
    for (const Port& port : placement.layout->read) {
      if (port.subject != value) continue;
      for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(placement.devices.size()); ++pc) {
        const auto& box = port.boxes[pc / placement.copies];
        if (box) wanted[{placement.devices[pc], *box}].push_back(Forward(reader, port.segment, pc));
      }
    }
  }
  std::vector<Sink> sinks = SinksOf(wanted);
  std::vector<const std::vector<TaskRef>*> takers = TakersOf(wanted);
  const auto takes = [&takers](std::int32_t sink) { return *takers[sink]; };
  const auto gives = [&](std::int32_t source, std::int32_t device) {
    std::vector<TaskRef> tasks;
    for (const std::int32_t pc : *behind[source]) {
      if (written.devices[pc] == device) tasks.push_back(Forward(writer, out.segment, pc));
    }
    return tasks;
  };
  builder.AddExchange(MakeExchange(machine, sources, sinks), sinks, data.item_bytes, gives, takes,
                      [&](std::size_t move, std::int64_t hop) {
                        return Order(kForwardPass, writer, kValueClass, data.number, 0,
                                     static_cast<std::int64_t>(move), hop);
                      });

  std::vector<std::int32_t> blocks = readers;
  blocks.push_back(writer);
  const auto tasks_of = [this](std::int32_t block) {
    return placements_[block].devices.size() * placements_[block].layout->segments *
           (problem_->blocks[block].needs_backward ? 2 : 1);
  };
  if (!data.is_differentiable) return builder.Finished(blocks, tasks_of);

  // Backward: every reading shard has a summand of its own, but for those that compute the same.
  std::vector<Reading> readings;
  for (const std::int32_t reader : readers) CollectReadings(reader, value, placements_[reader].layout->read, &readings);
  std::vector<Source> gradients;
  for (const Reading& reading : readings) {
    gradients.push_back({static_cast<std::int32_t>(gradients.size()), reading.box, reading.devices});
  }
  Wanted back;
  for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(written.devices.size()); ++pc) {
    back[{written.devices[pc], *out.boxes[pc / written.copies]}].push_back(Backward(writer, out.segment, pc));
  }
  const std::vector<Sink> back_sinks = SinksOf(back);
  const std::vector<const std::vector<TaskRef>*> back_takers = TakersOf(back);
  const auto back_gives = [&](std::int32_t source, std::int32_t device) {
    return Givers(readings[source], device);
  };
  const std::int64_t position = static_cast<std::int64_t>(problem_->blocks.size()) - 1 - writer;
  builder.AddExchange(
      MakeExchange(machine, gradients, back_sinks), back_sinks, data.item_bytes, back_gives,
      [&back_takers](std::int32_t sink) { return *back_takers[sink]; },
      [&](std::size_t move, std::int64_t hop) {
        return Order(kBackwardPass, position, kValueClass, data.number, 0, static_cast<std::int64_t>(move), hop);
      });
  return builder.Finished(blocks, tasks_of);
}

Group TaskGraph::BuildWeight(std::int32_t weight) const {
  const WeightData& data = problem_->weights[weight];
  const MachineData& machine = problem_->machine;
  std::vector<Reading> readings;
  for (const std::int32_t user : users_[weight]) {
    CollectReadings(user, weight, placements_[user].layout->weights, &readings);
  }
  std::set<BoxBounds> boxes;
  for (const Reading& reading : readings) boxes.insert(*reading.box);
  GroupBuilder builder(machine, WeightGroup(weight));
  const std::int64_t last = static_cast<std::int64_t>(problem_->blocks.size()) - 1 - readings.front().block;
  std::map<std::int32_t, std::int64_t> held;  // bytes, by device
  const std::vector<BoxBounds> pieces = Pieces(boxes);
  std::vector<std::vector<const Reading*>> givers(pieces.size());
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    std::set<std::int32_t> holders;
    for (const Reading& reading : readings) {
      if (Intersection(*reading.box, pieces[p]) != pieces[p]) continue;
      givers[p].push_back(&reading);
      holders.insert(reading.devices.begin(), reading.devices.end());
    }
    for (const std::int32_t device : holders) held[device] += Volume(pieces[p]) * data.item_bytes;
  }
  std::map<std::int32_t, TaskRef> updates;
  for (const auto& [device, size_bytes] : held) {
    const std::int32_t kind = machine.kind[device];
    const double traffic = static_cast<double>(size_bytes) * machine.update_bytes_per_byte;
    const double seconds = std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind]);
    updates[device] = builder.Add(TaskKind::kUpdate, device, seconds, 0,
                                  Order(kUpdatePass, data.number, kComputeClass, 0, 0, 0, device));
  }
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    std::vector<Source> sources;
    std::set<std::int32_t> holders;
    for (std::size_t i = 0; i < givers[p].size(); ++i) {
      const std::vector<std::int32_t>& devices = givers[p][i]->devices;
      sources.push_back({static_cast<std::int32_t>(i), &pieces[p], devices});
      holders.insert(devices.begin(), devices.end());
    }
    std::vector<Sink> sinks;
    for (const std::int32_t device : holders) sinks.push_back({&pieces[p], device});
    const auto gives = [&](std::int32_t source, std::int32_t device) {
      return Givers(*givers[p][source], device);
    };
    const auto takes = [&](std::int32_t sink) { return std::vector<TaskRef>{updates[sinks[sink].device]}; };
    builder.AddExchange(MakeExchange(machine, sources, sinks), sinks, data.item_bytes, gives, takes,
                        [&](std::size_t move, std::int64_t hop) {
                          return Order(kBackwardPass, last, kWeightClass, data.number,
                                       static_cast<std::int64_t>(p), static_cast<std::int64_t>(move), hop);
                        });
  }
  return builder.Finished(users_[weight], [this](std::int32_t block) {
    return placements_[block].devices.size() * placements_[block].layout->segments *
           (problem_->blocks[block].needs_backward ? 2 : 1);
  });
}

FlatTasks TaskGraph::Flat() const {
  std::vector<std::int64_t> base(groups_.size() + 1, 0);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    base[g + 1] = base[g] + static_cast<std::int64_t>(groups_[g].kind.size());
  }
  const auto count = static_cast<std::size_t>(base.back());
  std::vector<TaskRef> tasks;
  tasks.reserve(count);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t t = 0; t < groups_[g].kind.size(); ++t) {
      tasks.push_back({static_cast<std::int32_t>(g), static_cast<std::int32_t>(t)});
    }
  }
  std::sort(tasks.begin(), tasks.end(), [this](const TaskRef& a, const TaskRef& b) {
    return groups_[a.group].order[a.task] < groups_[b.group].order[b.task];
  });
  std::vector<std::int32_t> id(count);
  for (std::size_t i = 0; i < count; ++i) id[base[tasks[i].group] + tasks[i].task] = static_cast<std::int32_t>(i);
  const auto id_of = [&](TaskRef task) { return id[base[task.group] + task.task]; };

  std::vector<std::pair<std::int32_t, std::int32_t>> edges;  // task, what it waits for
  const auto collect = [&](std::int32_t group, const Successors& rows) {
    for (std::size_t t = 0; t + 1 < rows.begin.size(); ++t) {
      for (std::int32_t e = rows.begin[t]; e < rows.begin[t + 1]; ++e) {
        edges.emplace_back(id_of(rows.targets[e]), id_of({group, static_cast<std::int32_t>(t)}));
      }
    }
  };
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    collect(static_cast<std::int32_t>(g), groups_[g].own);
    for (const Attachment& attachment : groups_[g].attached) collect(attachment.block, attachment.successors);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  FlatTasks flat;
  flat.after_begin.assign(count + 1, 0);
  for (const auto& [task, before] : edges) {
    ++flat.after_begin[task + 1];
    flat.after.push_back(before);
  }
  for (std::size_t i = 1; i <= count; ++i) flat.after_begin[i] += flat.after_begin[i - 1];
  for (const TaskRef& task : tasks) {
    const Group& group = groups_[task.group];
    flat.kind.push_back(group.kind[task.task]);
    flat.resource.push_back(group.resource[task.task]);
    flat.duration_s.push_back(group.duration_s[task.task]);
    flat.size_bytes.push_back(group.size_bytes[task.task]);
  }
  return flat;
}

}  // namespace soapstone

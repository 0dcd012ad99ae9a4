#include "tasks.h"

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <utility>

#include "group_builder.h"

namespace soapstone {
namespace {

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

// The turn of each device among those that need something: its rank.
std::vector<std::int32_t> Turns(std::vector<std::int32_t> devices, std::int32_t device_count) {
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  std::vector<std::int32_t> turns(device_count, 0);
  for (std::size_t i = 0; i < devices.size(); ++i) turns[devices[i]] = static_cast<std::int32_t>(i);
  return turns;
}

bool Holds(std::span<const std::int32_t> devices, std::int32_t device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

}  // namespace

TaskGraph::TaskGraph(const Problem* problem, BoxTables* tables)
    : problem_(problem),
      tables_(tables),
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

std::int32_t TaskGraph::ComputeTasks(std::int32_t block) const {
  const Placement& placement = placements_[block];
  return static_cast<std::int32_t>(placement.devices.size()) * placement.layout->segments *
         (problem_->blocks[block].needs_backward ? 2 : 1);
}

template <typename Visit>
void TaskGraph::ForEachOn(const Placement& placement, const std::vector<std::int32_t>& shards,
                          std::int32_t device, const Visit& visit) const {
  for (const std::int32_t shard : shards) {
    for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
      const std::int32_t pc = shard * placement.copies + copy;
      if (placement.devices[pc] == device) visit(pc);
    }
  }
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
      const TaskOrder order =
          backward ? Order(kBackwardPass, back_position, kSeamClass, last - seam.segment, number, 0, 0)
                   : Order(kForwardPass, block, kSeamClass, seam.segment, number, 0, 0);
      builder.AddExchange(exchange, sinks, seam.item_bytes, gives, takes, order);
    }
  }
  return builder.Finished({}, [](std::int32_t) { return 0; });
}

void TaskGraph::CollectReadings(std::int32_t block, std::int32_t subject, const std::vector<Port>& ports,
                                std::vector<Reading>* readings) const {
  const Placement& placement = placements_[block];
  for (const Port& port : ports) {
    if (port.subject != subject || !port.gives_gradient) continue;
    for (const std::vector<std::int32_t>& shards : placement.layout->alike[port.alike]) {
      const std::int32_t box = port.boxes[shards[0]];
      if (box == BoxTable::kNone) continue;
      readings->push_back({block, port.segment, &shards, box, DevicesOfAll(placement, shards)});
    }
  }
}

Group TaskGraph::BuildValue(std::int32_t value) const {
  const std::int32_t writer = writer_[value];
  const Written* written = nullptr;
  for (const Written& each : placements_[writer].layout->written) {
    if (each.port.subject == value) written = &each;
  }
  GroupBuilder builder(problem_->machine, ValueGroup(value));
  AddForward(value, *written, &builder);
  if (problem_->values[value].is_differentiable) AddBackward(value, *written, &builder);
  std::vector<std::int32_t> blocks = readers_[value];
  blocks.push_back(writer);
  return builder.Finished(blocks, [this](std::int32_t block) { return ComputeTasks(block); });
}

void TaskGraph::AddForward(std::int32_t value, const Written& written, GroupBuilder* builder) const {
  const ValueData& data = problem_->values[value];
  const MachineData& machine = problem_->machine;
  BoxTable& table = tables_->values[value];
  const std::int32_t writer = writer_[value];
  const Placement& from = placements_[writer];
  std::vector<std::vector<std::int32_t>> holders;
  bool has_copies = false;
  for (const Held& held : written.held) {
    holders.push_back(DevicesOfAll(from, held.shards));
    has_copies = has_copies || holders.back().size() > 1;
  }
  std::vector<std::int32_t> turns(machine.device_count, 0);
  if (has_copies) {
    std::vector<std::int32_t> wanting;
    for (const std::int32_t reader : readers_[value]) {
      const Placement& to = placements_[reader];
      for (const Port& port : to.layout->read) {
        if (port.subject != value) continue;
        for (std::size_t pc = 0; pc < to.devices.size(); ++pc) {
          if (port.boxes[pc / to.copies] != BoxTable::kNone) wanting.push_back(to.devices[pc]);
        }
      }
    }
    turns = Turns(std::move(wanting), machine.device_count);
  }
  std::vector<Part> parts;
  for (const std::int32_t reader : readers_[value]) {
    const Placement& to = placements_[reader];
    for (const Port& port : to.layout->read) {
      if (port.subject != value) continue;
      for (std::int32_t shard = 0; shard < to.layout->parts; ++shard) {
        const std::int32_t box = port.boxes[shard];
        if (box == BoxTable::kNone) continue;
        // The table may grow while overlaps are numbered, so the bounds are copied.
        const std::vector<std::int64_t> bounds(table.Bounds(box).begin(), table.Bounds(box).end());
        written.ForEachUnder(bounds, [&](std::int32_t source) {
          const std::vector<std::int32_t>& devices = holders[source];
          for (std::int32_t copy = 0; copy < to.copies; ++copy) {
            const std::int32_t pc = shard * to.copies + copy;
            const std::int32_t device = to.devices[pc];
            const TaskRef task = Forward(reader, port.segment, pc);
            if (Holds(devices, device)) {
              ForEachOn(from, written.held[source].shards, device, [&](std::int32_t giver) {
                builder->Wait(task, Forward(writer, written.port.segment, giver));
              });
              continue;
            }
            const std::int32_t giver = Nearest(machine, devices, device, turns[device]);
            parts.push_back({giver, device, table.Overlap(written.held[source].box, box), box, source, task});
          }
        });
      }
    }
  }
  builder->AddParts(
      &parts, table, data.item_bytes,
      [&](std::int32_t source, std::int32_t device, const auto& visit) {
        ForEachOn(from, written.held[source].shards, device, [&](std::int32_t giver) {
          visit(Forward(writer, written.port.segment, giver));
        });
      },
      [&](const std::vector<std::int32_t>& sources) {
        for (std::size_t i = 0; i < sources.size(); ++i) {
          for (std::size_t j = 0; j < i; ++j) {
            const Held& a = written.held[sources[i]];
            const Held& b = written.held[sources[j]];
            if (a.summand != b.summand && a.box == b.box) return true;
          }
        }
        return false;
      },
      Order(kForwardPass, writer, kValueClass, data.number, 0, 0, 0));
}

void TaskGraph::AddBackward(std::int32_t value, const Written& written, GroupBuilder* builder) const {
  const ValueData& data = problem_->values[value];
  const MachineData& machine = problem_->machine;
  BoxTable& table = tables_->values[value];
  const std::int32_t writer = writer_[value];
  const Placement& to = placements_[writer];
  std::vector<Reading> readings;
  for (const std::int32_t reader : readers_[value]) {
    CollectReadings(reader, value, placements_[reader].layout->read, &readings);
  }
  const std::vector<std::int32_t> turns = Turns(to.devices, machine.device_count);
  const auto givers = [this](const Reading& reading, std::int32_t device, const auto& visit) {
    ForEachOn(placements_[reading.block], *reading.shards, device, [&](std::int32_t pc) {
      visit(Backward(reading.block, reading.segment, pc));
    });
  };
  std::vector<Part> parts;
  for (std::size_t i = 0; i < readings.size(); ++i) {
    const Reading& reading = readings[i];
    const std::vector<std::int64_t> bounds(table.Bounds(reading.box).begin(), table.Bounds(reading.box).end());
    written.ForEachUnder(bounds, [&](std::int32_t entry) {
      const Held& held = written.held[entry];
      for (const std::int32_t shard : held.shards) {
        for (std::int32_t copy = 0; copy < to.copies; ++copy) {
          const std::int32_t pc = shard * to.copies + copy;
          const std::int32_t device = to.devices[pc];
          const TaskRef task = Backward(writer, written.port.segment, pc);
          if (Holds(reading.devices, device)) {
            givers(reading, device, [&](TaskRef before) { builder->Wait(task, before); });
            continue;
          }
          const std::int32_t giver = Nearest(machine, reading.devices, device, turns[device]);
          const std::int32_t overlap = table.Overlap(held.box, reading.box);
          parts.push_back({giver, device, overlap, held.box, static_cast<std::int32_t>(i), task});
        }
      }
    });
  }
  builder->AddParts(
      &parts, table, data.item_bytes,
      [&](std::int32_t source, std::int32_t device, const auto& visit) { givers(readings[source], device, visit); },
      [&](const std::vector<std::int32_t>& sources) {
        for (std::size_t i = 0; i < sources.size(); ++i) {
          for (std::size_t j = 0; j < i; ++j) {
            if (table.Overlaps(readings[sources[i]].box, readings[sources[j]].box)) return true;
          }
        }
        return false;
      },
      Order(kBackwardPass, static_cast<std::int64_t>(problem_->blocks.size()) - 1 - writer, kValueClass,
            data.number, 0, 0, 0));
}

Group TaskGraph::BuildWeight(std::int32_t weight) const {
  const WeightData& data = problem_->weights[weight];
  const MachineData& machine = problem_->machine;
  const BoxTable& table = tables_->weights[weight];
  std::vector<Reading> readings;
  for (const std::int32_t user : users_[weight]) {
    CollectReadings(user, weight, placements_[user].layout->weights, &readings);
  }
  std::vector<std::int32_t> boxes;
  for (const Reading& reading : readings) boxes.push_back(reading.box);
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  std::sort(boxes.begin(), boxes.end(), [&table](std::int32_t a, std::int32_t b) { return table.Less(a, b); });
  std::vector<BoxBounds> pieces;
  bool is_cut = false;
  for (std::size_t i = 0; i < boxes.size() && !is_cut; ++i) {
    for (std::size_t j = 0; j < i && !is_cut; ++j) is_cut = table.Overlaps(boxes[i], boxes[j]);
  }
  std::set<BoxBounds> whole;
  for (const std::int32_t box : boxes) {
    const BoxBounds bounds(table.Bounds(box).begin(), table.Bounds(box).end());
    pieces.push_back(bounds);
    if (is_cut) whole.insert(bounds);
  }
  if (is_cut) pieces = Pieces(whole);

  GroupBuilder builder(machine, WeightGroup(weight));
  const std::int64_t last = static_cast<std::int64_t>(problem_->blocks.size()) - 1 - readings.front().block;
  std::vector<std::vector<const Reading*>> givers(pieces.size());
  std::vector<std::vector<std::int32_t>> holders(pieces.size());
  std::vector<std::int64_t> held(machine.device_count, 0);  // bytes
  std::vector<std::int32_t> place(is_cut || boxes.empty() ? 0 : *std::max_element(boxes.begin(), boxes.end()) + 1, 0);
  if (!is_cut) {
    for (std::size_t p = 0; p < boxes.size(); ++p) place[boxes[p]] = static_cast<std::int32_t>(p);
  }
  for (const Reading& reading : readings) {
    if (!is_cut) {
      givers[place[reading.box]].push_back(&reading);
      continue;
    }
    const BoxBounds bounds(table.Bounds(reading.box).begin(), table.Bounds(reading.box).end());
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      if (Intersection(bounds, pieces[p]) == pieces[p]) givers[p].push_back(&reading);
    }
  }
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    for (const Reading* reading : givers[p]) {
      holders[p].insert(holders[p].end(), reading->devices.begin(), reading->devices.end());
    }
    std::sort(holders[p].begin(), holders[p].end());
    holders[p].erase(std::unique(holders[p].begin(), holders[p].end()), holders[p].end());
    for (const std::int32_t device : holders[p]) held[device] += Volume(pieces[p]) * data.item_bytes;
  }
  std::vector<TaskRef> updates(machine.device_count, TaskRef{-1, -1});
  for (std::int32_t device = 0; device < machine.device_count; ++device) {
    if (held[device] == 0) continue;
    const std::int32_t kind = machine.kind[device];
    const double traffic = static_cast<double>(held[device]) * machine.update_bytes_per_byte;
    const double seconds = std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind]);
    updates[device] = builder.Add(TaskKind::kUpdate, device, seconds, 0,
                                  Order(kUpdatePass, data.number, kComputeClass, 0, 0, 0, device));
  }
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const auto tasks = [this](const Reading& reading, std::int32_t device) {
      std::vector<TaskRef> found;
      ForEachOn(placements_[reading.block], *reading.shards, device, [&](std::int32_t pc) {
        found.push_back(Backward(reading.block, reading.segment, pc));
      });
      return found;
    };
    std::vector<Source> sources;
    for (std::size_t i = 0; i < givers[p].size(); ++i) {
      sources.push_back({static_cast<std::int32_t>(i), &pieces[p], givers[p][i]->devices});
    }
    std::vector<Sink> sinks;
    for (const std::int32_t device : holders[p]) sinks.push_back({&pieces[p], device});
    builder.AddExchange(
        MakeExchange(machine, sources, sinks), sinks, data.item_bytes,
        [&](std::int32_t source, std::int32_t device) { return tasks(*givers[p][source], device); },
        [&](std::int32_t sink) { return std::array<TaskRef, 1>{updates[sinks[sink].device]}; },
        Order(kBackwardPass, last, kWeightClass, data.number, static_cast<std::int64_t>(p), 0, 0));
  }
  return builder.Finished(users_[weight], [this](std::int32_t block) { return ComputeTasks(block); });
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

  // Gates are left out: who waits for a gate waits for all that the gate waits for.
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;  // task, what it waits for
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    std::vector<std::vector<std::int32_t>> into(group.gates);
    std::vector<std::pair<std::int32_t, TaskRef>> out_of;
    const auto collect = [&](std::int32_t from_group, const Successors& rows) {
      for (std::size_t t = 0; t + 1 < rows.begin.size(); ++t) {
        for (std::int32_t e = rows.begin[t]; e < rows.begin[t + 1]; ++e) {
          const TaskRef to = rows.targets[e];
          const auto from = static_cast<std::int32_t>(t);
          if (from_group == static_cast<std::int32_t>(g) && from >= group.task_count()) {
            out_of.emplace_back(from - group.task_count(), to);
          } else if (to.group == static_cast<std::int32_t>(g) && to.task >= group.task_count()) {
            into[to.task - group.task_count()].push_back(id_of({from_group, from}));
          } else {
            edges.emplace_back(id_of(to), id_of({from_group, from}));
          }
        }
      }
    };
    collect(static_cast<std::int32_t>(g), group.own);
    for (const Attachment& attachment : group.attached) collect(attachment.block, attachment.successors);
    for (const auto& [gate, to] : out_of) {
      for (const std::int32_t before : into[gate]) edges.emplace_back(id_of(to), before);
    }
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

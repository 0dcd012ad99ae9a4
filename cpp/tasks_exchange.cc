// How the groups of blocks and of values are built.

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <utility>

#include "tasks.h"

namespace soapstone {
namespace {

bool Holds(std::span<const std::int32_t> devices, std::int32_t device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

// The turn of each device among those that need something: its rank. `turns` has ones where it does.
void RankTurns(std::vector<std::int32_t>* turns) {
  std::int32_t rank = 0;
  for (std::int32_t& turn : *turns) {
    if (turn != 0) turn = rank++;
  }
}

// Whether all devices of a placement are different.
bool IsSpread(const Placement& placement) {
  for (std::size_t i = 0; i < placement.devices.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (placement.devices[i] == placement.devices[j]) return false;
    }
  }
  return true;
}

}  // namespace

void TaskGraph::BuildCompute(std::int32_t block) {
  const Placement& placement = placements_[block];
  const Layout& layout = *placement.layout;
  const MachineData& machine = problem_->machine;
  const bool has_backward = problem_->blocks[block].needs_backward;
  const std::int64_t back_position = static_cast<std::int64_t>(block_count()) - 1 - block;
  const std::int32_t last = layout.segments - 1;
  const auto places = static_cast<std::int32_t>(placement.devices.size());
  for (const bool backward : {false, true}) {
    if (backward && !has_backward) break;
    const std::vector<double>& seconds = backward ? layout.backward_s : layout.forward_s;
    for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
      const TaskOrder order = backward ? Order(kBackwardPass, back_position, kComputeClass, last - segment, 0)
                                       : Order(kForwardPass, block, kComputeClass, segment, 0);
      for (std::int32_t pc = 0; pc < places; ++pc) {
        const std::int32_t device = placement.devices[pc];
        const std::int32_t shard = pc / placement.copies;
        const std::size_t cost = (machine.kind[device] * layout.segments + segment) * layout.parts + shard;
        const Ref task = draft_.Add(backward ? TaskKind::kBackward : TaskKind::kForward, device, seconds[cost], 0,
                                    order + static_cast<TaskOrder>(pc));
        if (backward) {
          draft_.Wait(task, {Ref::kOwn, segment == last ? Place(block, last, pc)
                                                        : PassTasks(block) + Place(block, segment + 1, pc)});
        } else if (segment > 0) {
          draft_.Wait(task, {Ref::kOwn, Place(block, segment - 1, pc)});
        }
      }
    }
  }
  if (has_backward) {
    ForEachTurn(placement, [&](std::int32_t pc, std::int32_t before, bool is_forward) {
      const Ref forward = {Ref::kOwn, is_forward ? Place(block, 0, pc) : Place(block, last, before)};
      const Ref back = {Ref::kOwn, PassTasks(block) + (is_forward ? Place(block, 0, before) : Place(block, last, pc))};
      is_forward ? draft_.Wait(forward, back) : draft_.Wait(back, forward);
    });
  }
  if (layout.seams.empty()) return;
  const bool is_spread = IsSpread(placement);
  TaskOrder forward_order = 0;
  TaskOrder backward_order = 0;
  for (std::size_t s = 0; s < layout.seams.size(); ++s) {
    const SeamData& seam = layout.seams[s];
    if (s == 0 || layout.seams[s - 1].segment != seam.segment) {
      forward_order = Order(kForwardPass, block, kSeamClass, seam.segment, 0);
      backward_order = Order(kBackwardPass, back_position, kSeamClass, last - seam.segment, 0);
    }
    for (const bool backward : {false, true}) {
      if (backward && !(seam.is_mutual && has_backward)) break;
      TaskOrder* order = backward ? &backward_order : &forward_order;
      if (is_spread && placement.copies == 1 && seam.classes.count() > 0) {
        AddSeamInClasses(block, seam, backward, order);
      } else {
        AddSeam(block, seam, backward, is_spread, order);
      }
    }
  }
}

void TaskGraph::AddSeamInClasses(std::int32_t block, const SeamData& seam, bool backward, TaskOrder* order) {
  const Placement& placement = placements_[block];
  const std::int32_t skipped = backward ? PassTasks(block) : 0;
  // Moves come in the order of their first devices.
  std::vector<std::pair<std::int32_t, std::int32_t>>& rows = seam_rows_;
  rows.clear();
  for (std::int32_t row = 0; row < seam.classes.count(); ++row) {
    if (seam.classes[row].size() < 2) continue;
    std::int32_t least = problem_->machine.device_count;
    for (const std::int32_t shard : seam.classes[row]) least = std::min(least, placement.devices[shard]);
    rows.emplace_back(least, row);
  }
  std::sort(rows.begin(), rows.end());
  for (const auto& [least, row] : rows) {
    distinct_.clear();
    for (const std::int32_t shard : seam.classes[row]) distinct_.push_back(placement.devices[shard]);
    std::sort(distinct_.begin(), distinct_.end());
    const std::int64_t size_bytes = Volume(seam.boxes[seam.classes[row][0]]) * seam.item_bytes;
    const auto [enter, leave] = draft_.AddMove(Pattern::kAllReduce, distinct_, size_bytes, order);
    for (const std::int32_t shard : seam.classes[row]) {
      draft_.Wait(enter, {Ref::kOwn, skipped + Place(block, seam.segment + (backward ? 1 : 0), shard)});
      draft_.Wait({Ref::kOwn, skipped + Place(block, seam.segment + (backward ? 0 : 1), shard)}, leave);
    }
  }
}

void TaskGraph::AddSeam(std::int32_t block, const SeamData& seam, bool backward, bool is_spread, TaskOrder* order) {
  const Placement& placement = placements_[block];
  if (is_spread) {
    // A device has one task in each segment, which gives and takes all there is to it.
    place_of_device_.resize(problem_->machine.device_count);
    for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
      place_of_device_[placement.devices[pc]] = static_cast<std::int32_t>(pc);
    }
  }
  const Alike& behind = placement.layout->alike[seam.alike];
  Rows devices;
  for (std::int32_t i = 0; i < behind.count(); ++i) AppendDevices(placement, behind[i], &devices);
  std::vector<Source> sources;
  for (std::int32_t i = 0; i < behind.count(); ++i) {
    sources.push_back({seam.summands[i], &seam.boxes[behind[i][0]], devices[i], placement.LaneOf(behind[i][0])});
  }
  std::set<std::pair<std::int32_t, BoxBounds>> wanted;
  for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
    wanted.emplace(placement.devices[pc], seam.boxes[pc / placement.copies]);
  }
  std::vector<Sink> sinks;
  for (const auto& [device, box] : wanted) sinks.push_back({&box, device});
  // The tasks of some shards, on one device, in one segment.
  const auto on = [&](std::span<const std::int32_t> shards, std::int32_t device, std::int32_t segment) {
    std::vector<Ref> found;
    ForEachOn(placement, shards, device, [&](std::int32_t pc) {
      found.push_back({Ref::kOwn, (backward ? PassTasks(block) : 0) + Place(block, segment, pc)});
    });
    return found;
  };
  const std::int32_t before = seam.segment + (backward ? 1 : 0);
  const std::int32_t then = seam.segment + (backward ? 0 : 1);
  const auto only = [&](std::int32_t device, std::int32_t segment) {
    const std::int32_t skipped = backward ? PassTasks(block) : 0;
    return std::array<Ref, 1>{Ref{Ref::kOwn, skipped + Place(block, segment, place_of_device_[device])}};
  };
  const Exchange exchange = MakeExchange(problem_->machine, sources, sinks);
  if (is_spread) {
    draft_.AddExchange(
        exchange, sinks, seam.item_bytes,
        [&](std::int32_t, std::int32_t device) { return only(device, before); },
        [&](std::int32_t sink) { return only(sinks[sink].device, then); }, order);
    return;
  }
  const auto gives = [&](std::int32_t source, std::int32_t device) { return on(behind[source], device, before); };
  const auto takes = [&](std::int32_t sink) {
    std::vector<Ref> found;
    for (std::int32_t i = 0; i < behind.count(); ++i) {
      if (!Intersection(*sources[i].box, *sinks[sink].box)) continue;
      const std::vector<Ref> more = on(behind[i], sinks[sink].device, then);
      found.insert(found.end(), more.begin(), more.end());
    }
    return found;
  };
  draft_.AddExchange(exchange, sinks, seam.item_bytes, gives, takes, order);
}

const Written& TaskGraph::WrittenOf(std::int32_t value) const {
  const std::vector<Written>& written = placements_[writer_[value]].layout->written;
  return *std::find_if(written.begin(), written.end(),
                       [value](const Written& each) { return each.port.subject == value; });
}

void TaskGraph::AddForward(std::int32_t value, const Written& written) {
  const ValueData& data = problem_->values[value];
  const MachineData& machine = problem_->machine;
  BoxTable& table = tables_->values[value];
  const std::int32_t writer = writer_[value];
  const std::vector<std::int32_t>& readers = readers_[value];
  const Placement& from = placements_[writer];
  const auto of_writer = static_cast<std::int32_t>(readers.size());
  holders_.Clear();
  for (std::int32_t entry = 0; entry < written.shards.count(); ++entry) {
    AppendDevices(from, written.shards[entry], &holders_);
  }
  if (holders_.items.size() != static_cast<std::size_t>(holders_.count())) {
    std::fill(turns_.begin(), turns_.end(), 0);
    for (const std::int32_t reader : readers) {
      const Placement& to = placements_[reader];
      for (const Port& port : to.layout->read) {
        if (port.subject != value) continue;
        for (std::size_t pc = 0; pc < to.devices.size(); ++pc) {
          if (port.boxes[pc / to.copies] != BoxTable::kNone) turns_[to.devices[pc]] = 1;
        }
      }
    }
    RankTurns(&turns_);
  }
  const auto givers = [&](std::int32_t source, std::int32_t device, const auto& visit) {
    ForEachOn(from, written.shards[source], device, [&](std::int32_t pc) {
      visit(Ref{of_writer, Place(writer, written.port.segment, pc)});
    });
  };
  parts_.clear();
  for (std::size_t r = 0; r < readers.size(); ++r) {
    const std::int32_t reader = readers[r];
    const Placement& to = placements_[reader];
    for (const Port& port : to.layout->read) {
      if (port.subject != value) continue;
      for (std::int32_t shard = 0; shard < to.layout->parts; ++shard) {
        const std::int32_t box = port.boxes[shard];
        if (box == BoxTable::kNone) continue;
        written.ForEachUnder(table.Bounds(box), [&](std::int32_t source, std::int64_t volume) {
          const std::span<const std::int32_t> devices = holders_[source];
          for (std::int32_t copy = 0; copy < to.copies; ++copy) {
            const std::int32_t pc = shard * to.copies + copy;
            const std::int32_t device = to.devices[pc];
            const Ref task = {static_cast<std::int32_t>(r), Place(reader, port.segment, pc)};
            if (Holds(devices, device)) {
              givers(source, device, [&](Ref before) { draft_.Wait(task, before); });
              continue;
            }
            const std::int32_t giver = Nearest(machine, devices, device, turns_[device]);
            const std::int32_t lane = from.LaneOf(written.shards[source][0]);
            parts_.push_back({giver, device, written.box[source], box, source, task, volume, lane});
          }
        });
      }
    }
  }
  const auto adds = [&](const std::vector<std::int32_t>& sources) {
    if (written.summand.front() == written.summand.back()) return false;  // they are sorted
    for (std::size_t i = 0; i < sources.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        const std::int32_t a = sources[i];
        const std::int32_t b = sources[j];
        if (written.summand[a] != written.summand[b] && written.box[a] == written.box[b]) return true;
      }
    }
    return false;
  };
  TaskOrder order = Order(kForwardPass, writer, kValueClass, value_rank_[value], 0);
  draft_.AddParts(&parts_, &table, data.item_bytes, givers, adds, &order);
}

// Adds what a block's ports of one kind read of a value or weight, and compute the gradient of; where they
// run goes to `holders_`.
void TaskGraph::CollectReadings(std::int32_t attachment, std::int32_t block, std::int32_t subject,
                                const std::vector<Port>& ports) {
  const Placement& placement = placements_[block];
  for (const Port& port : ports) {
    if (port.subject != subject || !port.gives_gradient) continue;
    const Alike& alike = placement.layout->alike[port.alike];
    for (std::int32_t i = 0; i < alike.count(); ++i) {
      const std::int32_t box = port.boxes[alike[i][0]];
      if (box == BoxTable::kNone) continue;
      readings_.push_back({attachment, block, port.segment, alike[i], box});
      AppendDevices(placement, alike[i], &holders_);
    }
  }
}

void TaskGraph::AddBackward(std::int32_t value, const Written& written) {
  const ValueData& data = problem_->values[value];
  const MachineData& machine = problem_->machine;
  BoxTable& table = tables_->values[value];
  const std::int32_t writer = writer_[value];
  const std::vector<std::int32_t>& readers = readers_[value];
  const Placement& to = placements_[writer];
  const auto of_writer = static_cast<std::int32_t>(readers.size());
  readings_.clear();
  holders_.Clear();
  for (std::size_t r = 0; r < readers.size(); ++r) {
    CollectReadings(static_cast<std::int32_t>(r), readers[r], value, placements_[readers[r]].layout->read);
  }
  if (holders_.items.size() != readings_.size()) {
    std::fill(turns_.begin(), turns_.end(), 0);
    for (const std::int32_t device : to.devices) turns_[device] = 1;
    RankTurns(&turns_);
  }
  const auto givers = [&](std::int32_t source, std::int32_t device, const auto& visit) {
    const Reading& reading = readings_[source];
    ForEachOn(placements_[reading.block], reading.shards, device, [&](std::int32_t pc) {
      visit(Ref{reading.attachment, Place(reading.block, reading.segment, pc)});
    });
  };
  parts_.clear();
  for (std::size_t i = 0; i < readings_.size(); ++i) {
    const Reading& reading = readings_[i];
    const auto source = static_cast<std::int32_t>(i);
    const std::span<const std::int32_t> devices = holders_[source];
    written.ForEachUnder(table.Bounds(reading.box), [&](std::int32_t entry, std::int64_t volume) {
      for (const std::int32_t shard : written.shards[entry]) {
        for (std::int32_t copy = 0; copy < to.copies; ++copy) {
          const std::int32_t pc = shard * to.copies + copy;
          const std::int32_t device = to.devices[pc];
          const Ref task = {of_writer, Place(writer, written.port.segment, pc)};
          if (Holds(devices, device)) {
            givers(source, device, [&](Ref before) { draft_.Wait(task, before); });
            continue;
          }
          const std::int32_t giver = Nearest(machine, devices, device, turns_[device]);
          const std::int32_t lane = placements_[reading.block].LaneOf(reading.shards[0]);
          parts_.push_back({giver, device, reading.box, written.box[entry], source, task, volume, lane});
        }
      }
    });
  }
  const auto adds = [&](const std::vector<std::int32_t>& sources) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (table.Overlaps(readings_[sources[i]].box, readings_[sources[j]].box)) return true;
      }
    }
    return false;
  };
  TaskOrder order = Order(kBackwardPass, block_count() - 1 - writer, kValueClass, value_rank_[value], 0);
  draft_.AddParts(&parts_, &table, data.item_bytes, givers, adds, &order);
}

}  // namespace soapstone

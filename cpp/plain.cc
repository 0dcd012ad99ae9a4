#include "plain.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <queue>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "draft.h"
#include "exchange.h"

namespace soapstone {
namespace {

using Key = std::pair<std::int32_t, BoxBounds>;  // device, box

class Builder {
 public:
  Builder(const Problem& problem, const BoxTables& tables, const std::vector<Placement>& strategy)
      : problem_(problem), tables_(tables), strategy_(strategy), draft_(&problem.machine, Draft::Batches::kApart), first_(strategy.size()) {}

  const Draft& Built() {
    for (std::int32_t block = 0; block < blocks(); ++block) AddCompute(block);
    for (std::int32_t block = 0; block < blocks(); ++block) {
      for (const SeamData& seam : strategy_[block].layout->seams) AddSeam(block, seam, false);
      for (const SeamData& seam : strategy_[block].layout->seams) {
        if (seam.is_mutual && problem_.blocks[block].needs_backward) AddSeam(block, seam, true);
      }
    }
    for (std::int32_t block = 0; block < blocks(); ++block) {
      for (const Written& written : strategy_[block].layout->written) AddValue(block, written);
    }
    for (std::size_t weight = 0; weight < problem_.weights.size(); ++weight) {
      AddWeight(static_cast<std::int32_t>(weight));
    }
    return draft_;
  }

 private:
  // Shards of a block that compute the gradient of one box.
  struct Reading {
    std::int32_t block;
    std::int32_t segment;
    std::span<const std::int32_t> shards;
    BoxBounds box;
    std::vector<std::int32_t> devices;
  };

  std::int32_t blocks() const { return static_cast<std::int32_t>(strategy_.size()); }

  // Every task of one prefix of the order gets the next number.
  TaskOrder* NextOrder(TaskOrder prefix) { return &orders_.try_emplace(prefix, prefix).first->second; }

  BoxBounds Bounds(const BoxTable& table, std::int32_t box) const {
    return {table.Bounds(box).begin(), table.Bounds(box).end()};
  }

  Ref Forward(std::int32_t block, std::int32_t segment, std::int32_t pc) const {
    return {Ref::kOwn, first_[block] + segment * static_cast<std::int32_t>(strategy_[block].devices.size()) + pc};
  }
  Ref Backward(std::int32_t block, std::int32_t segment, std::int32_t pc) const {
    return Forward(block, strategy_[block].layout->segments + segment, pc);
  }

  std::vector<Ref> On(std::int32_t block, std::span<const std::int32_t> shards, std::int32_t device,
                      std::int32_t segment, bool backward) const {
    const Placement& placement = strategy_[block];
    std::vector<Ref> found;
    for (const std::int32_t shard : shards) {
      for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
        const std::int32_t pc = shard * placement.copies + copy;
        if (placement.devices[pc] != device) continue;
        found.push_back(backward ? Backward(block, segment, pc) : Forward(block, segment, pc));
      }
    }
    return found;
  }

  std::vector<std::int32_t> DevicesOf(const Placement& placement, std::span<const std::int32_t> shards) const {
    std::vector<std::int32_t> devices;
    for (const std::int32_t shard : shards) {
      for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
        const std::int32_t device = placement.devices[shard * placement.copies + copy];
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
      }
    }
    return devices;
  }

  void AddCompute(std::int32_t block) {
    const Placement& placement = strategy_[block];
    const Layout& layout = *placement.layout;
    first_[block] = draft_.tasks();
    for (const bool backward : {false, true}) {
      if (backward && !problem_.blocks[block].needs_backward) break;
      const std::vector<double>& seconds = backward ? layout.backward_s : layout.forward_s;
      for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
        const std::int32_t last = layout.segments - 1;
        const TaskOrder order = backward ? Order(kBackwardPass, blocks() - 1 - block, kComputeClass, last - segment, 0)
                                         : Order(kForwardPass, block, kComputeClass, segment, 0);
        for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(placement.devices.size()); ++pc) {
          const std::int32_t device = placement.devices[pc];
          const std::size_t cost =
              (problem_.machine.kind[device] * layout.segments + segment) * layout.parts + pc / placement.copies;
          const Ref task = draft_.Add(backward ? TaskKind::kBackward : TaskKind::kForward, device, seconds[cost], 0,
                                      order + static_cast<TaskOrder>(pc));
          if (backward) {
            draft_.Wait(task, segment == last ? Forward(block, last, pc) : Backward(block, segment + 1, pc));
          } else if (segment > 0) {
            draft_.Wait(task, Forward(block, segment - 1, pc));
          }
        }
      }
    }
    if (!problem_.blocks[block].needs_backward) return;
    const std::int32_t last = layout.segments - 1;
    ForEachTurn(placement, [&](std::int32_t pc, std::int32_t before, bool is_forward) {
      if (is_forward) {
        draft_.Wait(Forward(block, 0, pc), Backward(block, 0, before));
      } else {
        draft_.Wait(Backward(block, last, pc), Forward(block, last, before));
      }
    });
  }

  void AddSeam(std::int32_t block, const SeamData& seam, bool backward) {
    const Placement& placement = strategy_[block];
    const Alike& behind = placement.layout->alike[seam.alike];
    std::vector<std::vector<std::int32_t>> devices;
    std::vector<Source> sources;
    for (std::int32_t i = 0; i < behind.count(); ++i) devices.push_back(DevicesOf(placement, behind[i]));
    for (std::int32_t i = 0; i < behind.count(); ++i) {
      sources.push_back({seam.summands[i], &seam.boxes[behind[i][0]], devices[i], placement.LaneOf(behind[i][0])});
    }
    std::set<Key> wanted;
    for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
      wanted.emplace(placement.devices[pc], seam.boxes[pc / placement.copies]);
    }
    std::vector<Sink> sinks;
    for (const auto& [device, box] : wanted) sinks.push_back({&box, device});
    const auto gives = [&](std::int32_t source, std::int32_t device) {
      return On(block, behind[source], device, seam.segment + (backward ? 1 : 0), backward);
    };
    const auto takes = [&](std::int32_t sink) {
      std::vector<Ref> found;
      for (std::int32_t i = 0; i < behind.count(); ++i) {
        if (!Intersection(*sources[i].box, *sinks[sink].box)) continue;
        const auto more = On(block, behind[i], sinks[sink].device, seam.segment + (backward ? 0 : 1), backward);
        found.insert(found.end(), more.begin(), more.end());
      }
      return found;
    };
    const std::int32_t last = placement.layout->segments - 1;
    TaskOrder* order = NextOrder(backward ? Order(kBackwardPass, blocks() - 1 - block, kSeamClass, last - seam.segment, 0)
                                          : Order(kForwardPass, block, kSeamClass, seam.segment, 0));
    draft_.AddExchange(MakeExchange(problem_.machine, sources, sinks), sinks, seam.item_bytes, gives, takes, order);
  }

  void AddReadings(std::int32_t block, std::int32_t subject, const std::vector<Port>& ports, const BoxTable& table,
                   std::vector<Reading>* readings) const {
    for (const Port& port : ports) {
      if (port.subject != subject || !port.gives_gradient) continue;
      const Alike& alike = strategy_[block].layout->alike[port.alike];
      for (std::int32_t i = 0; i < alike.count(); ++i) {
        const std::int32_t box = port.boxes[alike[i][0]];
        if (box == BoxTable::kNone) continue;
        readings->push_back(
            {block, port.segment, alike[i], Bounds(table, box), DevicesOf(strategy_[block], alike[i])});
      }
    }
  }

  // A value on its way to its readers, and its gradient on the way back.
  void AddValue(std::int32_t writer, const Written& written) {
    const std::int32_t value = written.port.subject;
    const ValueData& data = problem_.values[value];
    const BoxTable& table = tables_.values[value];
    const Placement& from = strategy_[writer];
    const std::int32_t segment = written.port.segment;
    std::vector<BoxBounds> boxes;
    std::vector<std::vector<std::int32_t>> devices;
    for (std::int32_t i = 0; i < written.shards.count(); ++i) {
      boxes.push_back(Bounds(table, written.box[i]));
      devices.push_back(DevicesOf(from, written.shards[i]));
    }
    std::vector<Source> sources;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const std::int32_t first = written.shards[static_cast<std::int32_t>(i)][0];
      sources.push_back({written.summand[i], &boxes[i], devices[i], from.LaneOf(first)});
    }
    std::map<Key, std::vector<Ref>> wanted;
    std::vector<Reading> readings;
    for (std::int32_t reader = 0; reader < blocks(); ++reader) {
      const Placement& to = strategy_[reader];
      for (const Port& port : to.layout->read) {
        if (port.subject != value) continue;
        for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(to.devices.size()); ++pc) {
          const std::int32_t box = port.boxes[pc / to.copies];
          if (box == BoxTable::kNone) continue;
          wanted[{to.devices[pc], Bounds(table, box)}].push_back(Forward(reader, port.segment, pc));
        }
      }
      AddReadings(reader, value, to.layout->read, table, &readings);
    }
    AddMoves(sources, wanted, data.item_bytes,
             [&](std::int32_t source, std::int32_t device) {
               return On(writer, written.shards[source], device, segment, false);
             },
             NextOrder(Order(kForwardPass, writer, kValueClass, RankOf(writer, value), 0)));
    if (!data.is_differentiable) return;
    wanted.clear();
    for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(from.devices.size()); ++pc) {
      const std::int32_t box = written.port.boxes[pc / from.copies];
      wanted[{from.devices[pc], Bounds(table, box)}].push_back(Backward(writer, segment, pc));
    }
    AddMoves(SourcesOf(readings), wanted, data.item_bytes,
             [&](std::int32_t source, std::int32_t device) {
               return On(readings[source].block, readings[source].shards, device, readings[source].segment, true);
             },
             NextOrder(Order(kBackwardPass, blocks() - 1 - writer, kValueClass, RankOf(writer, value), 0)));
  }

  std::vector<Source> SourcesOf(const std::vector<Reading>& readings) const {
    std::vector<Source> sources;
    for (std::size_t i = 0; i < readings.size(); ++i) {
      const std::int32_t lane = strategy_[readings[i].block].LaneOf(readings[i].shards[0]);
      sources.push_back({static_cast<std::int32_t>(i), &readings[i].box, readings[i].devices, lane});
    }
    return sources;
  }

  template <typename Gives>
  void AddMoves(const std::vector<Source>& sources, const std::map<Key, std::vector<Ref>>& wanted,
                std::int64_t item_bytes, const Gives& gives, TaskOrder* order) {
    std::vector<Sink> sinks;
    std::vector<const std::vector<Ref>*> takers;
    for (const auto& [key, tasks] : wanted) {
      sinks.push_back({&key.second, key.first});
      takers.push_back(&tasks);
    }
    const auto takes = [&](std::int32_t sink) -> const std::vector<Ref>& { return *takers[sink]; };
    draft_.AddExchange(MakeExchange(problem_.machine, sources, sinks), sinks, item_bytes, gives, takes, order);
  }

  // The place of a value among those of its writer, by number.
  std::int64_t RankOf(std::int32_t writer, std::int32_t value) const {
    const std::vector<Written>& all = strategy_[writer].layout->written;
    return std::count_if(all.begin(), all.end(), [&](const Written& each) {
      return problem_.values[each.port.subject].number < problem_.values[value].number;
    });
  }

  void AddWeight(std::int32_t weight) {
    const WeightData& data = problem_.weights[weight];
    const MachineData& machine = problem_.machine;
    std::vector<Reading> readings;
    for (std::int32_t user = 0; user < blocks(); ++user) {
      AddReadings(user, weight, strategy_[user].layout->weights, tables_.weights[weight], &readings);
    }
    std::set<BoxBounds> boxes;
    for (const Reading& reading : readings) boxes.insert(reading.box);
    const std::vector<BoxBounds> pieces = CutAtBorders({boxes.begin(), boxes.end()});
    std::vector<std::int64_t> held_bytes(machine.device_count, 0);
    std::vector<std::set<std::int32_t>> holders(pieces.size());
    std::vector<std::vector<const Reading*>> givers(pieces.size());
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      for (const Reading& reading : readings) {
        if (Intersection(reading.box, pieces[p]) != pieces[p]) continue;
        givers[p].push_back(&reading);
        holders[p].insert(reading.devices.begin(), reading.devices.end());
      }
      for (const std::int32_t device : holders[p]) held_bytes[device] += Volume(pieces[p]) * data.item_bytes;
    }
    std::vector<Ref> updates(machine.device_count, {Ref::kOwn, -1});
    for (std::int32_t device = 0; device < machine.device_count; ++device) {
      if (held_bytes[device] == 0) continue;
      const std::int32_t kind = machine.kind[device];
      const double traffic = static_cast<double>(held_bytes[device]) * machine.update_bytes_per_byte;
      const double seconds = std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind]);
      updates[device] =
          draft_.Add(TaskKind::kUpdate, device, seconds, 0, Order(kUpdatePass, weight, kComputeClass, 0, device));
    }
    // Weights with the same first reader come one after the other, by number.
    TaskOrder* order = NextOrder(Order(kBackwardPass, blocks() - 1 - readings.front().block, kWeightClass, 0, 0));
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      std::vector<Source> sources;
      for (std::size_t i = 0; i < givers[p].size(); ++i) {
        sources.push_back({static_cast<std::int32_t>(i), &pieces[p], givers[p][i]->devices});
      }
      std::vector<Sink> sinks;
      for (const std::int32_t device : holders[p]) sinks.push_back({&pieces[p], device});
      const auto gives = [&](std::int32_t source, std::int32_t device) {
        const Reading& reading = *givers[p][source];
        return On(reading.block, reading.shards, device, reading.segment, true);
      };
      const auto takes = [&](std::int32_t sink) { return std::array<Ref, 1>{updates[sinks[sink].device]}; };
      draft_.AddExchange(MakeExchange(machine, sources, sinks), sinks, data.item_bytes, gives, takes, order);
    }
  }

  const Problem& problem_;
  const BoxTables& tables_;
  const std::vector<Placement>& strategy_;
  Draft draft_;
  std::vector<std::int32_t> first_;  // by block: its first task
  std::map<TaskOrder, TaskOrder> orders_;
};

}  // namespace

void Plain::Place(std::int32_t block, const Placement& placement) {
  strategy_[block] = placement;
  is_known_ = false;
}

double Plain::Makespan() {
  if (!is_known_) makespan_s_ = Simulated();
  is_known_ = true;
  return makespan_s_;
}

double Plain::Propose(std::span<const Change> changes, double) {
  ++counters_.built;
  ++counters_.run;
  replaced_.assign(changes.begin(), changes.end());
  for (Change& change : replaced_) std::swap(strategy_[change.block], change.placement);
  proposed_s_ = Simulated();
  return proposed_s_;
}

void Plain::Accept() {
  if (replaced_.empty()) return;
  makespan_s_ = proposed_s_;
  replaced_.clear();
}

void Plain::Reject() {
  for (Change& change : replaced_) std::swap(strategy_[change.block], change.placement);
  replaced_.clear();
}

std::int32_t Plain::task_count() const {
  Builder builder(problem_, tables_, strategy_);
  return DraftView(builder.Built()).tasks();
}

// The makespan of the strategy, by Algorithm 1.
double Plain::Simulated() {
  Builder builder(problem_, tables_, strategy_);
  const DraftView draft(builder.Built());
  const std::int32_t count = draft.tasks() + draft.gates();
  std::vector<std::vector<std::int32_t>> next(count);
  std::vector<std::int32_t> waits(count, 0);
  draft.ForEachEdge([&](std::int32_t before, std::int32_t task) {
    next[before].push_back(task);
    ++waits[task];
  });
  using Ready = std::tuple<double, TaskOrder, std::int32_t>;
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> queue;
  std::vector<double> ready_s(count, 0);
  std::vector<double> free_s(problem_.machine.device_count + problem_.machine.link_count, 0);
  for (std::int32_t task = 0; task < draft.tasks(); ++task) {
    if (waits[task] == 0) queue.emplace(0.0, draft.order(task), task);
  }
  double makespan_s = 0;
  const auto arrive = [&](const auto& self, std::int32_t task, double end_s) -> void {
    ready_s[task] = std::max(ready_s[task], end_s);
    if (--waits[task] > 0) return;
    if (task < draft.tasks()) {
      queue.emplace(ready_s[task], draft.order(task), task);
    } else {
      for (const std::int32_t after : next[task]) self(self, after, ready_s[task]);
    }
  };
  while (!queue.empty()) {
    const auto [when_s, order, task] = queue.top();
    queue.pop();
    ++counters_.simulated;
    double& until_s = free_s[draft.resource(task)];
    until_s = std::max(when_s, until_s) + draft.duration_s(task);
    makespan_s = std::max(makespan_s, until_s);
    for (const std::int32_t after : next[task]) arrive(arrive, after, until_s);
  }
  return makespan_s;
}

}  // namespace soapstone

// Every task of a strategy, built anew by comparing every box with every other: the shortest way to read what a
// task graph is in C++.
//
// The twin of src/soapstone/tasks/build.py. Given Buffers, it also enters what every device holds, as
// src/soapstone/tasks/buffers.py does; or else it can put gradients into buckets.
//
// Thread safety: a PlainBuilder belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_PLAIN_BUILDER_H_
#define SOAPSTONE_CPP_PLAIN_BUILDER_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "buffers.h"
#include "draft.h"
#include "exchange.h"
#include "layout.h"
#include "placement.h"
#include "problem.h"

namespace soapstone {

class PlainBuilder {
 public:
  // REQUIRES: all that is given outlives it. Without buffers, only tasks are built; with them, gradients are not
  // put into buckets.
  PlainBuilder(const Problem& problem, const BoxTables& tables, const std::vector<Placement>& strategy,
               Buffers* buffers = nullptr)
      : problem_(problem),
        tables_(tables),
        strategy_(strategy),
        draft_(&problem.machine, Draft::Batches::kApart),
        first_(strategy.size()),
        buffers_(buffers),
        has_buckets_(problem.has_buckets && buffers == nullptr) {}

  const Draft& Built() {
    for (std::int32_t block = 0; block < blocks(); ++block) {
      AddCompute(block);
      if (buffers_ != nullptr) AddHeld(block);
    }
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
    for (auto& [key, bucket] : buckets_) AddBucket(key.second, &bucket);
    return draft_;
  }

 private:
  using Key = std::pair<std::int32_t, BoxBounds>;  // device, box

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

  // What the shards of a block write.
  void AddHeld(std::int32_t block) {
    const Placement& placement = strategy_[block];
    buffers_->Begin(block);
    for (const HeldData& held : buffers_->block(block).held) {
      for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(placement.devices.size()); ++pc) {
        const std::int32_t slot = buffers_->Hold(BufferKind::kActivation, placement.devices[pc],
                                                 held.size_bytes[pc / placement.copies]);
        buffers_->Make(slot, {Forward(block, held.made_in, pc).task, 1});
        buffers_->Need(slot, {Forward(block, held.needed_in, pc).task, 1});
        if (held.kept_for >= 0) buffers_->Need(slot, {Backward(block, held.kept_for, pc).task, 1});
      }
    }
  }

  // The buffers in which a device holds what some shards of a block write.
  std::vector<std::int32_t> HeldOn(std::int32_t block, std::int32_t held, std::span<const std::int32_t> shards,
                                   std::int32_t device) const {
    const Placement& placement = strategy_[block];
    const auto places = static_cast<std::int32_t>(placement.devices.size());
    std::vector<std::int32_t> found;
    ForEachOn(placement, shards, device,
              [&](std::int32_t pc) { found.push_back(buffers_->Of(block, held, places, pc)); });
    return found;
  }

  // The tasks of an exchange and, if wanted, what it holds; as Buffers::Exchanged has it.
  template <typename Gives, typename Takes, typename Keeps, typename Holds>
  void AddExchange(const std::vector<Source>& sources, const std::vector<Sink>& sinks, std::int64_t item_bytes,
                   BufferKind kind, const Gives& gives, const Takes& takes, const Keeps& keeps, const Holds& holds,
                   TaskOrder* order) {
    const Exchange exchange = MakeExchange(problem_.machine, sources, sinks);
    const std::int32_t first = draft_.tasks();
    draft_.AddExchange(exchange, sinks, item_bytes, gives, takes, order);
    if (buffers_ == nullptr) return;
    buffers_->Exchanged(problem_.machine, exchange, sources, sinks, item_bytes, first, kind, takes, keeps, holds);
  }

  static std::vector<std::int32_t> Nowhere(std::int32_t, std::int32_t) { return {}; }
  static std::vector<Ref> Never(std::int32_t) { return {}; }

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
    std::vector<std::vector<Ref>> takers(sinks.size());
    for (std::size_t sink = 0; sink < sinks.size(); ++sink) {
      for (std::int32_t i = 0; i < behind.count(); ++i) {
        if (!Intersection(*sources[i].box, *sinks[sink].box)) continue;
        const auto more = On(block, behind[i], sinks[sink].device, seam.segment + (backward ? 0 : 1), backward);
        takers[sink].insert(takers[sink].end(), more.begin(), more.end());
      }
    }
    const auto takes = [&](std::int32_t sink) -> const std::vector<Ref>& { return takers[sink]; };
    const std::int32_t number = NumberOf(*placement.layout, seam);
    const auto holds = [&](std::int32_t source, std::int32_t device) {
      if (seam.is_mutual) return std::vector<std::int32_t>();
      return HeldOn(block, buffers_->block(block).outputs[number], behind[source], device);
    };
    const std::int32_t last = placement.layout->segments - 1;
    TaskOrder* order = NextOrder(backward ? Order(kBackwardPass, blocks() - 1 - block, kSeamClass, last - seam.segment, 0)
                                          : Order(kForwardPass, block, kSeamClass, seam.segment, 0));
    AddExchange(sources, sinks, seam.item_bytes, BufferKind::kReceived, gives, takes, Never, holds, order);
  }

  // The place of a seam among those after its segment.
  static std::int32_t NumberOf(const Layout& layout, const SeamData& seam) {
    return static_cast<std::int32_t>(std::count_if(layout.seams.data(), &seam, [&](const SeamData& other) {
      return other.segment == seam.segment;
    }));
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
    std::map<Key, Takers> wanted;
    std::vector<Reading> readings;
    for (std::int32_t reader = 0; reader < blocks(); ++reader) {
      const Placement& to = strategy_[reader];
      for (const Port& port : to.layout->read) {
        if (port.subject != value) continue;
        for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(to.devices.size()); ++pc) {
          const std::int32_t box = port.boxes[pc / to.copies];
          if (box == BoxTable::kNone) continue;
          Takers& takers = wanted[{to.devices[pc], Bounds(table, box)}];
          takers.now.push_back(Forward(reader, port.segment, pc));
          if (port.is_kept) takers.later.push_back(Backward(reader, port.segment, pc));
        }
      }
      AddReadings(reader, value, to.layout->read, table, &readings);
    }
    const std::int32_t held = buffers_ == nullptr ? -1 : HeldOf(writer, value);
    AddMoves(sources, wanted, data.item_bytes, BufferKind::kReceived,
             [&](std::int32_t source, std::int32_t device) {
               return On(writer, written.shards[source], device, segment, false);
             },
             [&](std::int32_t source, std::int32_t device) {
               return HeldOn(writer, held, written.shards[source], device);
             },
             NextOrder(Order(kForwardPass, writer, kValueClass, RankOf(writer, value), 0)));
    if (!data.is_differentiable) return;
    wanted.clear();
    for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(from.devices.size()); ++pc) {
      const std::int32_t box = written.port.boxes[pc / from.copies];
      wanted[{from.devices[pc], Bounds(table, box)}].now.push_back(Backward(writer, segment, pc));
    }
    const auto gives = [&](std::int32_t source, std::int32_t device) {
      return On(readings[source].block, readings[source].shards, device, readings[source].segment, true);
    };
    std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> slots;  // by source and device
    AddMoves(SourcesOf(readings), wanted, data.item_bytes, BufferKind::kGradient, gives,
             [&](std::int32_t source, std::int32_t device) {
               const auto [at, is_new] = slots.try_emplace({source, device}, 0);
               if (is_new) {
                 at->second = buffers_->Hold(BufferKind::kGradient, device,
                                             Volume(readings[source].box) * data.item_bytes);
                 for (const Ref task : gives(source, device)) buffers_->Make(at->second, {task.task, 1});
               }
               return std::vector<std::int32_t>{at->second};
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

  // The tasks that wait for a box, and those of the backward pass that come back to it.
  struct Takers {
    std::vector<Ref> now;
    std::vector<Ref> later;
  };

  template <typename Gives, typename Holds>
  void AddMoves(const std::vector<Source>& sources, const std::map<Key, Takers>& wanted, std::int64_t item_bytes,
                BufferKind kind, const Gives& gives, const Holds& holds, TaskOrder* order) {
    std::vector<Sink> sinks;
    std::vector<const Takers*> takers;
    for (const auto& [key, tasks] : wanted) {
      sinks.push_back({&key.second, key.first});
      takers.push_back(&tasks);
    }
    const auto takes = [&](std::int32_t sink) -> const std::vector<Ref>& { return takers[sink]->now; };
    const auto keeps = [&](std::int32_t sink) -> const std::vector<Ref>& { return takers[sink]->later; };
    AddExchange(sources, sinks, item_bytes, kind, gives, takes, keeps, holds, order);
  }

  // Which of a block's buffers a value is in.
  std::int32_t HeldOf(std::int32_t block, std::int32_t value) const {
    for (const auto& [number, held] : buffers_->block(block).values) {
      if (number == value) return held;
    }
    return -1;
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
    TaskOrder* const order = NextOrder(Order(kBackwardPass, blocks() - 1 - readings.front().block, kWeightClass, 0, 0));
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
      if (has_buckets_ && AddSummed(data, sources, sinks, gives, takes, order)) continue;
      AddExchange(sources, sinks, data.item_bytes, BufferKind::kReceived, gives, takes, Never, Nowhere, order);
    }
    if (buffers_ != nullptr) AddWeightHeld(readings, updates, held_bytes);
  }

  // A bucket: what is in it, as far as it is known.
  struct Bucket {
    TaskOrder order = 0;  // of the last that is in it
    std::int64_t size_bytes = 0;
    std::vector<Ref> before;
    std::vector<Ref> after;
  };

  // Puts the gradient of a piece into its bucket; false if it is not one all-reduce of all that is given. The
  // order is counted up as if it had tasks of its own.
  template <typename Gives, typename Takes>
  bool AddSummed(const WeightData& data, const std::vector<Source>& sources, const std::vector<Sink>& sinks,
                 const Gives& gives, const Takes& takes, TaskOrder* order) {
    const Exchange exchange = MakeExchange(problem_.machine, sources, sinks);
    if (!IsOneSum(exchange, sources.size())) return false;
    const Move& move = exchange.moves[0];
    Bucket& bucket = buckets_[{data.shelf, move.devices}];
    bucket.order = std::max(bucket.order, *order);
    *order += static_cast<TaskOrder>(move.devices.size());
    bucket.size_bytes += move.elements * data.item_bytes;
    for (const auto& [source, device] : move.sources) {
      for (const Ref task : gives(source, device)) bucket.before.push_back(task);
    }
    for (const std::int32_t sink : move.sinks) {
      for (const Ref task : takes(sink)) bucket.after.push_back(task);
    }
    draft_.AddLocal(exchange, sinks, gives, takes);
    return true;
  }

  void AddBucket(const std::vector<std::int32_t>& devices, Bucket* bucket) {
    const auto [enter, leave] = draft_.AddMove(Pattern::kAllReduce, devices, bucket->size_bytes, &bucket->order);
    for (const Ref task : bucket->before) draft_.Wait(enter, task);
    for (const Ref task : bucket->after) draft_.Wait(task, leave);
  }

  // A weight on each device, and its gradient there until the update.
  void AddWeightHeld(const std::vector<Reading>& readings, const std::vector<Ref>& updates,
                     const std::vector<std::int64_t>& held_bytes) {
    std::vector<std::int32_t> slots(held_bytes.size(), -1);
    for (std::int32_t device = 0; device < static_cast<std::int32_t>(held_bytes.size()); ++device) {
      if (held_bytes[device] == 0) continue;
      buffers_->Hold(BufferKind::kWeight, device, held_bytes[device]);
      slots[device] = buffers_->Hold(BufferKind::kWeightGradient, device, held_bytes[device]);
      buffers_->Need(slots[device], {updates[device].task, 1});
    }
    for (const Reading& reading : readings) {
      for (const std::int32_t device : reading.devices) {
        for (const Ref task : On(reading.block, reading.shards, device, reading.segment, true)) {
          buffers_->Make(slots[device], {task.task, 1});
        }
      }
    }
  }

  const Problem& problem_;
  const BoxTables& tables_;
  const std::vector<Placement>& strategy_;
  Draft draft_;
  std::vector<std::int32_t> first_;  // by block: its first task
  std::map<TaskOrder, TaskOrder> orders_;
  Buffers* buffers_;
  bool has_buckets_;
  std::map<std::pair<std::int32_t, std::vector<std::int32_t>>, Bucket> buckets_;  // by shelf and devices
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PLAIN_BUILDER_H_

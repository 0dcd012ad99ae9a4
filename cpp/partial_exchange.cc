#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "partial.h"

namespace soapstone {

// A box may come by a collective, whose last hop is from any device.
double Partial::LagSeconds(std::int64_t size_bytes, std::int32_t to) const {
  return static_cast<double>(size_bytes) / widest_[to] + nearest_[to];
}

template <typename Gives, typename Takes>
void Partial::AddExchange(const std::vector<Source>& sources, const std::vector<Sink>& sinks,
                          std::int64_t item_bytes, bool is_decided, Pass pass, const Gives& gives,
                          const Takes& takes, Template* made) {
  const MachineData& machine = problem_->machine;
  // Which of several copies is sent may change with the numbers of the devices: the bound has to be one for all
  // relabellings.
  const bool is_exact = is_decided && (symmetry_->relabellings().size() == 1 ||
                                       std::all_of(sources.begin(), sources.end(), [](const Source& source) {
                                         return source.devices.size() == 1;
                                       }));
  if (!is_exact) {
    made->is_exact[pass] = false;
    for (std::size_t k = 0; k < sinks.size(); ++k) {
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const auto overlap = Intersection(*sources[i].box, *sinks[k].box);
        if (!overlap) continue;
        const auto& devices = sources[i].devices;
        const bool is_local = std::find(devices.begin(), devices.end(), sinks[k].device) != devices.end();
        std::vector<Ref> givers;
        for (const std::int32_t device : devices) {
          if (is_local && device != sinks[k].device) continue;
          for (const Ref& giver : gives(static_cast<std::int32_t>(i), device)) givers.push_back(giver);
        }
        const double lag_s = is_local ? 0 : LagSeconds(Volume(*overlap) * item_bytes, sinks[k].device);
        for (const Ref& taker : takes(static_cast<std::int32_t>(k))) made->lags.push_back({lag_s, taker, givers});
      }
    }
    return;
  }
  const Exchange exchange = MakeExchange(machine, sources, sinks);
  for (const auto& [source, sink] : exchange.local) {
    for (const Ref& giver : gives(source, sinks[sink].device)) {
      for (const Ref& taker : takes(sink)) made->lags.push_back({0, taker, {giver}});
    }
  }
  for (const Move& move : exchange.moves) {
    Template::Move task;
    const std::int64_t size_bytes = move.elements * item_bytes;
    const auto count = static_cast<std::int64_t>(move.devices.size());
    const bool is_transfer = move.pattern == Pattern::kTransfer;
    double bandwidth = std::numeric_limits<double>::infinity();
    double latency = 0;
    for (std::int64_t hop = 0; hop < (is_transfer ? 1 : count); ++hop) {
      const std::size_t pair = static_cast<std::size_t>(move.devices[hop]) * machine.device_count +
                               static_cast<std::size_t>(move.devices[(hop + 1) % count]);
      task.links.push_back(machine.device_count + machine.link[pair]);
      bandwidth = std::min(bandwidth, machine.bandwidth[pair]);
      latency = std::max(latency, machine.latency[pair]);
    }
    task.duration_s = is_transfer ? static_cast<double>(size_bytes) / bandwidth + latency
                                  : CollectiveSeconds(move.pattern, size_bytes, count, bandwidth, latency,
                                                      machine.sums_by_one_device);
    for (const auto& [source, device] : move.sources) {
      for (const Ref& giver : gives(source, device)) task.givers.push_back(giver);
    }
    for (const std::int32_t sink : move.sinks) {
      for (const Ref& taker : takes(sink)) task.takers.push_back(taker);
    }
    made->moves.push_back(std::move(task));
  }
}

void Partial::AddSeam(const BlockPart& part, const SeamData& seam, bool backward, Template* made) {
  const Placement& placement = *part.placement;
  const Alike& behind = placement.layout->alike[seam.alike];
  std::vector<std::vector<std::int32_t>> devices;
  for (std::int32_t i = 0; i < behind.count(); ++i) devices.push_back(DevicesOf(placement, behind[i]));
  std::vector<Source> sources;
  for (std::int32_t i = 0; i < behind.count(); ++i) {
    sources.push_back({seam.summands[i], &seam.boxes[behind[i][0]], devices[i]});
  }
  std::vector<std::int32_t> by_device(placement.devices.size());
  for (std::size_t shard = 0; shard < by_device.size(); ++shard) by_device[shard] = static_cast<std::int32_t>(shard);
  std::sort(by_device.begin(), by_device.end(),
            [&](std::int32_t a, std::int32_t b) { return placement.devices[a] < placement.devices[b]; });
  std::vector<Sink> sinks;
  for (const std::int32_t shard : by_device) sinks.push_back({&seam.boxes[shard], placement.devices[shard]});
  const auto pass = static_cast<std::int16_t>(backward ? kBackwardPass : kForwardPass);
  const auto task = [&](std::int32_t segment, std::int32_t shard) {
    return Ref{0, pass, static_cast<std::int16_t>(segment), static_cast<std::int16_t>(shard)};
  };
  const auto gives = [&](std::int32_t source, std::int32_t device) {
    std::vector<Ref> found;
    for (const std::int32_t shard : behind[source]) {
      if (placement.devices[shard] == device) found.push_back(task(seam.segment + (backward ? 1 : 0), shard));
    }
    return found;
  };
  const auto takes = [&](std::int32_t sink) {
    return std::vector<Ref>{task(seam.segment + (backward ? 0 : 1), by_device[sink])};
  };
  AddExchange(sources, sinks, seam.item_bytes, true, backward ? kBackwardPass : kForwardPass, gives, takes, made);
}

void Partial::MakeValue(std::int32_t value, const std::vector<BlockPart>& parts, bool is_decided, Template* made) {
  // The first part is the writer.
  const Placement& from = *parts[0].placement;
  const Written& written = WrittenOf(*from.layout, value);
  const BoxTable& table = tables_->values[value];
  const ValueData& data = problem_->values[value];
  std::vector<BoxBounds> boxes;
  std::vector<std::vector<std::int32_t>> devices;
  for (std::int32_t i = 0; i < written.shards.count(); ++i) {
    boxes.push_back(BoundsOf(table, written.box[i]));
    devices.push_back(DevicesOf(from, written.shards[i]));
  }
  std::vector<Source> sources;
  for (std::size_t i = 0; i < boxes.size(); ++i) sources.push_back({written.summand[i], &boxes[i], devices[i]});
  using Wanted = std::map<std::pair<std::int32_t, BoxBounds>, std::vector<Ref>>;  // by device and box
  struct Reading {
    std::int16_t part;
    std::int32_t segment;
    std::span<const std::int32_t> shards;
    const Placement* placement;
    BoxBounds box;
    std::vector<std::int32_t> devices;
  };
  const auto ref = [](std::int32_t part, Pass pass, std::int32_t segment, std::int32_t shard) {
    return Ref{static_cast<std::int16_t>(part), static_cast<std::int16_t>(pass), static_cast<std::int16_t>(segment),
               static_cast<std::int16_t>(shard)};
  };
  Wanted wanted;
  std::vector<Reading> readings;
  for (std::size_t p = 1; p < parts.size(); ++p) {
    const Placement& to = *parts[p].placement;
    for (const Port& port : to.layout->read) {
      if (port.subject != value) continue;
      for (std::int32_t shard = 0; shard < to.layout->parts; ++shard) {
        if (port.boxes[shard] == BoxTable::kNone) continue;
        wanted[{to.devices[shard], BoundsOf(table, port.boxes[shard])}].push_back(
            ref(static_cast<std::int32_t>(p), kForwardPass, port.segment, shard));
      }
      if (!port.gives_gradient) continue;
      const Alike& alike = to.layout->alike[port.alike];
      for (std::int32_t i = 0; i < alike.count(); ++i) {
        const std::int32_t box = port.boxes[alike[i][0]];
        if (box == BoxTable::kNone) continue;
        readings.push_back({static_cast<std::int16_t>(p), port.segment, alike[i], &to, BoundsOf(table, box),
                            DevicesOf(to, alike[i])});
      }
    }
  }
  const auto add = [&](const std::vector<Source>& given, Pass pass, const auto& gives) {
    std::vector<Sink> sinks;
    std::vector<const std::vector<Ref>*> takers;
    for (const auto& [key, tasks] : wanted) {
      sinks.push_back({&key.second, key.first});
      takers.push_back(&tasks);
    }
    const auto takes = [&](std::int32_t sink) -> const std::vector<Ref>& { return *takers[sink]; };
    AddExchange(given, sinks, data.item_bytes, is_decided, pass, gives, takes, made);
  };
  add(sources, kForwardPass, [&](std::int32_t source, std::int32_t device) {
    std::vector<Ref> found;
    for (const std::int32_t shard : written.shards[source]) {
      if (from.devices[shard] == device) found.push_back(ref(0, kForwardPass, written.port.segment, shard));
    }
    return found;
  });
  if (!data.is_differentiable) return;
  wanted.clear();
  for (std::int32_t shard = 0; shard < from.layout->parts; ++shard) {
    wanted[{from.devices[shard], BoundsOf(table, written.port.boxes[shard])}].push_back(
        ref(0, kBackwardPass, written.port.segment, shard));
  }
  std::vector<Source> gradients;
  for (std::size_t i = 0; i < readings.size(); ++i) {
    gradients.push_back({static_cast<std::int32_t>(i), &readings[i].box, readings[i].devices});
  }
  add(gradients, kBackwardPass, [&](std::int32_t source, std::int32_t device) {
    const Reading& reading = readings[source];
    std::vector<Ref> found;
    for (const std::int32_t shard : reading.shards) {
      if (reading.placement->devices[shard] == device) {
        found.push_back(ref(reading.part, kBackwardPass, reading.segment, shard));
      }
    }
    return found;
  });
}

void Partial::MakeWeight(std::int32_t weight, const std::vector<BlockPart>& parts, bool is_decided, Template* made) {
  struct Reading {
    std::int16_t part;
    std::int32_t segment;
    std::span<const std::int32_t> shards;
    const Placement* placement;
    BoxBounds box;
    std::vector<std::int32_t> devices;
  };
  const BoxTable& table = tables_->weights[weight];
  const MachineData& machine = problem_->machine;
  std::vector<Reading> readings;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const Placement& user = *parts[p].placement;
    for (const Port& port : user.layout->weights) {
      if (port.subject != weight || !port.gives_gradient) continue;
      const Alike& alike = user.layout->alike[port.alike];
      for (std::int32_t i = 0; i < alike.count(); ++i) {
        const std::int32_t box = port.boxes[alike[i][0]];
        if (box == BoxTable::kNone) continue;
        readings.push_back({static_cast<std::int16_t>(p), port.segment, alike[i], &user, BoundsOf(table, box),
                            DevicesOf(user, alike[i])});
      }
    }
  }
  if (readings.empty()) return;
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
    for (const std::int32_t device : holders[p]) {
      held_bytes[device] += Volume(pieces[p]) * problem_->weights[weight].item_bytes;
    }
  }
  std::vector<std::int16_t> update(machine.device_count, -1);
  for (std::int32_t device = 0; device < machine.device_count; ++device) {
    if (held_bytes[device] == 0) continue;
    const std::int32_t kind = machine.kind[device];
    const double traffic = static_cast<double>(held_bytes[device]) * machine.update_bytes_per_byte;
    update[device] = static_cast<std::int16_t>(made->updates.size());
    made->updates.push_back({device, std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind])});
  }
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    std::vector<Source> sources;
    for (std::size_t i = 0; i < givers[p].size(); ++i) {
      sources.push_back({static_cast<std::int32_t>(i), &pieces[p], givers[p][i]->devices});
    }
    std::vector<Sink> sinks;
    for (const std::int32_t device : holders[p]) sinks.push_back({&pieces[p], device});
    const auto gives = [&](std::int32_t source, std::int32_t device) {
      const Reading& reading = *givers[p][source];
      std::vector<Ref> found;
      for (const std::int32_t shard : reading.shards) {
        if (reading.placement->devices[shard] == device) {
          found.push_back({reading.part, static_cast<std::int16_t>(kBackwardPass),
                           static_cast<std::int16_t>(reading.segment), static_cast<std::int16_t>(shard)});
        }
      }
      return found;
    };
    const auto takes = [&](std::int32_t sink) {
      return std::vector<Ref>{{Ref::kUpdate, 0, 0, update[sinks[sink].device]}};
    };
    // Further users may cut the piece into smaller ones: then only the latency is certain.
    AddExchange(sources, sinks, is_decided ? problem_->weights[weight].item_bytes : 0, is_decided, kBackwardPass,
                gives, takes, made);
  }
}

const Partial::Template& Partial::ValueTemplate(std::int32_t value, std::span<const std::int32_t> chosen) {
  key_.assign({0, value, chosen[writer_[value]]});
  for (const std::int32_t reader : readers_[value]) key_.push_back(chosen[reader]);
  const auto [found, is_new] = templates_.try_emplace(key_);
  if (is_new) {
    std::vector<BlockPart> parts = {{writer_[value], placed_[writer_[value]]}};
    bool is_decided = true;
    for (const std::int32_t reader : readers_[value]) {
      is_decided = is_decided && placed_[reader] != nullptr;
      if (placed_[reader] != nullptr) parts.push_back({reader, placed_[reader]});
    }
    MakeValue(value, parts, is_decided, &found->second);
    found->second.number = NumberOf(found->second, parts, is_decided);
  }
  return found->second;
}

const Partial::Template& Partial::WeightTemplate(std::int32_t weight, std::span<const std::int32_t> chosen) {
  key_.assign({1, weight});
  for (const std::int32_t user : users_[weight]) key_.push_back(chosen[user]);
  const auto [found, is_new] = templates_.try_emplace(key_);
  if (is_new) {
    std::vector<BlockPart> parts;
    bool is_decided = true;
    for (const std::int32_t user : users_[weight]) {
      is_decided = is_decided && placed_[user] != nullptr;
      if (placed_[user] != nullptr) parts.push_back({user, placed_[user]});
    }
    MakeWeight(weight, parts, is_decided, &found->second);
    found->second.number = NumberOf(found->second, parts, is_decided);
  }
  return found->second;
}

// -- keys -------------------------------------------------------------------------------------------------

namespace {

template <typename T>
void Say(T what, std::string* said) {
  said->append(reinterpret_cast<const char*>(&what), sizeof(what));
}

}  // namespace

// Tasks are told by block, pass, segment and device. An exchange of which some box is held by several devices
// says which placements it is of: who sends may change with the numbers of the devices.
std::int32_t Partial::NumberOf(const Template& made, const std::vector<BlockPart>& parts, bool is_decided) {
  if (!is_decided) return -1;
  said_.clear();
  bool is_plain = true;
  const auto say = [&](const Ref& ref) {
    Say(ref.part, &said_);
    Say(ref.pass, &said_);
    Say(ref.segment, &said_);
    const bool is_update = ref.part == Ref::kUpdate;
    Say(is_update ? made.updates[ref.shard].device : parts[ref.part].placement->devices[ref.shard], &said_);
  };
  for (const BlockPart& part : parts) Say(part.block, &said_);
  for (const Template::Update& update : made.updates) {
    Say(update.device, &said_);
    Say(update.duration_s, &said_);
  }
  for (const Template::Move& move : made.moves) {
    for (const std::int32_t link : move.links) Say(link, &said_);
    Say(move.duration_s, &said_);
    for (const Ref& giver : move.givers) say(giver);
    Say('>', &said_);
    for (const Ref& taker : move.takers) say(taker);
  }
  std::string all;
  std::swap(all, said_);
  std::vector<std::string> lags;
  for (const Template::Lag& lag : made.lags) {
    is_plain = is_plain && lag.givers.size() == 1 && lag.lag_s == 0;
    said_.clear();
    say(lag.taker);
    for (const Ref& giver : lag.givers) say(giver);
    lags.push_back(said_);
  }
  std::sort(lags.begin(), lags.end());
  for (const std::string& lag : lags) all += lag;
  for (const BlockPart& part : parts) {
    if (is_plain) break;
    for (const std::int32_t degree : part.placement->layout->degrees) Say(degree, &all);
    for (const std::int32_t device : part.placement->devices) Say(device, &all);
  }
  return numbers_.try_emplace(std::move(all), static_cast<std::int32_t>(numbers_.size())).first->second;
}

std::int32_t Partial::NumberOf(const BlockPart& part, const Template& seams) {
  const std::int32_t seam = NumberOf(seams, {part}, true);
  const Placement& placement = *part.placement;
  std::vector<std::string> shards;
  for (std::int32_t shard = 0; shard < placement.layout->parts; ++shard) {
    std::string said;
    Say(placement.devices[shard], &said);
    for (const Pass pass : {kForwardPass, kBackwardPass}) {
      for (std::int32_t segment = 0; segment < placement.layout->segments; ++segment) {
        Say(ComputeSeconds(placement, pass, segment, shard), &said);
      }
    }
    shards.push_back(std::move(said));
  }
  std::sort(shards.begin(), shards.end());
  std::string all = "shards";
  Say(seam, &all);
  for (const std::string& shard : shards) all += shard;
  return numbers_.try_emplace(std::move(all), static_cast<std::int32_t>(numbers_.size())).first->second;
}

const std::string& Partial::Key(std::span<const std::int32_t> chosen) {
  Place(chosen);
  whole_key_.clear();
  is_open_.assign(chosen.size(), 0);
  const auto is_decided = [&](const std::vector<std::int32_t>& blocks) {
    const bool all = std::all_of(blocks.begin(), blocks.end(), [&](std::int32_t b) { return chosen[b] != kUnplaced; });
    if (!all) {
      for (const std::int32_t block : blocks) is_open_[block] = 1;
    }
    return all;
  };
  for (std::size_t v = 0; v < problem_->values.size(); ++v) {
    const bool is_read = is_decided(readers_[v]);
    if (!is_read || chosen[writer_[v]] == kUnplaced) {
      is_open_[writer_[v]] = 1;
      for (const std::int32_t reader : readers_[v]) is_open_[reader] = 1;
    } else {
      Say(ValueTemplate(static_cast<std::int32_t>(v), chosen).number, &whole_key_);
    }
  }
  for (std::size_t w = 0; w < problem_->weights.size(); ++w) {
    if (is_decided(users_[w])) Say(WeightTemplate(static_cast<std::int32_t>(w), chosen).number, &whole_key_);
  }
  for (std::size_t block = 0; block < chosen.size(); ++block) {
    if (chosen[block] == kUnplaced) {
      Say(kUnplaced, &whole_key_);
    } else {
      Say(is_open_[block] ? chosen[block] : ~kinds_[block][chosen[block]] - 1, &whole_key_);
    }
  }
  return whole_key_;
}

}  // namespace soapstone

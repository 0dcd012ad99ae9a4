// How the groups of weights are built.

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <utility>

#include "tasks.h"

namespace soapstone {
namespace {

constexpr std::size_t kMostCuts = 4096;  // remembered for each weight

}  // namespace

bool TaskGraph::IsPlain(std::int32_t weight) const {
  for (const std::int32_t user : users_[weight]) {
    const Placement& placement = placements_[user];
    if (placement.copies > 1) return false;
    for (const Port& port : placement.layout->weights) {
      if (port.subject != weight || !port.gives_gradient) continue;
      const Alike& alike = placement.layout->alike[port.alike];
      if (alike.items.size() != static_cast<std::size_t>(alike.count())) return false;
    }
  }
  return true;
}

void TaskGraph::BuildShelf(std::int32_t shelf, Group* built) {
  bucket_count_ = 0;
  box_gates_.clear();
  const std::vector<std::int32_t>& weights = on_shelf_[shelf];
  built->has_gates =
      std::all_of(weights.begin(), weights.end(), [this](std::int32_t weight) { return IsPlain(weight); });
  for (const std::int32_t weight : weights) {
    Group::OfWeight* own = &built->weights[place_on_shelf_[weight]];
    built->has_gates ? AddPlainGradients(weight, own) : AddGradients(weight, *built, own);
  }
  AddBuckets();
}

// Turns what the draft of a shelf says of updates and gates into slots.
void TaskGraph::FinishShelf(Group* built) {
  for (Group::OfWeight& own : built->weights) {
    for (std::int32_t& slot : own.update_of_device) slot = slot < 0 ? -1 : built->first + slot;
  }
  for (const Gate& each : box_gates_) {
    const std::int32_t slot = built->first + built->tasks + each.gate;
    built->weights[each.weight].gate_of_box[each.box] = slot;
    slots_[slot].waits = each.givers;
  }
  if (!built->has_gates) return;
  // What an attachment would say is said by the gates.
  for (Attachment& attachment : built->attached) {
    attachment.successors.Clear();
    attachment.waits.clear();
  }
}

TaskGraph::Bucket* TaskGraph::BucketOf(std::span<const std::int32_t> ring, std::int64_t size_bytes,
                                       TaskOrder* order) {
  std::size_t at = problem_->has_buckets ? 0 : bucket_count_;
  while (at < bucket_count_ && !std::ranges::equal(ring, buckets_[at].ring)) ++at;
  if (at == bucket_count_) {
    if (bucket_count_ == buckets_.size()) buckets_.emplace_back();
    Bucket& added = buckets_[bucket_count_++];
    added.ring.assign(ring.begin(), ring.end());
    added.order = 0;
    added.size_bytes = 0;
    added.before.clear();
    added.after.clear();
  }
  Bucket* bucket = &buckets_[at];
  bucket->order = std::max(bucket->order, *order);
  bucket->size_bytes += size_bytes;
  *order += static_cast<TaskOrder>(ring.size());
  return bucket;
}

void TaskGraph::AddBuckets() {
  for (std::size_t i = 0; i < bucket_count_; ++i) {
    Bucket& bucket = buckets_[i];
    const auto [enter, leave] = draft_.AddMove(Pattern::kAllReduce, bucket.ring, bucket.size_bytes, &bucket.order);
    for (const Ref before : bucket.before) draft_.Wait(enter, before);
    for (const Ref after : bucket.after) draft_.Wait(after, leave);
  }
}

// The pieces of boxes cut at each other's borders, so that any two are equal or apart.
const TaskGraph::Cut& TaskGraph::CutOf(std::int32_t weight, const std::vector<std::int32_t>& boxes) {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (const std::int32_t box : boxes) {
    hash = (hash ^ static_cast<std::uint64_t>(box)) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  auto& known = cuts_[weight];
  const auto found = known.find(hash);
  if (found != known.end() && found->second.first == boxes) return found->second.second;
  if (known.size() >= kMostCuts) known.clear();

  const BoxTable& table = tables_->weights[weight];
  const auto rank = static_cast<std::size_t>(problem_->weights[weight].rank);
  std::vector<std::vector<std::int64_t>> edges(rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    for (const std::int32_t box : boxes) {
      edges[axis].push_back(table.Bounds(box)[2 * axis]);
      edges[axis].push_back(table.Bounds(box)[2 * axis + 1]);
    }
    std::sort(edges[axis].begin(), edges[axis].end());
    edges[axis].erase(std::unique(edges[axis].begin(), edges[axis].end()), edges[axis].end());
  }
  std::int64_t atoms = 1;
  for (const std::vector<std::int64_t>& each : edges) atoms *= static_cast<std::int64_t>(each.size()) - 1;
  // Every atom of the grid of edges, by the boxes that cover it.
  std::vector<std::vector<std::int32_t>> covered(boxes.size());
  std::vector<std::int32_t> covers(atoms, 0);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const auto bounds = table.Bounds(boxes[i]);
    std::vector<std::int32_t> inside = {0};
    for (std::size_t axis = 0; axis < rank; ++axis) {
      const auto at = [&](std::int64_t edge) {
        return static_cast<std::int32_t>(std::lower_bound(edges[axis].begin(), edges[axis].end(), edge) -
                                         edges[axis].begin());
      };
      std::vector<std::int32_t> longer;
      for (const std::int32_t prefix : inside) {
        for (std::int32_t cell = at(bounds[2 * axis]); cell < at(bounds[2 * axis + 1]); ++cell) {
          longer.push_back(prefix * (static_cast<std::int32_t>(edges[axis].size()) - 1) + cell);
        }
      }
      inside = std::move(longer);
    }
    for (const std::int32_t atom : inside) ++covers[atom];
    covered[i] = std::move(inside);
  }
  const bool is_apart = std::all_of(covers.begin(), covers.end(), [](std::int32_t count) { return count < 2; });
  Cut cut;
  if (is_apart) {
    std::vector<std::int32_t> sorted = boxes;
    std::sort(sorted.begin(), sorted.end(), [&table](std::int32_t a, std::int32_t b) { return table.Less(a, b); });
    for (const std::int32_t box : sorted) {
      cut.pieces.emplace_back(table.Bounds(box).begin(), table.Bounds(box).end());
      cut.volumes.push_back(table.Volume(box));
    }
    for (const std::int32_t box : boxes) {
      const auto piece = static_cast<std::int32_t>(std::find(sorted.begin(), sorted.end(), box) - sorted.begin());
      cut.of_box.Append({&piece, 1});
    }
  } else {
    std::vector<std::int32_t> piece_of(atoms, -1);
    for (std::int64_t atom = 0; atom < atoms; ++atom) {
      if (covers[atom] == 0) continue;
      piece_of[atom] = static_cast<std::int32_t>(cut.pieces.size());
      BoxBounds bounds(2 * rank);
      std::int64_t rest = atom;
      for (std::size_t axis = rank; axis-- > 0;) {
        const auto cells = static_cast<std::int64_t>(edges[axis].size()) - 1;
        bounds[2 * axis] = edges[axis][rest % cells];
        bounds[2 * axis + 1] = edges[axis][rest % cells + 1];
        rest /= cells;
      }
      cut.volumes.push_back(Volume(bounds));
      cut.pieces.push_back(std::move(bounds));
    }
    for (std::vector<std::int32_t>& row : covered) {
      for (std::int32_t& atom : row) atom = piece_of[atom];
      cut.of_box.Append(row);
    }
  }
  auto& kept = known[hash];
  kept = {boxes, std::move(cut)};
  return kept.second;
}

void TaskGraph::AddUpdates(std::int32_t weight, const std::vector<std::int64_t>& held_bytes, bool is_batch,
                           Group::OfWeight* built) {
  const MachineData& machine = problem_->machine;
  built->update_of_device.assign(machine.device_count, -1);
  for (std::int32_t device = 0; device < machine.device_count; ++device) {
    if (held_bytes[device] == 0) continue;
    const std::int32_t kind = machine.kind[device];
    const double traffic = static_cast<double>(held_bytes[device]) * machine.update_bytes_per_byte;
    const double seconds = std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind]);
    if (is_batch) {
      draft_.AddMember(device, seconds);
      built->update_of_device[device] = draft_.tasks();  // the batch, which comes next
      continue;
    }
    const TaskOrder order = Order(kUpdatePass, weight, kComputeClass, 0, device);
    built->update_of_device[device] = draft_.Add(TaskKind::kUpdate, device, seconds, 0, order).task;
  }
  if (is_batch) draft_.AddBatch(TaskKind::kUpdate, 0, Order(kUpdatePass, weight, kComputeClass, 0, 0));
}

void TaskGraph::AddPlainGradients(std::int32_t weight, Group::OfWeight* built) {
  const std::int32_t devices = problem_->machine.device_count;
  const auto words = static_cast<std::size_t>(devices + 63) / 64;
  const auto for_each_reading = [&](const auto& visit) {
    for (const std::int32_t user : users_[weight]) {
      const Placement& placement = placements_[user];
      for (const Port& port : placement.layout->weights) {
        if (port.subject != weight || !port.gives_gradient) continue;
        for (std::int32_t shard = 0; shard < placement.layout->parts; ++shard) {
          if (port.boxes[shard] != BoxTable::kNone) visit(port.boxes[shard], placement.devices[shard]);
        }
      }
    }
  };
  std::vector<std::int32_t>& gate_of_box = built->gate_of_box;
  gate_of_box.resize(std::max(gate_of_box.size(), tables_->weights[weight].size()));
  box_place_.resize(std::max(box_place_.size(), gate_of_box.size()), -1);
  // The boxes read, and how many shards read each.
  distinct_.clear();
  for_each_reading([&](std::int32_t box, std::int32_t) {
    if (box_place_[box] < 0) distinct_.push_back(box);
    box_place_[box] = 0;
  });
  std::sort(distinct_.begin(), distinct_.end());
  for (std::size_t i = 0; i < distinct_.size(); ++i) box_place_[distinct_[i]] = static_cast<std::int32_t>(i);
  counts_.assign(distinct_.size(), 0);
  box_holding_.assign(distinct_.size() * words, 0);
  for_each_reading([&](std::int32_t box, std::int32_t device) {
    ++counts_[box_place_[box]];
    box_holding_[box_place_[box] * words + device / 64] |= std::uint64_t{1} << (device % 64);
  });
  for (const std::int32_t box : distinct_) box_place_[box] = -1;

  const Cut& cut = CutOf(weight, distinct_);
  const std::size_t pieces = cut.volumes.size();
  holding_.assign(pieces * words, 0);
  for (std::size_t i = 0; i < distinct_.size(); ++i) {
    for (const std::int32_t piece : cut.of_box[static_cast<std::int32_t>(i)]) {
      for (std::size_t word = 0; word < words; ++word) {
        holding_[piece * words + word] |= box_holding_[i * words + word];
      }
    }
  }
  const std::int64_t item_bytes = problem_->weights[weight].item_bytes;
  const auto for_each_holder = [&](std::size_t piece, const auto& visit) {
    for (std::size_t word = 0; word < words; ++word) {
      for (std::uint64_t left = holding_[piece * words + word]; left != 0; left &= left - 1) {
        visit(static_cast<std::int32_t>(64 * word) + std::countr_zero(left));
      }
    }
  };
  held_bytes_.assign(devices, 0);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    for_each_holder(piece, [&](std::int32_t device) { held_bytes_[device] += cut.volumes[piece] * item_bytes; });
  }
  // All devices that hold the one piece update it as soon as the all-reduce is over.
  const bool is_batch =
      draft_.has_batches() && pieces == 1 &&
      std::count_if(held_bytes_.begin(), held_bytes_.end(), [](std::int64_t bytes) { return bytes > 0; }) > 1;
  AddUpdates(weight, held_bytes_, is_batch, built);
  // The gradient of a piece goes to its bucket, or to its one holder's update.
  TaskOrder order = Order(kBackwardPass, block_count() - 1 - first_user_[weight], kWeightClass, weight_rank_[weight], 0);
  bucket_of_piece_.clear();
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    ring_.clear();
    for_each_holder(piece, [&](std::int32_t device) { ring_.push_back(device); });
    if (ring_.size() == 1) {
      bucket_of_piece_.push_back(~built->update_of_device[ring_[0]]);
      continue;
    }
    Bucket* bucket = BucketOf(ring_, cut.volumes[piece] * item_bytes, &order);
    for (const std::int32_t device : ring_) {
      bucket->after.push_back({Ref::kOwn, built->update_of_device[device]});
      if (is_batch) break;
    }
    bucket_of_piece_.push_back(static_cast<std::int32_t>(bucket - buckets_.data()));
  }
  for (std::size_t i = 0; i < distinct_.size(); ++i) {
    const Ref gate = draft_.AddGate();
    box_gates_.push_back({place_on_shelf_[weight], distinct_[i], gate.task, counts_[i]});
    for (const std::int32_t piece : cut.of_box[static_cast<std::int32_t>(i)]) {
      const std::int32_t bucket = bucket_of_piece_[piece];
      if (bucket < 0) {
        draft_.Wait({Ref::kOwn, ~bucket}, gate);
      } else {
        buckets_[bucket].before.push_back(gate);
      }
    }
  }
}

void TaskGraph::AddGradients(std::int32_t weight, const Group& group, Group::OfWeight* built) {
  const MachineData& machine = problem_->machine;
  readings_.clear();
  holders_.Clear();
  std::int32_t attachment = 0;
  for (const std::int32_t user : users_[weight]) {
    while (group.attached[attachment].block != user) ++attachment;
    CollectReadings(attachment, user, weight, placements_[user].layout->weights);
  }
  std::vector<std::int32_t> boxes;
  for (const Reading& reading : readings_) boxes.push_back(reading.box);
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  const Cut& cut = CutOf(weight, boxes);
  const std::size_t pieces = cut.volumes.size();
  std::vector<std::vector<std::int32_t>> givers(pieces);
  for (std::size_t i = 0; i < readings_.size(); ++i) {
    const auto at = std::lower_bound(boxes.begin(), boxes.end(), readings_[i].box) - boxes.begin();
    for (const std::int32_t piece : cut.of_box[static_cast<std::int32_t>(at)]) {
      givers[piece].push_back(static_cast<std::int32_t>(i));
    }
  }
  const std::int64_t item_bytes = problem_->weights[weight].item_bytes;
  std::vector<std::set<std::int32_t>> holders(pieces);
  held_bytes_.assign(machine.device_count, 0);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    for (const std::int32_t giver : givers[piece]) holders[piece].insert(holders_[giver].begin(), holders_[giver].end());
    for (const std::int32_t device : holders[piece]) held_bytes_[device] += cut.volumes[piece] * item_bytes;
  }
  AddUpdates(weight, held_bytes_, false, built);
  TaskOrder order = Order(kBackwardPass, block_count() - 1 - first_user_[weight], kWeightClass, weight_rank_[weight], 0);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    std::vector<Source> sources;
    for (std::size_t i = 0; i < givers[piece].size(); ++i) {
      sources.push_back({static_cast<std::int32_t>(i), &cut.pieces[piece], holders_[givers[piece][i]]});
    }
    std::vector<Sink> sinks;
    for (const std::int32_t device : holders[piece]) sinks.push_back({&cut.pieces[piece], device});
    const auto gives = [&](std::int32_t source, std::int32_t device) {
      const Reading& reading = readings_[givers[piece][source]];
      std::vector<Ref> found;
      ForEachOn(placements_[reading.block], reading.shards, device, [&](std::int32_t pc) {
        found.push_back({reading.attachment, Place(reading.block, reading.segment, pc)});
      });
      return found;
    };
    const auto takes = [&](std::int32_t sink) {
      return std::array<Ref, 1>{Ref{Ref::kOwn, built->update_of_device[sinks[sink].device]}};
    };
    const Exchange exchange = MakeExchange(machine, sources, sinks);
    if (!problem_->has_buckets || !IsOneSum(exchange, sources.size())) {
      draft_.AddExchange(exchange, sinks, item_bytes, gives, takes, &order);
      continue;
    }
    const Move& move = exchange.moves[0];
    Bucket* bucket = BucketOf(move.devices, move.elements * item_bytes, &order);
    for (const auto& [source, device] : move.sources) {
      for (const Ref before : gives(source, device)) bucket->before.push_back(before);
    }
    for (const std::int32_t sink : move.sinks) {
      for (const Ref after : takes(sink)) bucket->after.push_back(after);
    }
    draft_.AddLocal(exchange, sinks, gives, takes);
  }
}

}  // namespace soapstone

#include "partial.h"

#include <algorithm>
#include <limits>

namespace soapstone {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The first and the last segment on the way from every operand to every value: (1, 0) if there is no such.
std::pair<std::int32_t, std::int32_t> InnerSegments(const Layout& layout) {
  std::int32_t first = 0;
  std::int32_t last = layout.segments - 1;
  for (const Port& port : layout.read) first = std::max(first, port.segment);
  for (const Written& written : layout.written) last = std::min(last, written.port.segment);
  return {first, last};
}

}  // namespace

Partial::Partial(const Problem* problem, Space* space, const Symmetry* symmetry, DeviceLists lists)
    : problem_(problem), tables_(space->tables()), symmetry_(symmetry), placed_(problem->blocks.size(), nullptr) {
  const MachineData& machine = problem->machine;
  for (std::int32_t to = 0; to < machine.device_count; ++to) {
    double widest = 0;
    double nearest = machine.device_count > 1 ? kNever : 0;
    for (std::int32_t from = 0; from < machine.device_count; ++from) {
      if (from == to) continue;
      widest = std::max(widest, machine.bandwidth[from * machine.device_count + to]);
      nearest = std::min(nearest, machine.latency[from * machine.device_count + to]);
    }
    widest_.push_back(widest);
    nearest_.push_back(nearest);
  }
  ListEdges();
  ListNear();
  ListDomains(space, lists);
  SetQuickest();
  SetRoundTrips();
}

std::size_t Partial::KeyHash::operator()(const std::vector<std::int32_t>& key) const {
  std::size_t hash = 0x9e3779b97f4a7c15;
  for (const std::int32_t each : key) hash = (hash ^ static_cast<std::size_t>(each)) * 0xff51afd7ed558ccd;
  return hash ^ (hash >> 29);
}

// -- what there is ----------------------------------------------------------------------------------------

void Partial::ListEdges() {
  const auto blocks = static_cast<std::int32_t>(problem_->blocks.size());
  writer_.assign(problem_->values.size(), -1);
  readers_.resize(problem_->values.size());
  users_.resize(problem_->weights.size());
  into_.resize(blocks);
  out_of_.resize(blocks);
  least_update_s_.assign(problem_->weights.size(), 0);
  const MachineData& machine = problem_->machine;
  std::map<std::pair<std::int32_t, std::int32_t>, Edge> edges;  // by value and reader
  for (std::int32_t block = 0; block < blocks; ++block) {
    for (const NodeData& node : problem_->blocks[block].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value >= 0) writer_[output.value] = block;
      }
      for (const Access& operand : node.operands) {
        if (operand.weight >= 0) {
          std::vector<std::int32_t>& users = users_[operand.weight];
          if (users.empty() || users.back() != block) users.push_back(block);
          if (!node.writes_gradient) continue;
          std::int64_t elements = ReadsAll(node, operand) ? 1 : 0;
          for (const std::int64_t size : operand.shape) elements *= size;
          const double bytes = static_cast<double>(elements * operand.item_bytes) * machine.update_bytes_per_byte;
          double least_s = kNever;
          for (std::size_t kind = 0; kind < machine.launch_s.size(); ++kind) {
            least_s = std::min(least_s, std::max(machine.launch_s[kind], bytes / machine.memory_bytes_per_s[kind]));
          }
          least_update_s_[operand.weight] = std::max(least_update_s_[operand.weight], least_s);
        } else if (operand.value >= 0) {
          Edge& edge = edges[{operand.value, block}];
          edge.value = operand.value;
          edge.reader = block;
          const bool covers = ReadsAll(node, operand);
          edge.covers = edge.covers || covers;
          edge.returns = edge.returns || (covers && node.writes_gradient &&
                                          problem_->values[operand.value].is_differentiable);
        }
      }
    }
  }
  for (auto& [key, edge] : edges) {
    edge.writer = writer_[edge.value];
    const auto number = static_cast<std::int32_t>(edges_.size());
    into_[edge.reader].push_back(number);
    out_of_[edge.writer].push_back(number);
    readers_[edge.value].push_back(edge.reader);
    edges_.push_back(edge);
  }
}

void Partial::ListNear() {
  const std::size_t blocks = problem_->blocks.size();
  is_near_.assign(blocks * blocks, 0);
  const auto set = [&](std::int32_t a, std::int32_t b) { is_near_[a * blocks + b] = is_near_[b * blocks + a] = 1; };
  for (const Edge& edge : edges_) set(edge.writer, edge.reader);
  for (const std::vector<std::int32_t>& users : users_) {
    for (const std::int32_t a : users) {
      for (const std::int32_t b : users) set(a, b);
    }
  }
}

void Partial::ListDomains(Space* space, DeviceLists lists) {
  const std::int32_t devices = problem_->machine.device_count;
  domains_.resize(problem_->blocks.size());
  seams_.resize(problem_->blocks.size());
  left_.resize(problem_->blocks.size());
  kinds_.resize(problem_->blocks.size());
  for (std::size_t b = 0; b < problem_->blocks.size(); ++b) {
    const auto block = static_cast<std::int32_t>(b);
    space->Count(block);  // which leaves only layouts that are legal
    const std::vector<std::vector<std::int32_t>> degrees = space->degrees(block);
    std::vector<std::uint8_t> is_taken(devices, 0);
    for (const std::vector<std::int32_t>& each : degrees) {
      Placement placement{space->Find(block, each), 1, {}};
      const auto extend = [&](const auto& self) -> void {
        if (static_cast<std::int32_t>(placement.devices.size()) == placement.layout->parts) {
          domains_[block].push_back(placement);
          return;
        }
        for (std::int32_t device = 0; device < devices; ++device) {
          const bool follows = placement.devices.empty() || device == placement.devices.back() + 1;
          if (is_taken[device] || (lists == DeviceLists::kRanges && !follows)) continue;
          is_taken[device] = 1;
          placement.devices.push_back(device);
          self(self);
          placement.devices.pop_back();
          is_taken[device] = 0;
        }
      };
      extend(extend);
      for (const std::int32_t number : into_[block]) {
        Edge& edge = edges_[number];
        bool is_read = false;
        for (const Port& port : placement.layout->read) {
          if (port.subject != edge.value) continue;
          is_read = is_read || std::find(port.boxes.begin(), port.boxes.end(), BoxTable::kNone) == port.boxes.end();
        }
        edge.is_always_read = edge.is_always_read && is_read;
      }
    }
    for (const Placement& placement : domains_[block]) {
      Template made;
      const BlockPart part{block, &placement};
      for (const SeamData& seam : placement.layout->seams) {
        AddSeam(part, seam, false, &made);
        if (seam.is_mutual && problem_->blocks[block].needs_backward) AddSeam(part, seam, true, &made);
      }
      kinds_[block].push_back(NumberOf(part, made));
      seams_[block].push_back(std::move(made));
      left_[block].push_back(static_cast<std::int32_t>(left_[block].size()));
    }
  }
}

bool Partial::Restrict(std::vector<std::vector<std::int32_t>> left) {
  const auto count = [](const std::vector<std::vector<std::int32_t>>& lists) {
    std::size_t sum = 0;
    for (const std::vector<std::int32_t>& list : lists) sum += list.size();
    return sum;
  };
  if (count(left) == count(left_)) return false;
  left_ = std::move(left);
  SetQuickest();
  SetRoundTrips();
  return true;
}

double Partial::ComputeSeconds(const Placement& placement, Pass pass, std::int32_t segment, std::int32_t shard) const {
  const Layout& layout = *placement.layout;
  const std::int32_t kind = problem_->machine.kind[placement.devices[shard]];
  const std::size_t at = static_cast<std::size_t>(kind * layout.segments + segment) * layout.parts + shard;
  return (pass == kForwardPass ? layout.forward_s : layout.backward_s)[at];
}

void Partial::SetQuickest() {
  const std::size_t blocks = problem_->blocks.size();
  least_work_s_.assign(blocks, kNever);
  for (std::vector<double>& quickest : quickest_s_) quickest.assign(blocks, kNever);
  for (std::size_t block = 0; block < blocks; ++block) {
    for (const std::int32_t choice : left_[block]) {
      const Placement& placement = domains_[block][choice];
      const Layout& layout = *placement.layout;
      const auto [first, last] = InnerSegments(layout);
      double work_s = 0;
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        for (const Pass pass : {kForwardPass, kBackwardPass}) {
          if (pass == kBackwardPass && !problem_->blocks[block].needs_backward) continue;
          double passed_s = 0;
          for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
            const double seconds = ComputeSeconds(placement, pass, segment, shard);
            work_s += seconds;
            if (segment >= first && segment <= last) passed_s += seconds;
          }
          quickest_s_[pass][block] = std::min(quickest_s_[pass][block], passed_s);
        }
      }
      least_work_s_[block] = std::min(least_work_s_[block], work_s);
    }
  }
}

// -- the relaxation ---------------------------------------------------------------------------------------

void Partial::Relax(std::span<const std::int32_t> chosen) {
  const MachineData& machine = problem_->machine;
  const auto blocks = static_cast<std::int32_t>(problem_->blocks.size());
  relaxation_.Clear(machine.device_count + machine.link_count);
  first_.assign(blocks, -1);
  for (std::vector<std::uint8_t>& known : is_known_) known.assign(blocks, 1);
  work_s_ = 0;
  Place(chosen);
  for (std::int32_t block = 0; block < blocks; ++block) {
    if (placed_[block] == nullptr) continue;
    AddBlock(block, *placed_[block]);
    const std::int32_t own[1] = {block};
    const Template& seams = seams_[block][chosen[block]];
    Apply(seams, own);
    for (const Pass pass : {kForwardPass, kBackwardPass}) is_known_[pass][block] = seams.is_exact[pass];
  }
  std::vector<std::int32_t> parts;
  for (std::size_t v = 0; v < problem_->values.size(); ++v) {
    const auto value = static_cast<std::int32_t>(v);
    const std::int32_t writer = writer_[value];
    parts.assign(1, writer);
    for (const std::int32_t reader : readers_[value]) {
      if (placed_[reader] != nullptr) parts.push_back(reader);
    }
    bool is_exact[2] = {false, readers_[value].empty()};
    if (placed_[writer] != nullptr && parts.size() > 1) {
      const Template& made = ValueTemplate(value, chosen);
      Apply(made, parts);
      const bool is_decided = parts.size() == readers_[value].size() + 1;
      for (const Pass pass : {kForwardPass, kBackwardPass}) is_exact[pass] = is_decided && made.is_exact[pass];
    }
    is_known_[kBackwardPass][writer] &= is_exact[kBackwardPass];
    for (const std::int32_t reader : readers_[value]) is_known_[kForwardPass][reader] &= is_exact[kForwardPass];
  }
  for (std::size_t w = 0; w < problem_->weights.size(); ++w) {
    const auto weight = static_cast<std::int32_t>(w);
    parts.clear();
    for (const std::int32_t user : users_[weight]) {
      if (placed_[user] != nullptr) parts.push_back(user);
    }
    if (parts.empty()) {
      work_s_ += least_update_s_[weight];
    } else {
      Apply(WeightTemplate(weight, chosen), parts);
    }
  }
  SetComplete();
  AddUnplaced(chosen);
}

double Partial::Bound(std::span<const std::int32_t> chosen, double limit_s) {
  Relax(chosen);
  const double spread_s = work_s_ / problem_->machine.device_count;
  if (spread_s >= limit_s) return spread_s;
  return std::max(spread_s, relaxation_.Bound(limit_s));
}

void Partial::Place(std::span<const std::int32_t> chosen) {
  for (std::size_t block = 0; block < chosen.size(); ++block) {
    placed_[block] = chosen[block] == kUnplaced ? nullptr : &domains_[block][chosen[block]];
  }
}

// Its tasks: by pass, by segment, by shard.
void Partial::AddBlock(std::int32_t block, const Placement& placement) {
  const Layout& layout = *placement.layout;
  const std::int32_t tasks = layout.segments * layout.parts;
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    if (pass == kBackwardPass && !problem_->blocks[block].needs_backward) break;
    for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        const double seconds = ComputeSeconds(placement, pass, segment, shard);
        work_s_ += seconds;
        const std::int32_t task = relaxation_.Add(placement.devices[shard], seconds);
        if (first_[block] < 0) first_[block] = task;
        if (pass == kForwardPass && segment > 0) relaxation_.Wait(task, task - layout.parts);
        if (pass == kBackwardPass) {
          const bool is_last = segment == layout.segments - 1;
          relaxation_.Wait(task, is_last ? task - tasks : task + layout.parts);
        }
      }
    }
  }
}

// Says of which tasks all that they wait for is known.
void Partial::SetComplete() {
  for (std::size_t block = 0; block < placed_.size(); ++block) {
    if (placed_[block] == nullptr) continue;
    const std::int32_t tasks = placed_[block]->layout->segments * placed_[block]->layout->parts;
    for (const Pass pass : {kForwardPass, kBackwardPass}) {
      if (!is_known_[pass][block] || (pass == kBackwardPass && !problem_->blocks[block].needs_backward)) continue;
      for (std::int32_t i = 0; i < tasks; ++i) relaxation_.SetComplete(first_[block] + pass * tasks + i);
    }
  }
}

void Partial::Apply(const Template& made, std::span<const std::int32_t> blocks) {
  update_.clear();
  for (const Template::Update& update : made.updates) {
    update_.push_back(relaxation_.Add(update.device, update.duration_s));
    if (made.is_exact[kBackwardPass]) relaxation_.SetComplete(update_.back());
    work_s_ += update.duration_s;
  }
  const auto task = [&](const Ref& ref) {
    if (ref.part == Ref::kUpdate) return update_[ref.shard];
    const Layout& layout = *placed_[blocks[ref.part]]->layout;
    return first_[blocks[ref.part]] + (ref.pass * layout.segments + ref.segment) * layout.parts + ref.shard;
  };
  for (const Template::Lag& lag : made.lags) {
    if (lag.givers.size() == 1) {
      relaxation_.Wait(task(lag.taker), task(lag.givers[0]), lag.lag_s);
      continue;
    }
    const std::int32_t first = relaxation_.AddPoint(0, true, false);
    for (const Ref& giver : lag.givers) relaxation_.Wait(first, task(giver), 0, Relaxation::Says::kHead);
    relaxation_.Wait(task(lag.taker), first, lag.lag_s);
  }
  for (const Template::Move& move : made.moves) {
    const bool is_ring = move.links.size() > 1;
    const std::int32_t first = relaxation_.Add(move.links[0], move.duration_s);
    relaxation_.SetComplete(first);
    const std::int32_t enter = is_ring ? relaxation_.AddPoint(0, false, false) : first;
    const std::int32_t leave = is_ring ? relaxation_.AddPoint(0, false, false) : first;
    for (std::size_t hop = 0; is_ring && hop < move.links.size(); ++hop) {
      const std::int32_t task = hop == 0 ? first : relaxation_.Add(move.links[hop], move.duration_s);
      relaxation_.SetComplete(task);
      relaxation_.Wait(task, enter);
      relaxation_.Wait(leave, task);
    }
    for (const Ref& giver : move.givers) relaxation_.Wait(enter, task(giver));
    for (const Ref& taker : move.takers) relaxation_.Wait(task(taker), leave);
  }
}

void Partial::AddUnplaced(std::span<const std::int32_t> chosen) {
  const auto blocks = static_cast<std::int32_t>(problem_->blocks.size());
  for (std::int32_t block = 0; block < blocks; ++block) {
    if (placed_[block] != nullptr) continue;
    work_s_ += least_work_s_[block];
    first_[block] = relaxation_.AddPoint(quickest_s_[kForwardPass][block], false, false);
    if (!problem_->blocks[block].needs_backward) continue;
    const std::int32_t back = relaxation_.AddPoint(quickest_s_[kBackwardPass][block], false, false);
    relaxation_.Wait(back, first_[block]);
  }
  for (std::size_t number = 0; number < edges_.size(); ++number) {
    const Edge& edge = edges_[number];
    if (placed_[edge.writer] == nullptr || placed_[edge.reader] == nullptr) AddEdge(edge, number, chosen);
  }
}

// What an edge says if one of its blocks is not placed. Forward, every shard of the reader waits for some
// shard of the writer if each reads anything; and every shard of the writer is followed by some shard of the
// reader if all is read. Backward it is the other way round.
void Partial::AddEdge(const Edge& edge, std::size_t number, std::span<const std::int32_t> chosen) {
  using Says = Relaxation::Says;
  const Placement* from = placed_[edge.writer];
  const Placement* to = placed_[edge.reader];
  const bool goes_back = edge.returns && problem_->blocks[edge.writer].needs_backward;
  const std::int32_t writer = first_[edge.writer];
  const std::int32_t reader = first_[edge.reader];
  if (from == nullptr && to == nullptr) {
    if (edge.is_always_read) relaxation_.Wait(reader, writer, 0, Says::kHead);
    if (edge.covers) relaxation_.Wait(reader, writer, 0, Says::kTail);
    if (!goes_back) return;
    relaxation_.Wait(writer + 1, reader + 1, 0, edge.is_always_read ? Says::kBoth : Says::kHead);
  } else if (to == nullptr) {
    const Layout& layout = *from->layout;
    const std::int32_t segment = WrittenOf(layout, edge.value).port.segment;
    const std::int32_t written = writer + segment * layout.parts;
    const std::int32_t wanted = writer + (layout.segments + segment) * layout.parts;
    const std::int32_t first = relaxation_.AddPoint(0, true, false);
    relaxation_.Wait(reader, first);
    for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
      if (edge.is_always_read) relaxation_.Wait(first, written + shard, 0, Says::kHead);
      if (edge.covers) relaxation_.Wait(first, written + shard, 0, Says::kTail);
    }
    if (!goes_back) return;
    const std::int32_t some = relaxation_.AddPoint(0, false, true);
    relaxation_.Wait(some, reader + 1, 0, edge.is_always_read ? Says::kBoth : Says::kHead);
    const std::int32_t trip = relaxation_.AddPoint(round_trip_s_[number][chosen[edge.writer]], true, false);
    for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
      relaxation_.Wait(wanted + shard, some);
      if (edge.is_always_read) relaxation_.Wait(trip, written + shard, 0, Says::kHead);
      relaxation_.Wait(wanted + shard, trip, 0, Says::kHead);
    }
  } else {
    const Layout& layout = *to->layout;
    const std::int32_t some = relaxation_.AddPoint(0, false, true);
    const std::int32_t first = relaxation_.AddPoint(0, true, false);
    relaxation_.Wait(some, writer, 0, edge.covers ? Says::kBoth : Says::kHead);
    if (goes_back) relaxation_.Wait(writer + 1, first);
    for (const Port& port : layout.read) {
      if (port.subject != edge.value) continue;
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        if (port.boxes[shard] == BoxTable::kNone) continue;
        relaxation_.Wait(reader + port.segment * layout.parts + shard, some);
        if (!goes_back || !port.gives_gradient) continue;
        relaxation_.Wait(first, reader + (layout.segments + port.segment) * layout.parts + shard);
      }
    }
  }
}

}  // namespace soapstone

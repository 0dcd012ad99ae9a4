#include "tail_bound.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace soapstone {
namespace {

constexpr std::size_t kMostLate = 32;  // as many as Weights has bits
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Whether each shard that reads by a port gives a gradient, after all its other tasks.
bool IsGivenLast(const Placement& placement, const Port& port) {
  const Alike& alike = placement.layout->alike[port.alike];
  return port.gives_gradient && port.segment == 0 && placement.copies == 1 &&
         alike.items.size() == static_cast<std::size_t>(alike.count());
}

}  // namespace

TailBound::TailBound(const Problem* problem, const TaskGraph* graph, const PathBound* path)
    : problem_(problem),
      graph_(graph),
      path_(path),
      writer_(problem->values.size(), -1),
      reads_(problem->blocks.size()),
      gives_(problem->blocks.size()),
      own_(problem->blocks.size()),
      changed_(problem->blocks.size(), nullptr),
      known_(problem->blocks.size()),
      work_fs_(problem->machine.device_count),
      link_fs_(problem->machine.device_count + problem->machine.link_count) {
  for (std::size_t b = 0; b < problem->blocks.size(); ++b) {
    for (const NodeData& node : problem->blocks[b].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value >= 0) writer_[output.value] = static_cast<std::int32_t>(b);
      }
    }
  }
}

// The weights whose all-reduces take longest, and of those that are read whole how long on one link: the one that
// they keep busy for longest.
void TailBound::FindLate() {
  late_.clear();
  if (problem_->has_buckets) return;  // a sum of several gradients begins when the last of them is there
  std::fill(link_fs_.begin(), link_fs_.end(), 0);
  const auto for_each_hop = [&](const Group& group, const auto& visit) {
    for (std::int32_t i = group.first; i < group.first + group.tasks; ++i) {
      const Slot& slot = graph_->slots()[i];
      if (slot.is_batch() && OrderPass(slot.order) != kUpdatePass) slot.ForEachTask(visit);
    }
  };
  const auto weights = static_cast<std::int32_t>(problem_->weights.size());
  for (std::int32_t weight = 0; weight < weights; ++weight) {
    const Group& group = graph_->groups()[graph_->WeightGroup(weight)];
    if (!group.has_gates) continue;
    Late late{weight, group.gates == 1, 0, kMost};
    for_each_hop(group, [&](std::int32_t link, double seconds) {
      late.hop_fs += Femtoseconds(seconds);
      if (late.is_whole) link_fs_[link] += Femtoseconds(seconds);
    });
    for (const std::int32_t slot : graph_->OfWeight(weight).update_of_device) {
      if (slot < 0) continue;
      graph_->slots()[slot].ForEachTask([&](std::int32_t, double seconds) {
        late.update_fs = std::min(late.update_fs, Femtoseconds(seconds));
      });
    }
    if (late.hop_fs > 0) late_.push_back(late);
  }
  std::sort(late_.begin(), late_.end(), [](const Late& a, const Late& b) { return a.hop_fs > b.hop_fs; });
  if (late_.size() > kMostLate) late_.resize(kMostLate);
  const auto busiest = std::max_element(link_fs_.begin(), link_fs_.end()) - link_fs_.begin();
  for (Late& late : late_) {
    if (!late.is_whole) continue;
    late.hop_fs = 0;
    for_each_hop(graph_->groups()[graph_->WeightGroup(late.weight)], [&](std::int32_t link, double seconds) {
      if (link == busiest) late.hop_fs = Femtoseconds(seconds);
    });
  }
}

// What the all-reduces after a gate take on the busiest of their links, and an update.
std::int64_t TailBound::GateTail(const Late& late, std::int32_t gate) {
  std::fill(link_fs_.begin(), link_fs_.end(), 0);
  std::int64_t busiest_fs = 0;
  graph_->ForEachSuccessor(graph_->slots()[gate], [&](std::int32_t next) {
    const Slot& slot = graph_->slots()[next];
    if (!slot.is_batch() || OrderPass(slot.order) == kUpdatePass) return;
    slot.ForEachTask([&](std::int32_t link, double seconds) {
      busiest_fs = std::max(busiest_fs, link_fs_[link] += Femtoseconds(seconds));
    });
  });
  return busiest_fs > 0 ? busiest_fs + late.update_fs : 0;
}

TailBound::Tail TailBound::Reset() {
  FindLate();
  std::fill(reads_.begin(), reads_.end(), 0);
  std::fill(gives_.begin(), gives_.end(), 0);
  for (std::vector<Own>& own : own_) own.clear();
  std::vector<std::int64_t> gate_fs;  // by gate
  for (std::size_t i = 0; i < late_.size(); ++i) {
    const Late& late = late_[i];
    const Group& group = graph_->groups()[graph_->WeightGroup(late.weight)];
    const std::int32_t first_gate = group.first + group.tasks;
    gate_fs.clear();
    for (std::int32_t gate = 0; gate < group.gates && !late.is_whole; ++gate) {
      gate_fs.push_back(GateTail(late, first_gate + gate));
    }
    for (const std::int32_t user : graph_->users(late.weight)) {
      const Placement& placement = graph_->placement(user);
      reads_[user] |= Weights{1} << i;
      for (const Port& port : placement.layout->weights) {
        if (port.subject != late.weight || !IsGivenLast(placement, port) || !port.is_of_all) continue;
        if (late.is_whole) {
          gives_[user] |= Weights{1} << i;
          continue;
        }
        std::int64_t tail_fs = kMost;
        for (const std::int32_t box : port.boxes) {
          tail_fs = std::min(tail_fs, gate_fs[graph_->OfWeight(late.weight).gate_of_box[box] - first_gate]);
        }
        own_[user].push_back({Weights{1} << i, tail_fs});
      }
    }
  }
  return Best({});
}

TailBound::Tail TailBound::Propose(std::span<const Change> changes) {
  for (const Change& change : changes) changed_[change.block] = &change.placement;
  const Tail best = Best(changes);
  for (const Change& change : changes) changed_[change.block] = nullptr;
  return best;
}

// What follows every shard of a block by the gradients of the values that it reads.
TailBound::Known TailBound::Passed(const Placement& placement) const {
  Known of_all;
  const auto add = [this](const Port& port, Known* known) {
    const Known& more = known_[writer_[port.subject]];
    known->upstream_of |= more.upstream_of;
    known->tail_fs = std::max(known->tail_fs, more.tail_fs);
  };
  bool is_any_partial = false;
  for (const Port& port : placement.layout->read) {
    if (!problem_->values[port.subject].is_differentiable || !IsGivenLast(placement, port)) continue;
    if (port.is_of_all) {
      add(port, &of_all);
    } else {
      is_any_partial = true;
    }
  }
  if (!is_any_partial) return of_all;
  // Some values only some shards read: what follows all the same, each shard by what it reads.
  Known common{~Weights{0}, kMost};
  for (std::int32_t shard = 0; shard < placement.layout->parts; ++shard) {
    Known of_shard;
    for (const Port& port : placement.layout->read) {
      if (!problem_->values[port.subject].is_differentiable || !IsGivenLast(placement, port)) continue;
      if (port.boxes[shard] != BoxTable::kNone) add(port, &of_shard);
    }
    common.upstream_of &= of_shard.upstream_of;
    common.tail_fs = std::min(common.tail_fs, of_shard.tail_fs);
  }
  return common;
}

std::int64_t TailBound::TailOf(Weights upstream_of) const {
  if (upstream_of == 0) return 0;
  std::int64_t hops_fs = 0;
  std::int64_t update_fs = kMost;
  for (; upstream_of != 0; upstream_of &= upstream_of - 1) {
    const Late& late = late_[std::countr_zero(upstream_of)];
    hops_fs += late.hop_fs;
    update_fs = std::min(update_fs, late.update_fs);
  }
  return hops_fs + update_fs;
}

TailBound::Tail TailBound::Best(std::span<const Change> changes) {
  // What is rebuilt is not looked at.
  Weights stay = ~Weights{0};
  for (const Change& change : changes) stay &= ~reads_[change.block];
  std::int64_t longest_fs = 0;
  by_tail_.clear();
  for (const std::int32_t block : path_->order()) {
    Known& known = known_[block];
    known = {};
    if (problem_->blocks[block].needs_backward) {
      known = Passed(changed_[block] != nullptr ? *changed_[block] : graph_->placement(block));
      known.upstream_of |= gives_[block] & stay;
      for (const Own& own : own_[block]) {
        if ((own.weight & stay) != 0) known.tail_fs = std::max(known.tail_fs, own.tail_fs);
      }
    }
    const std::int64_t tail_fs = std::max(TailOf(known.upstream_of), known.tail_fs);
    longest_fs = std::max(longest_fs, tail_fs);
    by_tail_.emplace_back(tail_fs, block);
  }
  std::sort(by_tail_.begin(), by_tail_.end());
  std::fill(work_fs_.begin(), work_fs_.end(), 0);
  Tail best;
  std::int64_t slack_fs = 0;
  const std::vector<std::int32_t>& kind = problem_->machine.kind;
  for (const auto& [tail_fs, block] : by_tail_) {
    if (tail_fs - slack_fs > best.tail_fs) best = {tail_fs - slack_fs, slack_fs};
    if (longest_fs - slack_fs <= best.tail_fs) break;
    const Placement& placement = changed_[block] != nullptr ? *changed_[block] : graph_->placement(block);
    const Layout& layout = *placement.layout;
    for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
      const std::int32_t device = placement.devices[pc];
      const auto shard = static_cast<std::int32_t>(pc) / placement.copies;
      slack_fs = std::max(slack_fs, work_fs_[device] += layout.work_fs[kind[device] * layout.parts + shard]);
    }
  }
  return best;
}

}  // namespace soapstone

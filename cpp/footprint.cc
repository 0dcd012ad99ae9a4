#include "footprint.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace soapstone {
namespace {

std::int64_t BytesOf(const Access& access) {
  return std::accumulate(access.shape.begin(), access.shape.end(), access.item_bytes, std::multiplies<>());
}

// Whether what a shard computes is there at the same time as what the first micro-batch does.
bool IsKept(const Placement& placement, std::int32_t shard) {
  return placement.in_flight == 0 || placement.LaneOf(shard) < placement.in_flight;
}

}  // namespace

Footprint::Footprint(const Problem* problem, const BoxTables* tables, Limits limits)
    : problem_(problem),
      tables_(tables),
      limits_(std::move(limits)),
      devices_(problem->machine.device_count),
      writer_(problem->values.size(), -1),
      placements_(problem->blocks.size(), nullptr),
      bytes_(devices_, 0),
      held_weights_(problem->weights.size()),
      held_values_(problem->values.size()) {
  std::vector<std::int64_t> weight_bytes(problem->weights.size(), 0);
  std::int64_t most_bytes = 0;  // if one device held everything
  for (std::size_t block = 0; block < problem->blocks.size(); ++block) {
    for (const NodeData& node : problem->blocks[block].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value >= 0) writer_[output.value] = static_cast<std::int32_t>(block);
        if (output.is_kept) most_bytes += BytesOf(output);
      }
      for (const Access& operand : node.operands) {
        if (operand.weight >= 0) weight_bytes[operand.weight] = BytesOf(operand);
        if (operand.value >= 0 && operand.is_kept) most_bytes += BytesOf(operand);
      }
    }
  }
  for (const std::int64_t bytes : weight_bytes) most_bytes += bytes * limits_.numbers_per_weight;
  is_limited_ = std::any_of(limits_.capacity_bytes.begin(), limits_.capacity_bytes.end(),
                            [&](std::int64_t capacity) { return capacity < most_bytes; });
}

const std::vector<std::int64_t>& Footprint::Bytes(const Simulator& current, std::span<const Change> changes) {
  for (std::size_t block = 0; block < placements_.size(); ++block) {
    placements_[block] = &current.placement(static_cast<std::int32_t>(block));
  }
  for (const Change& change : changes) placements_[change.block] = &change.placement;
  if (++count_ == 0) {
    // The numbers are used up: what was marked with them is forgotten.
    for (auto* marks : {&held_weights_, &held_values_}) {
      for (std::vector<std::uint32_t>& each : *marks) std::fill(each.begin(), each.end(), 0);
    }
    count_ = 1;
  }
  std::fill(bytes_.begin(), bytes_.end(), 0);
  for (const Placement* placement : placements_) {
    for (std::size_t pc = 0; pc < placement->devices.size(); ++pc) {
      const auto shard = static_cast<std::int32_t>(pc) / placement->copies;
      if (IsKept(*placement, shard)) bytes_[placement->devices[pc]] += placement->layout->kept_bytes[shard];
    }
    CountWeights(*placement);
    CountReceived(*placement);
  }
  return bytes_;
}

std::int64_t Footprint::Excess(const Simulator& current, std::span<const Change> changes) {
  const std::vector<std::int64_t>& bytes = Bytes(current, changes);
  std::int64_t excess = 0;
  for (std::int32_t device = 0; device < devices_; ++device) {
    excess += std::max<std::int64_t>(0, bytes[device] - limits_.capacity_bytes[device]);
  }
  return excess;
}

bool Footprint::IsNew(std::vector<std::uint32_t>* marks, std::int32_t box, std::int32_t device) {
  const auto at = static_cast<std::size_t>(box) * devices_ + device;
  if (at >= marks->size()) marks->resize(at + 1 + at / 2, 0);
  return std::exchange((*marks)[at], count_) != count_;
}

// A device holds a box of a weight once, however many of its shards read it.
void Footprint::CountWeights(const Placement& placement) {
  for (const Port& port : placement.layout->weights) {
    const std::int64_t number_bytes = problem_->weights[port.subject].item_bytes * limits_.numbers_per_weight;
    for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
      const std::int32_t box = port.boxes[pc / static_cast<std::size_t>(placement.copies)];
      if (box == BoxTable::kNone || !IsNew(&held_weights_[port.subject], box, placement.devices[pc])) continue;
      bytes_[placement.devices[pc]] += tables_->weights[port.subject].Volume(box) * number_bytes;
    }
  }
}

// What the backward pass needs of other blocks' values, where it is not a part of what was written there.
void Footprint::CountReceived(const Placement& placement) {
  for (const Port& port : placement.layout->read) {
    if (!port.is_kept) continue;
    for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
      const std::int32_t box = port.boxes[pc / static_cast<std::size_t>(placement.copies)];
      const std::int32_t device = placement.devices[pc];
      if (!IsKept(placement, static_cast<std::int32_t>(pc) / placement.copies)) continue;
      if (box == BoxTable::kNone || !IsNew(&held_values_[port.subject], box, device)) continue;
      if (IsAtHand(port.subject, box, device)) continue;
      bytes_[device] += tables_->values[port.subject].Volume(box) * problem_->values[port.subject].item_bytes;
    }
  }
}

bool Footprint::IsAtHand(std::int32_t value, std::int32_t box, std::int32_t device) const {
  const Placement& from = *placements_[writer_[value]];
  if (from.layout->is_partial) return false;
  const auto& all = from.layout->written;
  const auto written =
      std::find_if(all.begin(), all.end(), [&](const Written& each) { return each.port.subject == value; });
  const BoxTable& table = tables_->values[value];
  bool is_at_hand = false;
  written->ForEachUnder(table.Bounds(box), [&](std::int32_t entry, std::int64_t volume) {
    if (volume != table.Volume(box)) return;
    ForEachOn(from, written->shards[entry], device, [&](std::int32_t) { is_at_hand = true; });
  });
  return is_at_hand;
}

}  // namespace soapstone

#include "path_bound.h"

#include <algorithm>
#include <limits>

namespace soapstone {
namespace {

constexpr double kNothing = -1;

}  // namespace

PathBound::PathBound(const Problem* problem, const BoxTables* tables, const TaskGraph* graph)
    : problem_(problem),
      tables_(tables),
      graph_(graph),
      into_(problem->blocks.size()),
      out_of_(problem->blocks.size()),
      forward_s_(problem->blocks.size(), 0),
      backward_s_(problem->blocks.size(), 0),
      awaits_gradient_(problem->blocks.size(), 0),
      end_s_(problem->blocks.size(), 0),
      proposed_(problem->blocks.size(), nullptr) {
  std::vector<std::int32_t> writer(problem->values.size(), -1);
  for (std::size_t b = 0; b < problem->blocks.size(); ++b) {
    const auto block = static_cast<std::int32_t>(b);
    for (const NodeData& node : problem->blocks[b].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value >= 0) writer[output.value] = block;
      }
    }
  }
  for (std::size_t b = 0; b < problem->blocks.size(); ++b) {
    const auto block = static_cast<std::int32_t>(b);
    for (const NodeData& node : problem->blocks[b].nodes) {
      for (const Access& operand : node.operands) {
        if (operand.value < 0) continue;
        const auto number = static_cast<std::int32_t>(edges_.size());
        const bool returns = problem->values[operand.value].is_differentiable && node.writes_gradient &&
                             ReadsAll(node, operand);
        edges_.push_back({operand.value, writer[operand.value], block, returns});
        into_[block].push_back(number);
        out_of_[writer[operand.value]].push_back(number);
      }
    }
  }
  wait_s_.resize(edges_.size());
  const MachineData& machine = problem->machine;
  for (std::int32_t to = 0; to < machine.device_count; ++to) {
    double bandwidth = 0;
    double latency = std::numeric_limits<double>::infinity();
    for (std::int32_t from = 0; from < machine.device_count; ++from) {
      if (from == to) continue;
      bandwidth = std::max(bandwidth, machine.bandwidth[from * machine.device_count + to]);
      latency = std::min(latency, machine.latency[from * machine.device_count + to]);
    }
    bandwidth_.push_back(bandwidth);
    latency_.push_back(latency);
  }
  // Blocks are numbered by their leaders, and a follower may read what a later block writes.
  std::vector<std::size_t> left(problem->blocks.size());
  for (std::size_t b = 0; b < left.size(); ++b) {
    left[b] = into_[b].size();
    if (left[b] == 0) order_.push_back(static_cast<std::int32_t>(b));
  }
  for (std::size_t at = 0; at < order_.size(); ++at) {
    for (const std::int32_t edge : out_of_[order_[at]]) {
      if (--left[edges_[edge].reader] == 0) order_.push_back(edges_[edge].reader);
    }
  }
}

void PathBound::Reset() {
  Forget();
  for (std::int32_t block = 0; block < graph_->block_count(); ++block) SetBlock(block);
  for (std::size_t edge = 0; edge < edges_.size(); ++edge) wait_s_[edge] = WaitOf(edges_[edge]);
  current_s_ = Longest();
}

// Sums the shortest of each segment: less than any shard takes.
void PathBound::SetBlock(std::int32_t block) {
  const Placement& placement = PlacementOf(block);
  const Layout& layout = *placement.layout;
  const std::vector<std::int32_t>& kind = problem_->machine.kind;
  const auto shortest = [&](const std::vector<double>& seconds) {
    double sum_s = 0;
    for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
      double least_s = std::numeric_limits<double>::infinity();
      for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
        const std::size_t at = (kind[placement.devices[pc]] * layout.segments + segment) * layout.parts +
                               pc / static_cast<std::size_t>(placement.copies);
        least_s = std::min(least_s, seconds[at]);
      }
      sum_s += least_s;
    }
    return sum_s;
  };
  forward_s_[block] = shortest(layout.forward_s);
  backward_s_[block] = problem_->blocks[block].needs_backward ? shortest(layout.backward_s) : 0;
  // A gradient holds up the whole backward pass only if it comes in before its first segment.
  awaits_gradient_[block] =
      std::all_of(layout.written.begin(), layout.written.end(),
                  [&](const Written& written) { return written.port.segment == layout.segments - 1; });
}

double PathBound::WaitOf(const Edge& edge) const {
  const Placement& from = PlacementOf(edge.writer);
  const Placement& to = PlacementOf(edge.reader);
  const ValueData& value = problem_->values[edge.value];
  const BoxTable& table = tables_->values[edge.value];
  const auto written = std::find_if(from.layout->written.begin(), from.layout->written.end(),
                                    [&](const Written& each) { return each.port.subject == edge.value; });
  double least_s = std::numeric_limits<double>::infinity();
  for (const Port& port : to.layout->read) {
    if (port.subject != edge.value) continue;
    for (std::int32_t shard = 0; shard < to.layout->parts; ++shard) {
      const std::int32_t box = port.boxes[shard];
      if (box == BoxTable::kNone) return kNothing;
      for (std::int32_t copy = 0; copy < to.copies; ++copy) {
        const std::int32_t device = to.devices[shard * to.copies + copy];
        double longest_s = 0;
        written->ForEachUnder(table.Bounds(box), [&](std::int32_t source, std::int64_t volume) {
          bool is_local = false;
          for (const std::int32_t holder : written->shards[source]) {
            for (std::int32_t c = 0; c < from.copies; ++c) {
              is_local = is_local || from.devices[holder * from.copies + c] == device;
            }
          }
          if (is_local) return;
          // It may come by a collective, whose last hop is from any device.
          const auto size_bytes = static_cast<double>(volume * value.item_bytes);
          longest_s = std::max(longest_s, size_bytes / bandwidth_[device] + latency_[device]);
        });
        if (longest_s == 0) return 0;
        least_s = std::min(least_s, longest_s);
      }
    }
  }
  return least_s;
}

double PathBound::Longest() {
  double longest_s = 0;
  for (const std::int32_t block : order_) {
    double ready_s = 0;
    for (const std::int32_t edge : into_[block]) {
      if (wait_s_[edge] >= 0) ready_s = std::max(ready_s, end_s_[edges_[edge].writer] + wait_s_[edge]);
    }
    end_s_[block] = ready_s + forward_s_[block];
    longest_s = std::max(longest_s, end_s_[block]);
  }
  for (std::size_t at = order_.size(); at-- > 0;) {
    const std::int32_t block = order_[at];
    if (!problem_->blocks[block].needs_backward) continue;
    double ready_s = end_s_[block];
    if (awaits_gradient_[block]) {
      for (const std::int32_t edge : out_of_[block]) {
        if (edges_[edge].returns_gradient) ready_s = std::max(ready_s, end_s_[edges_[edge].reader]);
      }
    }
    end_s_[block] = ready_s + backward_s_[block];
    longest_s = std::max(longest_s, end_s_[block]);
  }
  return longest_s;
}

double PathBound::Propose(std::span<const Change> changes) {
  Restore();
  for (const Change& change : changes) proposed_[change.block] = &change.placement;
  for (const Change& change : changes) {
    const std::int32_t block = change.block;
    old_blocks_.push_back({block, forward_s_[block], backward_s_[block], awaits_gradient_[block]});
    SetBlock(block);
    for (const std::vector<std::int32_t>* edges : {&into_[block], &out_of_[block]}) {
      for (const std::int32_t edge : *edges) {
        old_waits_.push_back({edge, wait_s_[edge]});
        wait_s_[edge] = WaitOf(edges_[edge]);
      }
    }
  }
  proposed_s_ = Longest();
  return proposed_s_;
}

void PathBound::Accept() {
  current_s_ = proposed_s_;
  Forget();
}

// Takes back a proposal that was not accepted.
void PathBound::Restore() {
  for (const OldBlock& old : old_blocks_) {
    forward_s_[old.block] = old.forward_s;
    backward_s_[old.block] = old.backward_s;
    awaits_gradient_[old.block] = old.awaits_gradient;
  }
  // The edge between two changed blocks was replaced twice.
  for (std::size_t i = old_waits_.size(); i-- > 0;) wait_s_[old_waits_[i].edge] = old_waits_[i].wait_s;
  Forget();
}

void PathBound::Forget() {
  for (const OldBlock& old : old_blocks_) proposed_[old.block] = nullptr;
  old_blocks_.clear();
  old_waits_.clear();
}

}  // namespace soapstone

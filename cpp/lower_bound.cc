#include "lower_bound.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "layout.h"
#include "space.h"

namespace soapstone {
namespace {

constexpr int kBackwardLaunches = 2;  // as in cost/analytic.py
constexpr double kNever = std::numeric_limits<double>::infinity();
// [choice] Sums are made in another order than the simulator makes them, so the last digits are given away.
constexpr double kRounding = 1 - 1e-12;

std::int64_t Elements(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

class Bounds {
 public:
  explicit Bounds(const Problem& problem)
      : problem_(problem), space_(&problem), devices_(problem.machine.device_count) {}

  LowerBound Made() {
    LowerBound bound;
    bound.compute_s = Work() / devices_ * kRounding;
    bound.path_s = Path() * kRounding;
    return bound;
  }

 private:
  // Seconds of a node on the kind of device that is best for it: all of its shards together if `parts` is 1,
  // else the smallest that so many parts can have.
  double NodeSeconds(const NodeData& node, bool backward, std::int32_t parts) const {
    if (backward ? !node.has_backward || node.is_free_backward : node.is_free_forward) return 0;
    std::int64_t bytes = 0;
    for (const Access& output : node.outputs) bytes += Elements(output.shape) * output.item_bytes;
    std::int64_t pointed_at = 1;
    for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
      if (!node.is_gathered[dim]) pointed_at *= node.sizes[dim];
    }
    int gradients = 0;
    for (const Access& operand : node.operands) {
      if (!operand.is_present) continue;
      if (backward && operand.wants_gradient) ++gradients;
      // Of what a whole reads with gaps, shards may leave out more; a shard may read next to nothing.
      if (parts > 1 || !ReadsAll(node, operand)) continue;
      const std::int64_t count = Elements(operand.shape);
      bytes += (operand.is_gathered ? std::min(count, pointed_at) : count) * operand.item_bytes;
      if (backward && operand.wants_gradient) bytes += count * operand.item_bytes;
    }
    const MachineData& machine = problem_.machine;
    double least_s = kNever;
    for (std::size_t kind = 0; kind < machine.launch_s.size(); ++kind) {
      const double flops = node.flops * (backward ? gradients : 1);
      const std::vector<std::int32_t>& curves = backward ? node.backward_curve : node.forward_curve;
      if (!curves.empty() && curves[kind] >= 0) {
        const TimeCurve& curve = problem_.curves[curves[kind]];
        const double traffic_s = static_cast<double>(bytes) * curve.least_s_per_byte;
        least_s = std::min(least_s, std::max(flops * curve.least_s_per_flop, traffic_s) / parts);
        continue;
      }
      const int launches = backward ? std::min(gradients, kBackwardLaunches) : 1;
      const double busy_s =
          std::max(flops / node.flops_per_s[kind], static_cast<double>(bytes) / machine.memory_bytes_per_s[kind]);
      least_s = std::min(least_s, std::max(launches * machine.launch_s[kind], busy_s / parts));
    }
    return least_s;
  }

  double UpdateSeconds(std::int64_t size_bytes) const {
    const MachineData& machine = problem_.machine;
    const double traffic = static_cast<double>(size_bytes) * machine.update_bytes_per_byte;
    double least_s = kNever;
    for (std::size_t kind = 0; kind < machine.launch_s.size(); ++kind) {
      least_s = std::min(least_s, std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind]));
    }
    return least_s;
  }

  double Work() const {
    double work_s = 0;
    std::vector<double> update_s(problem_.weights.size(), 0);
    for (const BlockData& block : problem_.blocks) {
      for (const NodeData& node : block.nodes) {
        work_s += NodeSeconds(node, false, 1) + NodeSeconds(node, true, 1);
        for (const Access& operand : node.operands) {
          if (operand.weight < 0 || !node.writes_gradient) continue;
          const std::int64_t count = ReadsAll(node, operand) ? Elements(operand.shape) : 0;
          double& update = update_s[operand.weight];
          update = std::max(update, UpdateSeconds(count * operand.item_bytes));
        }
      }
    }
    for (const double update : update_s) work_s += update;
    return work_s;
  }

  // For each value that a block reads, whether every shard reads some of it whatever the layout. Boxes are
  // intervals of each axis, so it is enough to cut every dim alone as finely as can be.
  std::vector<std::uint8_t> AlwaysRead(std::int32_t block) {
    const NodeData& leader = problem_.blocks[block].nodes[0];
    std::vector<std::uint8_t> is_read(problem_.values.size(), 1);
    for (std::size_t dim = 0; dim < leader.sizes.size(); ++dim) {
      if (!leader.is_splittable[dim]) continue;
      for (std::int32_t degree = devices_; degree > 1; --degree) {
        if (leader.sizes[dim] % degree != 0) continue;
        std::vector<std::int32_t> degrees(leader.sizes.size(), 1);
        degrees[dim] = degree;
        const Layout* layout = space_.Find(block, degrees);
        if (layout == nullptr) continue;
        for (const Port& port : layout->read) {
          if (std::find(port.boxes.begin(), port.boxes.end(), BoxTable::kNone) != port.boxes.end()) {
            is_read[port.subject] = 0;
          }
        }
        break;
      }
    }
    return is_read;
  }

  // Seconds of the nodes from one to another, both included.
  double Between(std::int32_t block, std::size_t first, std::size_t last, bool backward) const {
    double sum_s = 0;
    for (std::size_t n = first; n <= last; ++n) {
      sum_s += NodeSeconds(problem_.blocks[block].nodes[n], backward, devices_);
    }
    return sum_s;
  }

  double Path() {
    const auto blocks = static_cast<std::int32_t>(problem_.blocks.size());
    std::vector<std::vector<std::uint8_t>> is_read;
    for (std::int32_t block = 0; block < blocks; ++block) is_read.push_back(AlwaysRead(block));
    const std::vector<std::int32_t> order = Order();
    std::vector<double> written_s(problem_.values.size(), 0);   // when the first shard has written it
    std::vector<double> returned_s(problem_.values.size(), 0);  // when the first gradient of it is there
    std::vector<double> forward_s(blocks, 0);                   // when the first shard has passed the block
    double longest_s = 0;
    // Calls visit(node, its operand) for the values that every shard waits for.
    const auto for_each_read = [&](std::int32_t block, const auto& visit) {
      const std::vector<NodeData>& nodes = problem_.blocks[block].nodes;
      for (std::size_t n = 0; n < nodes.size(); ++n) {
        for (const Access& operand : nodes[n].operands) {
          if (operand.value >= 0 && is_read[block][operand.value]) visit(n, operand);
        }
      }
    };
    for (const std::int32_t block : order) {
      const std::vector<NodeData>& nodes = problem_.blocks[block].nodes;
      forward_s[block] = Between(block, 0, nodes.size() - 1, false);
      for_each_read(block, [&](std::size_t n, const Access& operand) {
        const double rest_s = Between(block, n, nodes.size() - 1, false);
        forward_s[block] = std::max(forward_s[block], written_s[operand.value] + rest_s);
      });
      for (std::size_t last = 0; last < nodes.size(); ++last) {
        for (const Access& output : nodes[last].outputs) {
          if (output.value < 0) continue;
          double& end_s = written_s[output.value];
          end_s = Between(block, 0, last, false);
          for_each_read(block, [&](std::size_t n, const Access& operand) {
            if (n <= last) end_s = std::max(end_s, written_s[operand.value] + Between(block, n, last, false));
          });
        }
      }
      longest_s = std::max(longest_s, forward_s[block]);
    }
    for (std::size_t at = order.size(); at-- > 0;) {
      const std::int32_t block = order[at];
      if (!problem_.blocks[block].needs_backward) continue;
      const std::vector<NodeData>& nodes = problem_.blocks[block].nodes;
      for (std::size_t n = 0; n < nodes.size(); ++n) {
        // When the first shard has come back to this node.
        double back_s = forward_s[block] + Between(block, n, nodes.size() - 1, true);
        for (std::size_t last = n; last < nodes.size(); ++last) {
          for (const Access& output : nodes[last].outputs) {
            if (output.value < 0) continue;
            back_s = std::max(back_s, returned_s[output.value] + Between(block, n, last, true));
          }
        }
        bool is_trained = false;
        for (const Access& operand : nodes[n].operands) {
          is_trained = is_trained || (operand.weight >= 0 && nodes[n].writes_gradient);
          if (operand.value < 0 || !nodes[n].writes_gradient || !ReadsAll(nodes[n], operand)) continue;
          if (!problem_.values[operand.value].is_differentiable) continue;
          returned_s[operand.value] = std::max(returned_s[operand.value], back_s);
        }
        longest_s = std::max(longest_s, back_s + (is_trained ? UpdateSeconds(0) : 0));
      }
    }
    return longest_s;
  }

  // Blocks, each after those it reads from.
  std::vector<std::int32_t> Order() const {
    const std::size_t blocks = problem_.blocks.size();
    std::vector<std::int32_t> writer(problem_.values.size(), -1);
    for (std::size_t block = 0; block < blocks; ++block) {
      for (const NodeData& node : problem_.blocks[block].nodes) {
        for (const Access& output : node.outputs) {
          if (output.value >= 0) writer[output.value] = static_cast<std::int32_t>(block);
        }
      }
    }
    std::vector<std::vector<std::int32_t>> readers(blocks);
    std::vector<std::int32_t> left(blocks, 0);
    for (std::size_t block = 0; block < blocks; ++block) {
      for (const NodeData& node : problem_.blocks[block].nodes) {
        for (const Access& operand : node.operands) {
          if (operand.value < 0) continue;
          readers[writer[operand.value]].push_back(static_cast<std::int32_t>(block));
          ++left[block];
        }
      }
    }
    std::vector<std::int32_t> order;
    for (std::size_t block = 0; block < blocks; ++block) {
      if (left[block] == 0) order.push_back(static_cast<std::int32_t>(block));
    }
    for (std::size_t at = 0; at < order.size(); ++at) {
      for (const std::int32_t reader : readers[order[at]]) {
        if (--left[reader] == 0) order.push_back(reader);
      }
    }
    return order;
  }

  const Problem& problem_;
  Space space_;
  std::int32_t devices_;
};

}  // namespace

LowerBound MakeLowerBound(const Problem& problem) { return Bounds(problem).Made(); }

}  // namespace soapstone

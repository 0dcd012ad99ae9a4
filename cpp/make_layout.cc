// How layouts are made. A chain meets thousands of them, so each box is worked out once and kept in flat memory.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "access.h"
#include "layout.h"

namespace soapstone {
namespace {

constexpr double kStatisticsShare = 1.0 / 3.0;
constexpr std::int64_t kStatisticsNumbers = 3;
constexpr std::int64_t kStatisticsItemBytes = 4;
constexpr int kBackwardLaunches = 2;

// A box for every shard, or none for some: lo and hi of each axis, one after the other.
class Boxes {
 public:
  Boxes(std::size_t width, std::int32_t parts)
      : width_(width), bounds_(width * static_cast<std::size_t>(parts)), has_(static_cast<std::size_t>(parts), 1) {}

  std::span<std::int64_t> operator[](std::int32_t shard) {
    return {bounds_.data() + width_ * static_cast<std::size_t>(shard), width_};
  }
  std::span<const std::int64_t> operator[](std::int32_t shard) const {
    return {bounds_.data() + width_ * static_cast<std::size_t>(shard), width_};
  }
  bool has(std::int32_t shard) const { return has_[static_cast<std::size_t>(shard)] != 0; }
  void Drop(std::int32_t shard) { has_[static_cast<std::size_t>(shard)] = 0; }

  std::int64_t Volume(std::int32_t shard) const {
    const std::span<const std::int64_t> box = (*this)[shard];
    std::int64_t volume = 1;
    for (std::size_t i = 0; i < width_; i += 2) volume *= std::max<std::int64_t>(0, box[i + 1] - box[i]);
    return volume;
  }

 private:
  std::size_t width_;
  std::vector<std::int64_t> bounds_;
  std::vector<std::uint8_t> has_;
};

BoxBounds Copied(std::span<const std::int64_t> box) { return {box.begin(), box.end()}; }

// Shards put together by their boxes, in the order of the first of each.
Rows Together(const Boxes& boxes, std::size_t width, std::int32_t parts) {
  BoxTable seen(width / 2);
  std::vector<std::int32_t> number(static_cast<std::size_t>(parts));
  for (std::int32_t shard = 0; shard < parts; ++shard) number[shard] = seen.Number(boxes[shard]);
  Rows rows;
  rows.begin.assign(seen.size() + 1, 0);
  for (const std::int32_t box : number) ++rows.begin[box + 1];
  for (std::size_t i = 1; i < rows.begin.size(); ++i) rows.begin[i] += rows.begin[i - 1];
  rows.items.resize(number.size());
  std::vector<std::int32_t> next(rows.begin.begin(), rows.begin.end() - 1);
  for (std::int32_t shard = 0; shard < parts; ++shard) rows.items[next[number[shard]]++] = shard;
  return rows;
}

// The classes of a seam; see SeamData.
Rows ClassesOf(const SeamData& seam, const Alike& behind) {
  if (behind.items.size() != static_cast<std::size_t>(behind.count())) return {};
  const auto parts = static_cast<std::int32_t>(seam.boxes.size());
  Boxes boxes(seam.boxes[0].size(), parts);
  for (std::int32_t shard = 0; shard < parts; ++shard) {
    std::copy(seam.boxes[shard].begin(), seam.boxes[shard].end(), boxes[shard].begin());
  }
  Rows classes = Together(boxes, seam.boxes[0].size(), parts);
  for (std::int32_t i = 0; i < classes.count(); ++i) {
    std::vector<std::int32_t> summands;
    for (const std::int32_t shard : classes[i]) summands.push_back(seam.summands[shard]);
    std::sort(summands.begin(), summands.end());
    if (std::adjacent_find(summands.begin(), summands.end()) != summands.end()) return {};
    for (std::int32_t j = 0; j < i; ++j) {
      if (Intersection(seam.boxes[classes[i][0]], seam.boxes[classes[j][0]])) return {};
    }
  }
  return classes;
}

// Seconds by a curve, as cost/fit.py has them.
double CurveSeconds(const TimeCurve& curve, const std::vector<std::int64_t>& shape, double flops, std::int64_t bytes) {
  const auto found = std::lower_bound(curve.shapes.begin(), curve.shapes.end(), shape);
  if (found != curve.shapes.end() && *found == shape) return curve.seconds[found - curve.shapes.begin()];
  return curve.base_s + curve.s_per_flop * flops + curve.s_per_byte * static_cast<double>(bytes);
}

void AppendShape(std::span<const std::int64_t> box, std::vector<std::int64_t>* shape) {
  shape->push_back(static_cast<std::int64_t>(box.size() / 2));
  for (std::size_t i = 0; i < box.size(); i += 2) shape->push_back(box[i + 1] - box[i]);
}

class LayoutMaker {
 public:
  LayoutMaker(const Problem& problem, BoxTables* tables, std::int32_t block)
      : problem_(problem), tables_(tables), data_(problem.blocks[block]) {}

  std::optional<Layout> Make(const std::vector<std::int32_t>& degrees) {
    layout_.degrees = degrees;
    layout_.sample_dim = data_.sample_dim;
    PlaceLeader(degrees);
    for (std::size_t n = 1; n < data_.nodes.size(); ++n) {
      if (!PlaceFollower(n)) return std::nullopt;
    }
    for (std::size_t n = 0; n < data_.nodes.size(); ++n) {
      layout_.alike.push_back(Together(points_[n], 2 * data_.nodes[n].sizes.size(), layout_.parts));
    }
    sums_split_ =
        std::any_of(layout_.summands.begin(), layout_.summands.end(), [](std::int32_t s) { return s != 0; });
    layout_.is_partial = sums_split_ && (data_.nodes.size() == 1 || data_.passes_sums);
    CutSegments();
    AddPorts();
    AddSeconds();
    return std::move(layout_);
  }

 private:
  // A part of a node's work, in one segment.
  struct Part {
    std::size_t node;
    double share;
  };

  void PlaceLeader(const std::vector<std::int32_t>& degrees) {
    const NodeData& leader = data_.nodes[0];
    const std::size_t rank = leader.sizes.size();
    for (const std::int32_t degree : degrees) layout_.parts *= degree;
    layout_.summands.reserve(static_cast<std::size_t>(layout_.parts));
    Boxes points(2 * rank, layout_.parts);
    std::vector<std::int64_t> at(rank, 0);
    for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
      std::int32_t summand = 0;
      const std::span<std::int64_t> own = points[shard];
      for (std::size_t dim = 0; dim < rank; ++dim) {
        const std::int64_t step = leader.sizes[dim] / degrees[dim];
        own[2 * dim] = at[dim] * step;
        own[2 * dim + 1] = (at[dim] + 1) * step;
        if (leader.is_summed[dim] && degrees[dim] > 1) {
          summand = summand * degrees[dim] + static_cast<std::int32_t>(at[dim]);
        }
      }
      layout_.summands.push_back(summand);
      for (std::size_t dim = rank; dim-- > 0;) {
        if (++at[dim] < degrees[dim]) break;
        at[dim] = 0;
      }
    }
    points_.push_back(std::move(points));
    WorkOutBoxes(0);
  }

  // False if a shard would be cut across the node's factors, or read what another shard of the block wrote.
  bool PlaceFollower(std::size_t n) {
    const NodeData& node = data_.nodes[n];
    const Access& carried = node.operands[node.carried];
    const Boxes& source = writes_[carried.inner_node][carried.inner_output];
    Boxes points(2 * node.sizes.size(), layout_.parts);
    for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
      if (!FollowInto(node, source[shard], points[shard])) return false;
    }
    points_.push_back(std::move(points));
    WorkOutBoxes(n);
    for (std::size_t i = 0; i < node.operands.size(); ++i) {
      const Access& operand = node.operands[i];
      if (operand.inner_node < 0) continue;
      const Boxes& read = reads_[n][i];
      const Boxes& written = writes_[operand.inner_node][operand.inner_output];
      for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
        if (!read.has(shard)) continue;
        for (std::size_t b = 0; b < read[shard].size(); b += 2) {
          if (read[shard][b] < written[shard][b] || written[shard][b + 1] < read[shard][b + 1]) return false;
        }
      }
    }
    return true;
  }

  // What every shard of a node reads and writes.
  void WorkOutBoxes(std::size_t n) {
    const NodeData& node = data_.nodes[n];
    std::vector<Boxes>& reads = reads_.emplace_back();
    for (const Access& operand : node.operands) {
      Boxes& boxes = reads.emplace_back(2 * operand.axes.size(), layout_.parts);
      for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
        if (!ReadInto(node, operand, points_[n][shard], boxes[shard])) boxes.Drop(shard);
      }
    }
    std::vector<Boxes>& writes = writes_.emplace_back();
    for (const Access& output : node.outputs) {
      Boxes& boxes = writes.emplace_back(2 * output.axes.size(), layout_.parts);
      for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
        WriteInto(output, points_[n][shard], boxes[shard]);
      }
    }
  }

  // The twin of tasks/segments.py.
  void CutSegments() {
    segments_.resize(1);
    for (std::size_t n = 0; n < data_.nodes.size(); ++n) {
      const NodeData& node = data_.nodes[n];
      reads_in_.push_back(static_cast<std::int32_t>(segments_.size()) - 1);
      if (SplitsStatistics(n)) {
        AddStatisticsSeam(n);
        segments_.back().push_back({n, kStatisticsShare});
        segments_.push_back({{n, 1 - kStatisticsShare}});
      } else {
        segments_.back().push_back({n, 1.0});
      }
      writes_in_.push_back(static_cast<std::int32_t>(segments_.size()) - 1);
      if (n == 0 && sums_split_ && !layout_.is_partial) {
        for (std::size_t i = 0; i < node.outputs.size(); ++i) AddSumsSeam(i);
        segments_.emplace_back();
        writes_in_[0] = static_cast<std::int32_t>(segments_.size()) - 1;
      }
    }
    layout_.segments = static_cast<std::int32_t>(segments_.size());
  }

  bool SplitsStatistics(std::size_t n) const {
    const NodeData& node = data_.nodes[n];
    for (std::size_t dim = 0; dim < node.sizes.size() && node.synchronises; ++dim) {
      if (!node.is_shared[dim]) continue;
      for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
        const std::span<const std::int64_t> own = points_[n][shard];
        if (own[2 * dim] != 0 || own[2 * dim + 1] != node.sizes[dim]) return true;
      }
    }
    return false;
  }

  void AddStatisticsSeam(std::size_t n) {
    const NodeData& node = data_.nodes[n];
    SeamData seam;
    seam.segment = static_cast<std::int32_t>(segments_.size()) - 1;
    seam.item_bytes = kStatisticsItemBytes;
    seam.is_mutual = true;
    for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
      const std::span<const std::int64_t> own = points_[n][shard];
      BoxBounds box;
      for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
        if (node.is_shared[dim]) continue;
        box.push_back(own[2 * dim]);
        box.push_back(own[2 * dim + 1]);
      }
      box.push_back(0);
      box.push_back(kStatisticsNumbers);
      seam.boxes.push_back(std::move(box));
    }
    seam.alike = static_cast<std::int32_t>(n);
    for (std::int32_t i = 0; i < layout_.alike[n].count(); ++i) seam.summands.push_back(i);
    seam.classes = ClassesOf(seam, layout_.alike[n]);
    layout_.seams.push_back(std::move(seam));
  }

  void AddSumsSeam(std::size_t output) {
    SeamData seam;
    seam.segment = static_cast<std::int32_t>(segments_.size()) - 1;
    seam.item_bytes = data_.nodes[0].outputs[output].item_bytes;
    for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
      seam.boxes.push_back(Copied(writes_[0][output][shard]));
    }
    seam.summands = layout_.summands;
    seam.classes = ClassesOf(seam, layout_.alike[0]);
    layout_.seams.push_back(std::move(seam));
  }

  void AddPorts() {
    layout_.kept_bytes.assign(layout_.parts, 0);
    for (std::size_t n = 0; n < data_.nodes.size(); ++n) {
      const NodeData& node = data_.nodes[n];
      for (std::size_t i = 0; i < node.operands.size(); ++i) {
        const Access& operand = node.operands[i];
        if (operand.value < 0 && operand.weight < 0) continue;
        const bool is_value = operand.value >= 0;
        Port port = PortOf(n, reads_in_[n], is_value ? operand.value : operand.weight, reads_[n][i],
                           is_value ? &tables_->values[operand.value] : &tables_->weights[operand.weight]);
        port.gives_gradient = node.writes_gradient;
        port.is_kept = operand.is_kept;
        (is_value ? layout_.read : layout_.weights).push_back(std::move(port));
      }
      for (std::size_t i = 0; i < node.outputs.size(); ++i) {
        const Access& output = node.outputs[i];
        const Boxes& boxes = writes_[n][i];
        for (std::int32_t shard = 0; output.is_kept && shard < layout_.parts; ++shard) {
          layout_.kept_bytes[shard] += boxes.Volume(shard) * output.item_bytes;
        }
        if (output.value < 0) continue;
        layout_.written.push_back(
            Gridded(PortOf(n, writes_in_[n], output.value, boxes, &tables_->values[output.value]), boxes, output));
      }
    }
  }

  Port PortOf(std::size_t n, std::int32_t segment, std::int32_t subject, const Boxes& boxes, BoxTable* table) const {
    Port port;
    port.subject = subject;
    port.segment = segment;
    port.alike = static_cast<std::int32_t>(n);
    port.boxes.reserve(static_cast<std::size_t>(layout_.parts));
    for (std::int32_t shard = 0; shard < layout_.parts; ++shard) {
      port.boxes.push_back(boxes.has(shard) ? table->Number(boxes[shard]) : BoxTable::kNone);
      port.is_of_all = port.is_of_all && boxes.has(shard);
    }
    return port;
  }

  // The boxes that shards write, found by the cell of the grid that each fills.
  Written Gridded(Port port, const Boxes& boxes, const Access& output) const {
    const auto summand_of = [this](std::int32_t shard) { return layout_.is_partial ? layout_.summands[shard] : 0; };
    std::vector<std::int32_t> order(static_cast<std::size_t>(layout_.parts));
    for (std::int32_t shard = 0; shard < layout_.parts; ++shard) order[shard] = shard;
    const auto less = [&](std::int32_t a, std::int32_t b) {
      if (summand_of(a) != summand_of(b)) return summand_of(a) < summand_of(b);
      const auto [first, second] = std::pair(boxes[a], boxes[b]);
      return std::lexicographical_compare(first.begin(), first.end(), second.begin(), second.end());
    };
    std::stable_sort(order.begin(), order.end(), less);
    Written written;
    std::size_t count = 1;
    for (std::size_t axis = 0; axis < output.shape.size(); ++axis) {
      written.steps.push_back(boxes[0][2 * axis + 1] - boxes[0][2 * axis]);
      written.counts.push_back(output.shape[axis] / written.steps[axis]);
      count *= static_cast<std::size_t>(written.counts[axis]);
    }
    std::vector<std::int32_t> cell_of;  // by entry held
    for (std::size_t i = 0; i < order.size();) {
      const std::int32_t first = order[i];
      std::size_t end = i + 1;
      while (end < order.size() && port.boxes[order[end]] == port.boxes[first] &&
             summand_of(order[end]) == summand_of(first)) {
        ++end;
      }
      std::int64_t cell = 0;
      for (std::size_t axis = 0; axis < output.shape.size(); ++axis) {
        cell = cell * written.counts[axis] + boxes[first][2 * axis] / written.steps[axis];
      }
      cell_of.push_back(static_cast<std::int32_t>(cell));
      written.summand.push_back(summand_of(first));
      written.box.push_back(port.boxes[first]);
      written.shards.Append(std::span(order).subspan(i, end - i));
      i = end;
    }
    Rows& cells = written.cells;
    cells.begin.assign(count + 1, 0);
    for (const std::int32_t cell : cell_of) ++cells.begin[cell + 1];
    for (std::size_t cell = 0; cell < count; ++cell) cells.begin[cell + 1] += cells.begin[cell];
    cells.items.resize(cell_of.size());
    std::vector<std::int32_t> next(cells.begin.begin(), cells.begin.end() - 1);
    for (std::size_t entry = 0; entry < cell_of.size(); ++entry) {
      cells.items[next[cell_of[entry]]++] = static_cast<std::int32_t>(entry);
    }
    written.port = std::move(port);
    return written;
  }

  void AddSeconds() {
    const auto kinds = static_cast<std::int32_t>(problem_.machine.launch_s.size());
    layout_.forward_s.assign(static_cast<std::size_t>(kinds) * layout_.segments * layout_.parts, 0);
    layout_.backward_s = layout_.forward_s;
    layout_.work_fs.assign(static_cast<std::size_t>(kinds) * layout_.parts, 0);
    std::size_t at = 0;
    for (std::int32_t kind = 0; kind < kinds; ++kind) {
      for (const std::vector<Part>& segment : segments_) {
        for (std::int32_t shard = 0; shard < layout_.parts; ++shard, ++at) {
          for (const Part& part : segment) {
            const auto [forward_s, backward_s] = ComputeSeconds(part.node, shard, kind);
            layout_.forward_s[at] += part.share * forward_s;
            if (data_.nodes[part.node].has_backward) layout_.backward_s[at] += part.share * backward_s;
          }
          std::int64_t& work_fs = layout_.work_fs[kind * layout_.parts + shard];
          work_fs += Femtoseconds(layout_.forward_s[at]);
          if (data_.needs_backward) work_fs += Femtoseconds(layout_.backward_s[at]);
        }
      }
    }
  }

  // Seconds of one node's shard, forward and backward, as cost/work.py, cost/analytic.py and cost/measured.py
  // have them.
  std::array<double, 2> ComputeSeconds(std::size_t n, std::int32_t shard, std::int32_t kind) {
    const NodeData& node = data_.nodes[n];
    const bool takes_backward = node.has_backward && !node.is_free_backward;
    if (node.is_free_forward && !takes_backward) return {0, 0};
    const std::span<const std::int64_t> own = points_[n][shard];
    std::int64_t pointed_at = 1;
    double points = 1;
    double all = 1;
    for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
      const std::int64_t length = own[2 * dim + 1] - own[2 * dim];
      if (!node.is_gathered[dim]) pointed_at *= length;
      points *= static_cast<double>(length);
      all *= static_cast<double>(node.sizes[dim]);
    }
    std::int64_t bytes = 0;
    std::int64_t gradient_bytes = 0;
    int gradients = 0;
    for (std::size_t i = 0; i < node.operands.size(); ++i) {
      const Access& operand = node.operands[i];
      const Boxes& read = reads_[n][i];
      const std::int64_t count = read.has(shard) ? read.Volume(shard) : 0;
      bytes += (operand.is_gathered ? std::min(count, pointed_at) : count) * operand.item_bytes;
      if (operand.wants_gradient) {
        gradient_bytes += count * operand.item_bytes;
        ++gradients;
      }
    }
    for (std::size_t i = 0; i < node.outputs.size(); ++i) {
      bytes += writes_[n][i].Volume(shard) * node.outputs[i].item_bytes;
    }
    const double flops = node.flops * (points / all);
    std::array<double, 2> seconds = {0, 0};
    if (!node.is_free_forward) {
      seconds[0] = Seconds(n, shard, kind, node.forward_curve, flops, bytes, 1);
    }
    if (takes_backward) {
      seconds[1] = Seconds(n, shard, kind, node.backward_curve, flops * gradients, bytes + gradient_bytes,
                           std::min(gradients, kBackwardLaunches));
    }
    return seconds;
  }

  double Seconds(std::size_t n, std::int32_t shard, std::int32_t kind, const std::vector<std::int32_t>& curves,
                 double flops, std::int64_t bytes, int launches) {
    const MachineData& machine = problem_.machine;
    if (!curves.empty() && curves[kind] >= 0) {
      return CurveSeconds(problem_.curves[curves[kind]], ShapeOf(n, shard), flops, bytes);
    }
    const double arithmetic = flops / data_.nodes[n].flops_per_s[kind];
    const double traffic = static_cast<double>(bytes) / machine.memory_bytes_per_s[kind];
    return std::max({launches * machine.launch_s[kind], arithmetic, traffic});
  }

  // What a shard reads and writes, as a TimeCurve has it.
  const std::vector<std::int64_t>& ShapeOf(std::size_t n, std::int32_t shard) {
    shape_.clear();
    for (const Boxes& read : reads_[n]) {
      if (read.has(shard)) {
        AppendShape(read[shard], &shape_);
      } else {
        shape_.push_back(-1);
      }
    }
    for (const Boxes& written : writes_[n]) AppendShape(written[shard], &shape_);
    return shape_;
  }

  const Problem& problem_;
  BoxTables* tables_;
  const BlockData& data_;
  Layout layout_;
  bool sums_split_ = false;
  std::vector<Boxes> points_;              // by node: iteration boxes
  std::vector<std::vector<Boxes>> reads_;  // by node, by operand
  std::vector<std::vector<Boxes>> writes_;  // by node, by output
  std::vector<std::vector<Part>> segments_;
  std::vector<std::int32_t> reads_in_;   // by node: segment
  std::vector<std::int32_t> writes_in_;  // by node: segment
  std::vector<std::int64_t> shape_;
};

}  // namespace

std::optional<Layout> MakeLayout(const Problem& problem, BoxTables* tables, std::int32_t block,
                                 const std::vector<std::int32_t>& degrees) {
  return LayoutMaker(problem, tables, block).Make(degrees);
}

}  // namespace soapstone

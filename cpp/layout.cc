#include "layout.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

namespace soapstone {
namespace {

constexpr double kStatisticsShare = 1.0 / 3.0;
constexpr std::int64_t kStatisticsNumbers = 3;
constexpr std::int64_t kStatisticsItemBytes = 4;
constexpr int kBackwardLaunches = 2;

// An iteration box: lo and hi of each dim of a node.
using Points = std::vector<std::int64_t>;

std::int64_t FloorDiv(std::int64_t a, std::int64_t b) {
  const std::int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

// The interval that an axis takes over an iteration box.
std::pair<std::int64_t, std::int64_t> Image(const Axis& axis, const Points& points) {
  std::int64_t low = axis.offset;
  std::int64_t high = axis.offset;
  for (std::size_t i = 0; i < axis.dims.size(); ++i) {
    const std::int64_t first = axis.strides[i] * points[2 * axis.dims[i]];
    const std::int64_t last = axis.strides[i] * (points[2 * axis.dims[i] + 1] - 1);
    low += std::min(first, last);
    high += std::max(first, last);
  }
  return {-FloorDiv(-low, axis.divisor), FloorDiv(high, axis.divisor) + 1};
}

BoxBounds WrittenBox(const Access& output, const Points& points) {
  BoxBounds box;
  box.reserve(2 * output.axes.size());
  for (const Axis& axis : output.axes) {
    const auto [lo, hi] = Image(axis, points);
    box.push_back(lo);
    box.push_back(hi);
  }
  return box;
}

std::optional<BoxBounds> Read(const NodeData& node, const Access& operand, const Points& points) {
  if (!operand.is_present) return std::nullopt;
  if (operand.is_finishing) {
    for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
      if (node.is_summed[dim] && points[2 * dim] != 0) return std::nullopt;
    }
  }
  BoxBounds box;
  box.reserve(2 * operand.axes.size());
  for (std::size_t i = 0; i < operand.axes.size(); ++i) {
    const auto [lo, hi] = Image(operand.axes[i], points);
    const std::int64_t kept_lo = std::min(std::max<std::int64_t>(lo, 0), operand.shape[i]);
    const std::int64_t kept_hi = std::max<std::int64_t>(std::min(hi, operand.shape[i]), 0);
    if (kept_hi <= kept_lo) return std::nullopt;
    box.push_back(kept_lo);
    box.push_back(kept_hi);
  }
  return box;
}

Points WholePoints(const NodeData& node) {
  Points points;
  for (const std::int64_t size : node.sizes) {
    points.push_back(0);
    points.push_back(size);
  }
  return points;
}

// The part of a follower's iteration space that reads exactly this box of an operand.
std::optional<Points> Followed(const NodeData& node, const BoxBounds& box) {
  const Access& operand = node.operands[node.carried];
  Points points = WholePoints(node);
  for (std::size_t i = 0; i < operand.axes.size(); ++i) {
    std::int64_t lo = box[2 * i];
    std::int64_t hi = box[2 * i + 1];
    const Axis& axis = operand.axes[i];
    for (std::size_t t = 0; t < axis.dims.size(); ++t) {
      const std::int64_t stride = axis.strides[t];
      if (lo % stride == 0 && hi % stride == 0) {
        points[2 * axis.dims[t]] = lo / stride;
        points[2 * axis.dims[t] + 1] = hi / stride;
        break;
      }
      if (lo / stride != (hi - 1) / stride) return std::nullopt;
      points[2 * axis.dims[t]] = lo / stride;
      points[2 * axis.dims[t] + 1] = lo / stride + 1;
      hi = (hi - 1) % stride + 1;
      lo %= stride;
    }
  }
  // What it writes is a box only if factored axes are cut outermost first.
  for (const std::vector<std::int32_t>& dims : node.factored) {
    for (std::size_t i = 0; i + 1 < dims.size(); ++i) {
      const std::int64_t outer = points[2 * dims[i] + 1] - points[2 * dims[i]];
      const std::int64_t inner = points[2 * dims[i + 1] + 1] - points[2 * dims[i + 1]];
      if (inner != node.sizes[dims[i + 1]] && outer != 1) return std::nullopt;
    }
  }
  return points;
}

std::vector<Points> LeaderShards(const NodeData& leader, const std::vector<std::int32_t>& degrees,
                                 std::vector<std::int32_t>* summands) {
  const std::size_t rank = leader.sizes.size();
  std::int64_t parts = 1;
  for (const std::int32_t degree : degrees) parts *= degree;
  std::vector<Points> shards;
  std::vector<std::int64_t> at(rank, 0);
  for (std::int64_t shard = 0; shard < parts; ++shard) {
    Points points;
    std::int32_t summand = 0;
    for (std::size_t dim = 0; dim < rank; ++dim) {
      const std::int64_t step = leader.sizes[dim] / degrees[dim];
      points.push_back(at[dim] * step);
      points.push_back((at[dim] + 1) * step);
      if (leader.is_summed[dim] && degrees[dim] > 1) {
        summand = summand * degrees[dim] + static_cast<std::int32_t>(at[dim]);
      }
    }
    shards.push_back(std::move(points));
    summands->push_back(summand);
    for (std::size_t dim = rank; dim-- > 0;) {
      if (++at[dim] < degrees[dim]) break;
      at[dim] = 0;
    }
  }
  return shards;
}

double Fraction(const NodeData& node, const Points& points) {
  double own = 1;
  double all = 1;
  for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
    own *= static_cast<double>(points[2 * dim + 1] - points[2 * dim]);
    all *= static_cast<double>(node.sizes[dim]);
  }
  return own / all;
}

// Seconds by a curve, as cost/fit.py has them.
double CurveSeconds(const TimeCurve& curve, const std::vector<std::int64_t>& shape, double flops, std::int64_t bytes) {
  const auto found = std::lower_bound(curve.shapes.begin(), curve.shapes.end(), shape);
  if (found != curve.shapes.end() && *found == shape) return curve.seconds[found - curve.shapes.begin()];
  return curve.base_s + curve.s_per_flop * flops + curve.s_per_byte * static_cast<double>(bytes);
}

void AppendShape(const BoxBounds& box, std::vector<std::int64_t>* shape) {
  shape->push_back(static_cast<std::int64_t>(box.size() / 2));
  for (std::size_t i = 0; i < box.size(); i += 2) shape->push_back(box[i + 1] - box[i]);
}

// Seconds of one node's shard, as cost/work.py, cost/analytic.py and cost/measured.py have them.
double ComputeSeconds(const Problem& problem, const NodeData& node, const Points& points, std::int32_t kind,
                      bool backward) {
  const MachineData& machine = problem.machine;
  if (backward ? !node.has_backward || node.is_free_backward : node.is_free_forward) return 0;
  std::int64_t bytes = 0;
  std::vector<std::int64_t> shape;
  std::int64_t pointed_at = 1;
  for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
    if (!node.is_gathered[dim]) pointed_at *= points[2 * dim + 1] - points[2 * dim];
  }
  int gradients = 0;
  for (const Access& operand : node.operands) {
    const auto box = Read(node, operand, points);
    const std::int64_t count = box ? Volume(*box) : 0;
    if (box) {
      AppendShape(*box, &shape);
    } else {
      shape.push_back(-1);
    }
    bytes += (operand.is_gathered ? std::min(count, pointed_at) : count) * operand.item_bytes;
    if (backward && operand.wants_gradient) {
      bytes += count * operand.item_bytes;
      ++gradients;
    }
  }
  for (const Access& output : node.outputs) {
    const BoxBounds box = WrittenBox(output, points);
    bytes += Volume(box) * output.item_bytes;
    AppendShape(box, &shape);
  }
  double flops = node.flops * Fraction(node, points);
  if (backward) flops = flops * gradients;
  const std::vector<std::int32_t>& curves = backward ? node.backward_curve : node.forward_curve;
  if (!curves.empty() && curves[kind] >= 0) return CurveSeconds(problem.curves[curves[kind]], shape, flops, bytes);
  const double arithmetic = flops / node.flops_per_s[kind];
  const double traffic = static_cast<double>(bytes) / machine.memory_bytes_per_s[kind];
  const int launches = backward ? std::min(gradients, kBackwardLaunches) : 1;
  return std::max({launches * machine.launch_s[kind], arithmetic, traffic});
}

// Whether a shard reads of the block's own values only what it wrote itself.
bool IsAtHand(const BlockData& block, const NodeData& node, const Points& own,
              const std::vector<std::vector<Points>>& points, std::int32_t shard) {
  for (const Access& operand : node.operands) {
    if (operand.inner_node < 0) continue;
    const auto read = Read(node, operand, own);
    if (!read) continue;
    const Access& output = block.nodes[operand.inner_node].outputs[operand.inner_output];
    if (Intersection(WrittenBox(output, points[operand.inner_node][shard]), *read) != *read) return false;
  }
  return true;
}

Rows RowsOf(const std::vector<std::vector<std::int32_t>>& lists) {
  Rows rows;
  for (const std::vector<std::int32_t>& list : lists) rows.Append(list);
  return rows;
}

// Shards put together by what they have in common, in the order of the first of each.
template <typename Key>
Rows Together(const std::vector<Key>& keys) {
  std::vector<std::vector<std::int32_t>> lists;
  std::map<Key, std::size_t> known;
  for (std::size_t shard = 0; shard < keys.size(); ++shard) {
    const auto [found, is_new] = known.try_emplace(keys[shard], lists.size());
    if (is_new) lists.emplace_back();
    lists[found->second].push_back(static_cast<std::int32_t>(shard));
  }
  return RowsOf(lists);
}

// The classes of a seam; see SeamData.
Rows ClassesOf(const SeamData& seam, const Alike& behind) {
  if (behind.items.size() != static_cast<std::size_t>(behind.count())) return {};
  Rows classes = Together(seam.boxes);
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

// The boxes that shards write, found by the cell of the grid that each fills.
Written Gridded(Port port, const std::vector<BoxBounds>& boxes, const std::vector<std::int64_t>& shape,
                const std::vector<std::int32_t>& summands) {
  Written written;
  std::map<std::pair<std::int32_t, BoxBounds>, std::vector<std::int32_t>> held;
  for (std::size_t shard = 0; shard < boxes.size(); ++shard) {
    const std::int32_t summand = summands.empty() ? 0 : summands[shard];
    held[{summand, boxes[shard]}].push_back(static_cast<std::int32_t>(shard));
  }
  std::int64_t count = 1;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    written.steps.push_back(boxes[0][2 * axis + 1] - boxes[0][2 * axis]);
    written.counts.push_back(shape[axis] / written.steps[axis]);
    count *= written.counts[axis];
  }
  std::vector<std::vector<std::int32_t>> cells(count);
  for (const auto& [key, shards] : held) {
    std::int64_t cell = 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      cell = cell * written.counts[axis] + key.second[2 * axis] / written.steps[axis];
    }
    cells[cell].push_back(static_cast<std::int32_t>(written.box.size()));
    written.summand.push_back(key.first);
    written.box.push_back(port.boxes[shards[0]]);
    written.shards.Append(shards);
  }
  written.cells = RowsOf(cells);
  written.port = std::move(port);
  return written;
}

struct Part {
  std::size_t node;
  double share;
};

}  // namespace

std::int64_t Volume(const BoxBounds& box) {
  std::int64_t volume = 1;
  for (std::size_t i = 0; i < box.size(); i += 2) volume *= std::max<std::int64_t>(0, box[i + 1] - box[i]);
  return volume;
}

std::optional<BoxBounds> Intersection(const BoxBounds& a, const BoxBounds& b) {
  BoxBounds both(a.size());
  for (std::size_t i = 0; i < a.size(); i += 2) {
    both[i] = std::max(a[i], b[i]);
    both[i + 1] = std::min(a[i + 1], b[i + 1]);
    if (both[i + 1] <= both[i]) return std::nullopt;
  }
  return both;
}

std::vector<BoxBounds> CutAtBorders(const std::vector<BoxBounds>& boxes) {
  bool is_apart = true;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) is_apart = is_apart && !Intersection(boxes[i], boxes[j]);
  }
  if (is_apart) return boxes;
  std::vector<BoxBounds> atoms = {{}};
  for (std::size_t axis = 0; axis < boxes[0].size() / 2; ++axis) {
    std::set<std::int64_t> borders;
    for (const BoxBounds& box : boxes) borders.insert({box[2 * axis], box[2 * axis + 1]});
    std::vector<BoxBounds> longer;
    for (const BoxBounds& atom : atoms) {
      for (auto border = borders.begin(); std::next(border) != borders.end(); ++border) {
        longer.push_back(atom);
        longer.back().insert(longer.back().end(), {*border, *std::next(border)});
      }
    }
    atoms = std::move(longer);
  }
  std::erase_if(atoms, [&](const BoxBounds& atom) {
    return std::none_of(boxes.begin(), boxes.end(),
                        [&](const BoxBounds& box) { return Intersection(box, atom) == atom; });
  });
  return atoms;
}

bool ReadsAll(const NodeData& node, const Access& operand) {
  const auto box = Read(node, operand, WholePoints(node));
  if (!box) return false;
  for (std::size_t i = 0; i < operand.shape.size(); ++i) {
    if ((*box)[2 * i] != 0 || (*box)[2 * i + 1] != operand.shape[i]) return false;
    // Steps must not be longer than what the dims with shorter steps cover, or elements are left out.
    const Axis& axis = operand.axes[i];
    if (axis.divisor != 1) return false;
    std::vector<std::pair<std::int64_t, std::int64_t>> steps;
    for (std::size_t t = 0; t < axis.dims.size(); ++t) {
      steps.emplace_back(std::abs(axis.strides[t]), node.sizes[axis.dims[t]]);
    }
    std::sort(steps.begin(), steps.end());
    std::int64_t covered = 1;
    for (const auto& [step, size] : steps) {
      if (step > covered) return false;
      covered += step * (size - 1);
    }
  }
  return true;
}

BoxTables::BoxTables(const Problem& problem) {
  for (const ValueData& value : problem.values) values.emplace_back(value.rank);
  for (const WeightData& weight : problem.weights) weights.emplace_back(weight.rank);
}

std::optional<Layout> MakeLayout(const Problem& problem, BoxTables* tables, std::int32_t block,
                                 const std::vector<std::int32_t>& degrees) {
  const BlockData& data = problem.blocks[block];
  Layout layout;
  layout.degrees = degrees;
  layout.sample_dim = data.sample_dim;
  std::vector<std::vector<Points>> points;  // by node, by shard
  points.push_back(LeaderShards(data.nodes[0], degrees, &layout.summands));
  layout.parts = static_cast<std::int32_t>(points[0].size());
  for (std::size_t n = 1; n < data.nodes.size(); ++n) {
    const NodeData& node = data.nodes[n];
    const Access& carried = node.operands[node.carried];
    const Access& source = data.nodes[carried.inner_node].outputs[carried.inner_output];
    std::vector<Points> row;
    for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
      auto followed = Followed(node, WrittenBox(source, points[carried.inner_node][shard]));
      if (!followed || !IsAtHand(data, node, *followed, points, shard)) return std::nullopt;
      row.push_back(std::move(*followed));
    }
    points.push_back(std::move(row));
  }
  for (const std::vector<Points>& row : points) layout.alike.push_back(Together(row));
  const bool sums_split =
      std::any_of(layout.summands.begin(), layout.summands.end(), [](std::int32_t s) { return s != 0; });
  layout.is_partial = sums_split && (data.nodes.size() == 1 || data.passes_sums);

  // Segments: the twin of tasks/segments.py.
  std::vector<std::vector<Part>> parts(1);
  std::vector<std::int32_t> reads_in;
  std::vector<std::int32_t> writes_in;
  for (std::size_t n = 0; n < data.nodes.size(); ++n) {
    const NodeData& node = data.nodes[n];
    reads_in.push_back(static_cast<std::int32_t>(parts.size()) - 1);
    bool splits_statistics = false;
    for (std::size_t dim = 0; dim < node.sizes.size() && node.synchronises; ++dim) {
      if (!node.is_shared[dim]) continue;
      for (const Points& shard : points[n]) {
        if (shard[2 * dim] != 0 || shard[2 * dim + 1] != node.sizes[dim]) splits_statistics = true;
      }
    }
    if (splits_statistics) {
      SeamData seam;
      seam.segment = static_cast<std::int32_t>(parts.size()) - 1;
      seam.item_bytes = kStatisticsItemBytes;
      seam.is_mutual = true;
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        BoxBounds box;
        for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
          if (node.is_shared[dim]) continue;
          box.push_back(points[n][shard][2 * dim]);
          box.push_back(points[n][shard][2 * dim + 1]);
        }
        box.push_back(0);
        box.push_back(kStatisticsNumbers);
        seam.boxes.push_back(std::move(box));
      }
      seam.alike = static_cast<std::int32_t>(n);
      for (std::int32_t i = 0; i < layout.alike[n].count(); ++i) seam.summands.push_back(i);
      seam.classes = ClassesOf(seam, layout.alike[n]);
      layout.seams.push_back(std::move(seam));
      parts.back().push_back({n, kStatisticsShare});
      parts.push_back({{n, 1 - kStatisticsShare}});
    } else {
      parts.back().push_back({n, 1.0});
    }
    writes_in.push_back(static_cast<std::int32_t>(parts.size()) - 1);
    if (n == 0 && sums_split && !layout.is_partial) {
      for (const Access& output : node.outputs) {
        SeamData seam;
        seam.segment = static_cast<std::int32_t>(parts.size()) - 1;
        seam.item_bytes = output.item_bytes;
        for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
          seam.boxes.push_back(WrittenBox(output, points[0][shard]));
        }
        seam.summands = layout.summands;
        seam.classes = ClassesOf(seam, layout.alike[0]);
        layout.seams.push_back(std::move(seam));
      }
      parts.emplace_back();
      writes_in[0] = static_cast<std::int32_t>(parts.size()) - 1;
    }
  }
  layout.segments = static_cast<std::int32_t>(parts.size());

  layout.kept_bytes.assign(layout.parts, 0);
  for (std::size_t n = 0; n < data.nodes.size(); ++n) {
    const NodeData& node = data.nodes[n];
    for (const Access& output : node.outputs) {
      for (std::int32_t shard = 0; output.is_kept && shard < layout.parts; ++shard) {
        layout.kept_bytes[shard] += Volume(WrittenBox(output, points[n][shard])) * output.item_bytes;
      }
    }
    for (const Access& operand : node.operands) {
      if (operand.value < 0 && operand.weight < 0) continue;
      Port port;
      port.subject = operand.value >= 0 ? operand.value : operand.weight;
      port.segment = reads_in[n];
      port.alike = static_cast<std::int32_t>(n);
      port.gives_gradient = node.writes_gradient;
      port.is_kept = operand.is_kept;
      BoxTable& table = operand.value >= 0 ? tables->values[operand.value] : tables->weights[operand.weight];
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        const auto box = Read(node, operand, points[n][shard]);
        port.boxes.push_back(box ? table.Number(*box) : BoxTable::kNone);
      }
      (operand.value >= 0 ? layout.read : layout.weights).push_back(std::move(port));
    }
    for (const Access& output : node.outputs) {
      if (output.value < 0) continue;
      Port port;
      port.subject = output.value;
      port.segment = writes_in[n];
      port.alike = static_cast<std::int32_t>(n);
      std::vector<BoxBounds> boxes;
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        boxes.push_back(WrittenBox(output, points[n][shard]));
        port.boxes.push_back(tables->values[output.value].Number(boxes.back()));
      }
      layout.written.push_back(Gridded(std::move(port), boxes, output.shape,
                                       layout.is_partial ? layout.summands : std::vector<std::int32_t>()));
    }
  }

  const auto kinds = static_cast<std::int32_t>(problem.machine.launch_s.size());
  layout.forward_s.assign(static_cast<std::size_t>(kinds) * layout.segments * layout.parts, 0);
  layout.backward_s = layout.forward_s;
  std::size_t at = 0;
  for (std::int32_t kind = 0; kind < kinds; ++kind) {
    for (const std::vector<Part>& segment : parts) {
      for (std::int32_t shard = 0; shard < layout.parts; ++shard, ++at) {
        for (const Part& part : segment) {
          const NodeData& node = data.nodes[part.node];
          const Points& own = points[part.node][shard];
          layout.forward_s[at] += part.share * ComputeSeconds(problem, node, own, kind, false);
          if (node.has_backward) {
            layout.backward_s[at] += part.share * ComputeSeconds(problem, node, own, kind, true);
          }
        }
      }
    }
  }
  layout.work_fs.assign(static_cast<std::size_t>(kinds) * layout.parts, 0);
  at = 0;
  for (std::int32_t kind = 0; kind < kinds; ++kind) {
    for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
      for (std::int32_t shard = 0; shard < layout.parts; ++shard, ++at) {
        layout.work_fs[kind * layout.parts + shard] += Femtoseconds(layout.forward_s[at]);
        if (data.needs_backward) layout.work_fs[kind * layout.parts + shard] += Femtoseconds(layout.backward_s[at]);
      }
    }
  }
  return layout;
}

}  // namespace soapstone

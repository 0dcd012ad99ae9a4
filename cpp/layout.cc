#include "layout.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "access.h"

namespace soapstone {

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
  std::vector<std::int64_t> points;
  for (const std::int64_t size : node.sizes) points.insert(points.end(), {0, size});
  BoxBounds box(2 * operand.axes.size());
  if (!ReadInto(node, operand, points, box)) return false;
  for (std::size_t i = 0; i < operand.shape.size(); ++i) {
    if (box[2 * i] != 0 || box[2 * i + 1] != operand.shape[i]) return false;
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

}  // namespace soapstone

#include "access.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

namespace soapstone {
namespace {

std::int64_t FloorDiv(std::int64_t a, std::int64_t b) {
  if (b == 1) return a;
  const std::int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

// The interval that an axis takes over an iteration box.
std::pair<std::int64_t, std::int64_t> Image(const Axis& axis, std::span<const std::int64_t> points) {
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

}  // namespace

void WriteInto(const Access& output, std::span<const std::int64_t> points, std::span<std::int64_t> box) {
  for (std::size_t i = 0; i < output.axes.size(); ++i) {
    std::tie(box[2 * i], box[2 * i + 1]) = Image(output.axes[i], points);
  }
}

bool ReadInto(const NodeData& node, const Access& operand, std::span<const std::int64_t> points,
              std::span<std::int64_t> box) {
  if (!operand.is_present) return false;
  for (std::size_t dim = 0; operand.is_finishing && dim < node.sizes.size(); ++dim) {
    if (node.is_summed[dim] && points[2 * dim] != 0) return false;
  }
  for (std::size_t i = 0; i < operand.axes.size(); ++i) {
    const auto [lo, hi] = Image(operand.axes[i], points);
    box[2 * i] = std::min(std::max<std::int64_t>(lo, 0), operand.shape[i]);
    box[2 * i + 1] = std::max<std::int64_t>(std::min(hi, operand.shape[i]), 0);
    if (box[2 * i + 1] <= box[2 * i]) return false;
  }
  return true;
}

bool FollowInto(const NodeData& node, std::span<const std::int64_t> box, std::span<std::int64_t> points) {
  for (std::size_t dim = 0; dim < node.sizes.size(); ++dim) {
    points[2 * dim] = 0;
    points[2 * dim + 1] = node.sizes[dim];
  }
  const Access& operand = node.operands[node.carried];
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
      if (lo / stride != (hi - 1) / stride) return false;
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
      if (inner != node.sizes[dims[i + 1]] && outer != 1) return false;
    }
  }
  return true;
}

}  // namespace soapstone

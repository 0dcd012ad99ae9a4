#include "moves.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

namespace soapstone {
namespace {

constexpr std::int32_t kMostInRun = 6;     // neighbours moved together
constexpr std::size_t kMostTogether = 64;  // blocks moved together

// What two blocks of the same shape have in common: dims, and the tensors that they read and write.
std::vector<std::int64_t> ShapeOf(const BlockData& block) {
  std::vector<std::int64_t> shape{block.needs_backward};
  for (const NodeData& node : block.nodes) {
    shape.push_back(-1);
    shape.insert(shape.end(), node.sizes.begin(), node.sizes.end());
    shape.insert(shape.end(), node.is_splittable.begin(), node.is_splittable.end());
    shape.push_back(static_cast<std::int64_t>(node.flops));
    for (const std::vector<Access>* accesses : {&node.operands, &node.outputs}) {
      for (const Access& access : *accesses) {
        shape.push_back(-2);
        shape.push_back(access.weight >= 0);
        shape.insert(shape.end(), access.shape.begin(), access.shape.end());
      }
    }
  }
  return shape;
}

std::vector<std::int32_t> Sorted(const std::set<std::int32_t>& numbers) { return {numbers.begin(), numbers.end()}; }

}  // namespace

Moves::Moves(const Problem* problem, Space* space, MoveKind kind)
    : problem_(problem), space_(space), kind_(kind), deck_(problem->machine.device_count) {
  std::iota(deck_.begin(), deck_.end(), 0);
  if (kind != MoveKind::kStructured) return;
  const std::int32_t devices = problem->machine.device_count;
  for (std::int32_t d = 1; d <= devices; ++d) {
    if (devices % d == 0) divisors_.push_back(d);
  }
  const std::size_t count = problem->blocks.size();
  std::vector<std::int32_t> writer(problem->values.size(), -1);
  std::vector<std::set<std::int32_t>> users(problem->weights.size());
  std::map<std::vector<std::int64_t>, Blocks> of_shape;
  std::vector<const Blocks*> same(count);
  for (std::size_t b = 0; b < count; ++b) {
    Blocks& blocks = of_shape[ShapeOf(problem->blocks[b])];
    blocks.push_back(static_cast<std::int32_t>(b));
    same[b] = &blocks;
    for (const NodeData& node : problem->blocks[b].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value >= 0) writer[output.value] = static_cast<std::int32_t>(b);
      }
      for (const Access& operand : node.operands) {
        if (operand.weight >= 0) users[operand.weight].insert(static_cast<std::int32_t>(b));
      }
    }
  }
  std::vector<std::set<std::int32_t>> neighbours(count);
  std::vector<std::set<std::int32_t>> readers(count);
  std::vector<std::set<std::int32_t>> sharers(count);
  for (std::size_t b = 0; b < count; ++b) {
    const auto block = static_cast<std::int32_t>(b);
    for (const NodeData& node : problem->blocks[b].nodes) {
      for (const Access& operand : node.operands) {
        if (operand.value >= 0 && writer[operand.value] != block) {
          neighbours[b].insert(writer[operand.value]);
          neighbours[writer[operand.value]].insert(block);
          readers[writer[operand.value]].insert(block);
        }
        if (operand.weight >= 0) sharers[b].insert(users[operand.weight].begin(), users[operand.weight].end());
      }
    }
  }
  for (std::size_t b = 0; b < count; ++b) {
    neighbours_.push_back(Sorted(neighbours[b]));
    readers_.push_back(Sorted(readers[b]));
    alike_.push_back(*same[b]);
    Blocks layer;
    for (const std::int32_t other : alike_[b]) {
      if (other == static_cast<std::int32_t>(b) || sharers[b].contains(other)) layer.push_back(other);
    }
    layer_.push_back(std::move(layer));
  }
}

void Moves::DrawPlacement(std::int32_t block, Random* random, Placement* placement) {
  placement->layout = space_->Draw(block, random);
  placement->copies = 1;
  DrawDevices(placement->layout->parts, random, &placement->devices);
}

// Any devices, in any order; or any that follow each other.
void Moves::DrawDevices(std::int32_t parts, Random* random, std::vector<std::int32_t>* devices) {
  devices->resize(parts);
  if (kind_ == MoveKind::kRanges) {
    const auto count = static_cast<std::int32_t>(deck_.size());
    std::iota(devices->begin(), devices->end(), random->Below(count - parts + 1));
    return;
  }
  for (std::int32_t i = 0; i < parts; ++i) {
    std::swap(deck_[i], deck_[i + random->Below(deck_.size() - i)]);
    (*devices)[i] = deck_[i];
  }
}

const std::vector<Change>& Moves::Draw(const Simulator& current, Random* random) {
  while (!changes_.empty()) {
    spare_.push_back(std::move(changes_.back()));
    changes_.pop_back();
  }
  const std::int32_t block = random->Below(problem_->blocks.size());
  if (kind_ == MoveKind::kStructured) DrawStructured(current, block, random);
  if (!changes_.empty()) return changes_;
  DrawPlacement(block, random, &AddChange(block)->placement);
  return changes_;
}

// A change whose placement is to be filled in.
Change* Moves::AddChange(std::int32_t block) {
  if (spare_.empty()) {
    changes_.emplace_back();
  } else {
    changes_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  changes_.back().block = block;
  return &changes_.back();
}

void Moves::Add(std::int32_t block, const Layout* layout, const std::vector<std::int32_t>& devices) {
  Placement& placement = AddChange(block)->placement;
  placement.layout = layout;
  placement.copies = 1;
  placement.devices.assign(devices.begin(), devices.end());
}

// May draw nothing, which leaves the draw to the paper's rule.
void Moves::DrawStructured(const Simulator& current, std::int32_t block, Random* random) {
  const Blocks& layer = layer_[block];
  const Blocks& alike = alike_[block];
  switch (random->Below(8)) {
    case 0:
      return;
    case 1:
      return SwapDevices(current, random->Below(2) == 0 ? layer : Blocks{block}, random);
    case 2:
    case 3:
      return PlaceAlike(current, layer, random);
    case 4:
      return PlaceAlike(current, alike.size() <= kMostTogether ? alike : layer, random);
    case 5:
      return PlaceRun(current, block, random);
    default:
      break;
  }
  const Layout* layout = DrawLayout(current, block, random);
  DrawNearDevices(current, block, layout->parts, random);
  Add(block, layout, near_);
}

const Layout* Moves::DrawLayout(const Simulator& current, std::int32_t block, Random* random) {
  const std::int32_t choice = random->Below(4);
  const Layout* today = current.placement(block).layout;
  // What was placed by hand may have more parts than there are devices.
  if (choice == 0 && today->parts <= static_cast<std::int32_t>(deck_.size())) return today;
  if (choice == 1) return space_->Draw(block, random);
  const std::int32_t parts = divisors_[random->Below(divisors_.size())];
  const Layout* layout = space_->DrawParts(block, parts, random);
  return layout != nullptr ? layout : space_->Draw(block, random);
}

// Devices that lie together, evenly apart, where a neighbour is, or anywhere; in `near_`.
void Moves::DrawNearDevices(const Simulator& current, std::int32_t block, std::int32_t parts, Random* random) {
  const auto count = static_cast<std::int32_t>(deck_.size());
  near_.resize(parts);
  switch (random->Below(8)) {
    case 0:
      return DrawDevices(parts, random, &near_);
    case 1: {
      const std::int32_t stride = count / parts;
      const std::int32_t first = random->Below(count - stride * (parts - 1));
      for (std::int32_t i = 0; i < parts; ++i) near_[i] = first + stride * i;
      return;
    }
    case 2:
    case 3:
    case 4: {
      if (neighbours_[block].empty()) break;
      const Blocks& neighbours = neighbours_[block];
      const std::vector<std::int32_t>& there =
          current.placement(neighbours[random->Below(neighbours.size())]).devices;
      const auto used = static_cast<std::int32_t>(there.size());
      if (used < parts) break;
      const std::int32_t stride = used / parts;
      const std::int32_t first = random->Below(stride);
      for (std::int32_t i = 0; i < parts; ++i) near_[i] = there[first + stride * i];
      return;
    }
    default:
      break;
  }
  const std::int32_t first = random->Below(count / parts) * parts;
  std::iota(near_.begin(), near_.end(), first);
}

// Exchanges two devices, wherever some blocks use them.
void Moves::SwapDevices(const Simulator& current, const Blocks& blocks, Random* random) {
  const std::vector<std::int32_t>& devices = current.placement(blocks[random->Below(blocks.size())]).devices;
  const std::int32_t a = devices[random->Below(devices.size())];
  const std::int32_t b = random->Below(deck_.size());
  if (a == b) return;
  for (const std::int32_t block : blocks) {
    const Placement& placement = current.placement(block);
    near_.assign(placement.devices.begin(), placement.devices.end());
    for (std::int32_t& device : near_) device = device == a ? b : device == b ? a : device;
    if (placement.copies == 1 && near_ != placement.devices) Add(block, placement.layout, near_);
  }
}

// Gives blocks of the same shape the same layout, on the same devices or on those they have.
void Moves::PlaceAlike(const Simulator& current, const Blocks& blocks, Random* random) {
  const std::int32_t first = blocks[random->Below(blocks.size())];
  const Layout* layout = DrawLayout(current, first, random);
  DrawNearDevices(current, first, layout->parts, random);
  const bool keeps_devices = random->Below(4) == 0;
  for (const std::int32_t block : blocks) {
    const Layout* own = space_->Find(block, layout->degrees);
    if (own == nullptr) continue;
    const Placement& placement = current.placement(block);
    const bool stays = keeps_devices && placement.copies == 1 && placement.layout->parts == own->parts;
    Add(block, own, stays ? placement.devices : near_);
  }
}

// Gives a few blocks that follow each other the same devices.
void Moves::PlaceRun(const Simulator& current, std::int32_t block, Random* random) {
  const Layout* layout = DrawLayout(current, block, random);
  DrawNearDevices(current, block, layout->parts, random);
  const std::vector<std::int32_t> devices = near_;
  Add(block, layout, devices);
  const std::int32_t length = 1 + random->Below(kMostInRun);
  for (std::int32_t i = 0; i < length && !readers_[block].empty(); ++i) {
    block = readers_[block][random->Below(readers_[block].size())];
    const Placement& placement = current.placement(block);
    layout = placement.layout->parts == static_cast<std::int32_t>(devices.size()) && random->Below(2) == 0
                 ? placement.layout
                 : space_->DrawParts(block, static_cast<std::int32_t>(devices.size()), random);
    if (layout == nullptr) return;
    Add(block, layout, devices);
  }
}

}  // namespace soapstone

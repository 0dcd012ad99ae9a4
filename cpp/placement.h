// A block's decision: a layout, copies, and the device of every copy of every shard.
//
// Thread safety: plain data and pure functions.

#ifndef SOAPSTONE_CPP_PLACEMENT_H_
#define SOAPSTONE_CPP_PLACEMENT_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "layout.h"

namespace soapstone {

struct Placement {
  const Layout* layout = nullptr;
  std::int32_t copies = 1;
  std::vector<std::int32_t> devices;  // [shard * copies + copy]
  std::int32_t lanes = 1;             // micro-batches, which the same devices compute one after the other
  // How many micro-batches may be ahead of their backward pass; 0 for all of them, none of which is then taken
  // back before the last is there. The twin of src/soapstone/strategy/pipeline.py.
  std::int32_t in_flight = 0;

  // How far apart the shards are that compute the same of two micro-batches, one after the other.
  std::int32_t LaneStep() const {
    std::int32_t step = layout->degrees[layout->sample_dim] / lanes;
    for (std::size_t dim = layout->sample_dim + 1; dim < layout->degrees.size(); ++dim) step *= layout->degrees[dim];
    return step;
  }

  // The micro-batch of a shard.
  std::int32_t LaneOf(std::int32_t shard) const { return lanes == 1 ? 0 : shard / LaneStep() % lanes; }
};

// Calls visit(place of the task, place of the one it waits for, whether it is the forward task that waits) for
// what the order of micro-batches adds: a forward task waits for a backward task, or the other way round.
template <typename Visit>
void ForEachTurn(const Placement& placement, const Visit& visit) {
  if (placement.lanes == 1) return;
  const std::int32_t step = placement.LaneStep() * placement.copies;
  for (std::int32_t pc = 0; pc < static_cast<std::int32_t>(placement.devices.size()); ++pc) {
    const std::int32_t lane = placement.LaneOf(pc / placement.copies);
    if (placement.in_flight == 0) {
      if (lane + 1 < placement.lanes) visit(pc, pc + (placement.lanes - 1 - lane) * step, false);
    } else if (lane >= placement.in_flight) {
      visit(pc, pc - placement.in_flight * step, true);
    }
  }
}

// A block placed anew.
struct Change {
  std::int32_t block = 0;
  Placement placement;
};

// Calls visit(place in the placement's devices) for the copies of some shards on one device.
template <typename Visit>
void ForEachOn(const Placement& placement, std::span<const std::int32_t> shards, std::int32_t device,
               const Visit& visit) {
  for (const std::int32_t shard : shards) {
    for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
      const std::int32_t pc = shard * placement.copies + copy;
      if (placement.devices[pc] == device) visit(pc);
    }
  }
}

// Adds a row: where the copies of some shards run, each device once.
inline void AppendDevices(const Placement& placement, std::span<const std::int32_t> shards, Rows* rows) {
  const auto begin = static_cast<std::ptrdiff_t>(rows->items.size());
  for (const std::int32_t shard : shards) {
    for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
      const std::int32_t device = placement.devices[shard * placement.copies + copy];
      if (std::find(rows->items.begin() + begin, rows->items.end(), device) == rows->items.end()) {
        rows->items.push_back(device);
      }
    }
  }
  rows->begin.push_back(static_cast<std::int32_t>(rows->items.size()));
}

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PLACEMENT_H_

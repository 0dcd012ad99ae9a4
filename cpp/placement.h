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
};

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

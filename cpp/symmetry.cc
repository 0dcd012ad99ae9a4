#include "symmetry.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace soapstone {
namespace {

// Whether going up from a to b to c and around to a is still going up after the relabelling.
bool KeepsCycle(const std::vector<std::int32_t>& to, std::int32_t a, std::int32_t b, std::int32_t c) {
  return (to[a] < to[b]) + (to[b] < to[c]) + (to[c] < to[a]) == 2;
}

bool Preserves(const MachineData& machine, const std::vector<std::int32_t>& to) {
  const std::int32_t count = machine.device_count;
  std::map<std::int32_t, std::int32_t> link_to;
  std::map<std::int32_t, std::int32_t> link_from;
  for (std::int32_t a = 0; a < count; ++a) {
    if (machine.kind[a] != machine.kind[to[a]]) return false;
    for (std::int32_t b = 0; b < count; ++b) {
      if (a == b) continue;
      const std::int32_t old = a * count + b;
      const std::int32_t now = to[a] * count + to[b];
      if (machine.bandwidth[old] != machine.bandwidth[now]) return false;
      if (machine.latency[old] != machine.latency[now]) return false;
      if (link_to.try_emplace(machine.link[old], machine.link[now]).first->second != machine.link[now]) return false;
      if (link_from.try_emplace(machine.link[now], machine.link[old]).first->second != machine.link[old]) return false;
    }
  }
  for (std::int32_t a = 0; a < count; ++a) {
    for (std::int32_t b = a + 1; b < count; ++b) {
      for (std::int32_t c = b + 1; c < count; ++c) {
        if (!KeepsCycle(to, a, b, c)) return false;
      }
    }
  }
  return true;
}

}  // namespace

Symmetry::Symmetry(const MachineData& machine, DeviceLists lists) {
  std::vector<std::int32_t> to(machine.device_count);
  std::iota(to.begin(), to.end(), 0);
  do {
    if (Preserves(machine, to)) relabellings_.push_back(to);
  } while (lists == DeviceLists::kAny && machine.device_count <= kMostDevices &&
           std::next_permutation(to.begin(), to.end()));
}

std::vector<std::int32_t> Symmetry::Fixing(std::span<const std::int32_t> subset,
                                           std::span<const std::int32_t> devices) const {
  std::vector<std::int32_t> found;
  for (const std::int32_t each : subset) {
    const std::vector<std::int32_t>& to = relabellings_[each];
    if (std::all_of(devices.begin(), devices.end(), [&](std::int32_t device) { return to[device] == device; })) {
      found.push_back(each);
    }
  }
  return found;
}

bool Symmetry::IsLeast(std::span<const std::int32_t> subset, std::span<const std::int32_t> devices) const {
  return std::none_of(subset.begin(), subset.end(), [&](std::int32_t each) {
    const std::vector<std::int32_t>& to = relabellings_[each];
    const auto moved =
        std::find_if(devices.begin(), devices.end(), [&](std::int32_t device) { return to[device] != device; });
    return moved != devices.end() && to[*moved] < *moved;
  });
}

}  // namespace soapstone

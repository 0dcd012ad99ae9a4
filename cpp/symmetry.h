// The relabellings of a machine's devices that leave kinds, links, bandwidths and latencies as they are, and
// the rings of collectives too: a ring runs through its devices in the order of their numbers, and around.
//
// They map strategies to strategies whose task graphs are the same but for the names of resources, the order
// of tasks, and which of several copies of a box is sent. So lower bounds that do not look at these are the
// same; simulated makespans may differ where ties are broken otherwise.
//
// Thread safety: immutable once made.

#ifndef SOAPSTONE_CPP_SYMMETRY_H_
#define SOAPSTONE_CPP_SYMMETRY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "problem.h"
#include "space.h"

namespace soapstone {

class Symmetry {
 public:
  // [choice] Beyond this many devices only the identity is looked for: there are too many permutations.
  static constexpr std::int32_t kMostDevices = 7;

  // With device lists that are ranges no relabelling but the identity leads to such lists again.
  Symmetry(const MachineData& machine, DeviceLists lists);

  // Each is the new number of every device; the first is the identity.
  const std::vector<std::vector<std::int32_t>>& relabellings() const { return relabellings_; }

  // Those among `subset` (numbers of relabellings) that leave these devices as they are.
  std::vector<std::int32_t> Fixing(std::span<const std::int32_t> subset, std::span<const std::int32_t> devices) const;

  // Whether no relabelling among `subset` makes the list of devices smaller.
  bool IsLeast(std::span<const std::int32_t> subset, std::span<const std::int32_t> devices) const;

 private:
  std::vector<std::vector<std::int32_t>> relabellings_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_SYMMETRY_H_

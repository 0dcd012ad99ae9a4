// How boxes get from the devices that have them to the devices that need them.
//
// The twin of src/soapstone/tasks/exchange.py, whose docstring states the rule.
//
// Thread safety: pure functions.

#ifndef SOAPSTONE_CPP_EXCHANGE_H_
#define SOAPSTONE_CPP_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "layout.h"
#include "problem.h"

namespace soapstone {

// A box that devices hold. Sources of different summands are added where they overlap.
struct Source {
  std::int32_t summand;
  const BoxBounds* box;
  std::span<const std::int32_t> devices;
  std::int32_t lane = 0;  // its micro-batch
};

// A box that a device needs.
struct Sink {
  const BoxBounds* box;
  std::int32_t device;
};

enum class Pattern : std::uint8_t { kTransfer, kAllGather, kReduceScatter, kAllReduce, kAllToAll };

// Elements on their way. `devices` are sender and receiver of a transfer, and the ring of a collective.
struct Move {
  Pattern pattern = Pattern::kTransfer;
  std::vector<std::int32_t> devices;
  std::int64_t elements = 0;
  std::vector<std::pair<std::int32_t, std::int32_t>> sources;  // number of the source, device that gives it
  std::vector<std::int32_t> sinks;
};

struct Exchange {
  std::vector<Move> moves;
  std::vector<std::pair<std::int32_t, std::int32_t>> local;  // number of the source, number of the sink
};

// The holder with the widest route to a device; equally wide ones take turns.
//
// REQUIRES: there is a holder.
std::int32_t Nearest(const MachineData& machine, std::span<const std::int32_t> holders, std::int32_t device,
                     std::size_t turn);

// Whether it is an all-reduce that waits for all that is to be added up.
bool IsOneSum(const Exchange& exchange, std::size_t source_count);

// How the sinks get what they need.
//
// REQUIRES: sinks are sorted by (device, box) and all different; boxes have one rank and elements.
Exchange MakeExchange(const MachineData& machine, const std::vector<Source>& sources,
                      const std::vector<Sink>& sinks);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_EXCHANGE_H_

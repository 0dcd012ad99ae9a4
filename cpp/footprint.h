// About what memory a strategy takes on each device: weights with what the optimizer remembers of them, and what
// the backward pass needs of the forward pass, all of which is there when the forward pass ends.
//
// The exact peak is that of sim/memory.py, from the timeline; this needs none, and is close to it where memory
// is short.
//
// Thread safety: a Footprint belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_FOOTPRINT_H_
#define SOAPSTONE_CPP_FOOTPRINT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "layout.h"
#include "placement.h"
#include "problem.h"
#include "simulator.h"

namespace soapstone {

class Footprint {
 public:
  // What devices have, and how many numbers are held for each weight: itself, and what the optimizer remembers.
  struct Limits {
    std::vector<std::int64_t> capacity_bytes;
    std::int64_t numbers_per_weight = 1;
  };

  // REQUIRES: problem and tables outlive the footprint. There is a capacity for each device.
  Footprint(const Problem* problem, const BoxTables* tables, Limits limits);

  // Whether some strategy might not fit.
  bool is_limited() const { return is_limited_; }

  // By device, of what stands with some blocks placed anew.
  const std::vector<std::int64_t>& Bytes(const Simulator& current, std::span<const Change> changes);

  // By how much devices hold more than they can, in all.
  std::int64_t Excess(const Simulator& current, std::span<const Change> changes);

 private:
  void CountWeights(const Placement& placement);
  void CountReceived(const Placement& placement);
  bool IsAtHand(std::int32_t value, std::int32_t box, std::int32_t device) const;
  bool IsNew(std::vector<std::uint32_t>* marks, std::int32_t box, std::int32_t device);

  const Problem* problem_;
  const BoxTables* tables_;
  Limits limits_;
  bool is_limited_ = false;
  std::int32_t devices_;
  std::vector<std::int32_t> writer_;  // by value
  std::vector<const Placement*> placements_;  // by block
  std::vector<std::int64_t> bytes_;
  std::uint32_t count_ = 0;
  std::vector<std::vector<std::uint32_t>> held_weights_;  // by weight, [box * devices + device]: the last count
  std::vector<std::vector<std::uint32_t>> held_values_;   // by value, the same
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_FOOTPRINT_H_

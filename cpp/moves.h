// Proposals: random changes of a strategy.
//
// Three ways to draw them:
//   kPaper       as FlexFlow does (section 6.2): one block, and for it any layout and any devices;
//   kRanges      the same, but devices that follow each other, as FlexFlow's own code has them;
//   kStructured  changes that have a better chance: several blocks at once where they belong together (steps of
//                one layer, which share weights; blocks of the same shape; neighbours), on devices that lie
//                together, that a neighbour uses, or that differ from today's by a swap. Every change that
//                kPaper may draw may be drawn here too, so that nothing is out of reach.
//
// Thread safety: a Moves belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_MOVES_H_
#define SOAPSTONE_CPP_MOVES_H_

#include <cstdint>
#include <vector>

#include "placement.h"
#include "problem.h"
#include "random.h"
#include "simulator.h"
#include "space.h"

namespace soapstone {

enum class MoveKind { kPaper, kRanges, kStructured };

class Moves {
 public:
  // REQUIRES: problem and space outlive the moves.
  Moves(const Problem* problem, Space* space, MoveKind kind);

  const Problem* problem() const { return problem_; }

  // Draws a placement of a block as the paper does.
  void DrawPlacement(std::int32_t block, Random* random, Placement* placement);

  // Draws a change of what stands. It is valid until the next call.
  //
  // REQUIRES: every block is placed.
  const std::vector<Change>& Draw(const Simulator& current, Random* random);

 private:
  using Blocks = std::vector<std::int32_t>;

  Change* AddChange(std::int32_t block);
  void Add(std::int32_t block, const Layout* layout, const std::vector<std::int32_t>& devices);
  void DrawDevices(std::int32_t parts, Random* random, std::vector<std::int32_t>* devices);
  void DrawStructured(const Simulator& current, std::int32_t block, Random* random);
  const Layout* DrawLayout(const Simulator& current, std::int32_t block, Random* random);
  void DrawNearDevices(const Simulator& current, std::int32_t block, std::int32_t parts, Random* random);
  void SwapDevices(const Simulator& current, const Blocks& blocks, Random* random);
  void PlaceAlike(const Simulator& current, const Blocks& blocks, Random* random);
  void PlaceRun(const Simulator& current, std::int32_t block, Random* random);

  const Problem* problem_;
  Space* space_;
  MoveKind kind_;
  std::vector<Blocks> neighbours_;     // by block: those it exchanges a value with
  std::vector<Blocks> readers_;        // by block: those that read what it writes
  std::vector<Blocks> layer_;          // by block: blocks of its shape that share a weight with it, and itself
  std::vector<Blocks> alike_;          // by block: blocks of its shape, and itself
  std::vector<std::int32_t> divisors_;  // of the number of devices
  std::vector<std::int32_t> deck_;      // devices, in the order they were last shuffled
  std::vector<std::int32_t> near_;      // devices drawn
  std::vector<Change> changes_;
  std::vector<Change> spare_;  // memory of changes drawn before
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_MOVES_H_

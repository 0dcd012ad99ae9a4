// A Markov chain of strategies: Metropolis and Hastings' rule over proposals, simulated in one of several
// ways.
//
// Thread safety: a Chain belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_CHAIN_H_
#define SOAPSTONE_CPP_CHAIN_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "footprint.h"
#include "moves.h"
#include "problem.h"
#include "random.h"
#include "simulator.h"
#include "space.h"

namespace soapstone {

// How proposals are simulated; the chain is the same with all of them.
enum class Method {
  kEngine,      // by an Engine
  kFull,        // by an Engine without rewind: the task graph is changed, and simulated whole
  kPaperDelta,  // by a PaperDelta
  kPlain,       // by a Plain
};

struct ChainOptions {
  Method method = Method::kEngine;
  MoveKind moves = MoveKind::kPaper;
  bool uses_threshold = true;  // by an Engine; the others have none
};

class Chain {
 public:
  // REQUIRES: problem outlives the chain.
  Chain(const Problem* problem, std::uint64_t seed, ChainOptions options = {});

  Space* space() { return &space_; }
  Simulator* simulator() { return simulator_.get(); }

  // Holds the chain to strategies whose footprint is within limits; one that is not may be left only for one
  // that is less so.
  void Limit(Footprint::Limits limits);

  // Places a block for good.
  //
  // REQUIRES: the layout is one of space()'s.
  void Place(std::int32_t block, const Placement& placement);

  // Places every block at random.
  void PlaceAtRandom();

  // Makes proposals, accepted with probability exp(-(increase of the makespan) / temperature_s). Returns how
  // many were accepted.
  //
  // REQUIRES: every block is placed.
  std::int64_t Step(std::int64_t proposals, double temperature_s);

  // Makes proposals that keep links less busy, accepted if the makespan stays within a limit. Returns how many
  // were. The best strategy is then the last.
  //
  // REQUIRES: every block is placed. The method keeps the links' seconds.
  std::int64_t Quieten(std::int64_t proposals, double limit_s);

  double makespan_s() { return simulator_->Makespan(); }

  // By how many bytes the footprint of what stands exceeds the limits.
  std::int64_t excess_bytes();

  // The best strategy that the chain has been at since it was last placed by hand, and how many proposals
  // that took. One that is within the limits is better than any that is not.
  double best_s() const { return best_s_; }
  const std::vector<Placement>& best() const { return best_; }
  std::int64_t best_at() const { return best_at_; }
  std::int64_t best_excess_bytes() const { return best_excess_bytes_; }
  std::int64_t proposals() const { return proposals_; }

 private:
  void KeepBest(double makespan_s, std::int64_t excess_bytes);
  void Keep(double makespan_s, std::int64_t excess_bytes);

  Space space_;
  std::unique_ptr<Simulator> simulator_;
  Moves moves_;
  std::optional<Footprint> footprint_;  // where there are limits that matter
  Random random_;
  std::int64_t proposals_ = 0;
  double best_s_ = Simulator::kNever;
  std::int64_t best_excess_bytes_ = std::numeric_limits<std::int64_t>::max();
  std::int64_t best_at_ = 0;
  std::vector<Placement> best_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_CHAIN_H_

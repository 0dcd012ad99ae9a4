// A Markov chain of strategies: Metropolis and Hastings' rule over proposals simulated by an Engine.
//
// Thread safety: a Chain belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_CHAIN_H_
#define SOAPSTONE_CPP_CHAIN_H_

#include <cstdint>
#include <vector>

#include "engine.h"
#include "problem.h"
#include "random.h"
#include "space.h"

namespace soapstone {

// How proposals are simulated; the chain is the same with all of them.
struct ChainOptions {
  bool is_plain = false;  // by PlainMakespan(), everything anew for each
  EngineOptions engine;
};

class Chain {
 public:
  // REQUIRES: problem outlives the chain.
  Chain(const Problem* problem, std::uint64_t seed, ChainOptions options = {});

  Space* space() { return &space_; }
  Engine* engine() { return &engine_; }

  // Places a block for good.
  //
  // REQUIRES: the layout is one of space()'s.
  void Place(std::int32_t block, const Placement& placement);

  // Places every block at random.
  void PlaceAtRandom();

  // Makes proposals: a block and a placement of it, both drawn uniformly, accepted with probability
  // exp(-(increase of the makespan) / temperature_s). Returns how many were accepted.
  //
  // REQUIRES: every block is placed.
  std::int64_t Step(std::int64_t proposals, double temperature_s);

  double makespan_s() { return engine_.Makespan(); }
  double best_s() const { return best_s_; }
  const std::vector<Placement>& best() const { return best_; }

 private:
  void Draw(std::int32_t block, Placement* placement);
  double PlainStep(std::int32_t block, double threshold_s);

  const Problem* problem_;
  ChainOptions options_;
  Space space_;
  Engine engine_;
  Random random_;
  std::vector<std::int32_t> deck_;  // devices, in the order they were last shuffled
  Placement drawn_;
  std::vector<Placement> strategy_;  // when plain
  double best_s_ = Engine::kNever;
  std::vector<Placement> best_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_CHAIN_H_

// The best strategy there is: depth-first search over the placements of one block after the other, leaving
// out what a lower bound shows to be no better than the best strategy known (FlexFlow 8.3).
//
// What is proved: when the search is finished, no strategy of the space (every block under any layout with at
// most as many parts as there are devices, its shards on different devices) has a simulated makespan less
// than (1 - tolerance) * best_s(). That includes strategies that differ only in the numbers of the devices:
// bounds hold for all relabellings alike (partial.h), so one of them stands for all on the way down, and
// those of a whole strategy are all simulated.
//
// Thread safety: an Exact belongs to one thread; the Problem is shared. Nothing is drawn at random.

#ifndef SOAPSTONE_CPP_EXACT_H_
#define SOAPSTONE_CPP_EXACT_H_

#include <cstdint>
#include <vector>

#include "engine.h"
#include "partial.h"
#include "problem.h"
#include "space.h"
#include "symmetry.h"

namespace soapstone {

class Exact {
 public:
  // REQUIRES: problem outlives it.
  Exact(const Problem* problem, double tolerance);

  Space* space() { return &space_; }
  const Symmetry& symmetry() const { return symmetry_; }

  // Takes a strategy as the best so far, if it is, with its relabellings.
  //
  // REQUIRES: it is one of the space: a placement for each block, with a layout of space(), in one copy, each
  // shard on a device of its own.
  void Offer(const std::vector<Placement>& strategy);

  // Looks at so many partial strategies, or fewer if that finishes the search. Returns whether it did.
  bool Step(std::int64_t count);

  // The bounds on the way down to a strategy: with none of its blocks placed, with the first of the order, and
  // so on.
  //
  // REQUIRES: as for Offer().
  std::vector<double> Bounds(const std::vector<Placement>& strategy);

  double best_s() const { return best_s_; }
  const std::vector<Placement>& best() const { return best_; }

  // No strategy is better than this; it rises while the search goes on.
  double lower_bound_s() const;

  std::int64_t bounded() const { return bounded_; }      // partial strategies for which a bound was found
  std::int64_t simulated() const { return simulated_; }  // whole strategies, relabellings included
  std::size_t block_count() const { return problem_->blocks.size(); }
  std::size_t placement_count(std::int32_t block) const { return partial_.domain(block).size(); }
  const std::vector<std::int32_t>& order() const { return order_; }
  // By depth: partial strategies that had to be looked into.
  const std::vector<std::int64_t>& entered() const { return entered_; }

 private:
  struct Child {
    double bound_s;
    std::int32_t choice;
  };
  // The placements of one block, the blocks before it in the order being placed.
  struct Frame {
    double bound_s = 0;                // of what is placed so far
    std::size_t next_choice = 0;       // to be bounded
    std::size_t next_child = 0;        // to be looked into, once all are bounded
    std::vector<Child> children;       // by bound
    std::vector<std::int32_t> fixing;  // relabellings that leave what is placed as it is
  };

  void SetOrder();
  bool IsTooHigh(double bound_s) const { return bound_s >= best_s_ * (1 - tolerance_); }
  void BoundNext(Frame* frame);
  void Enter(double bound_s);
  void Simulate(const std::vector<Placement>& strategy);

  const Problem* problem_;
  double tolerance_;
  Space space_;
  Symmetry symmetry_;
  Partial partial_;
  Engine engine_;
  std::vector<std::int32_t> order_;   // of blocks
  std::vector<std::int32_t> chosen_;  // by block
  std::vector<Frame> frames_;
  double least_left_out_s_;  // the least bound of what was left out
  double best_s_;
  std::vector<Placement> best_;
  std::int64_t bounded_ = 0;
  std::int64_t simulated_ = 0;
  std::vector<std::int64_t> entered_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_EXACT_H_

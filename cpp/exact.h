// The best strategy there is: depth-first search over the placements of one block after the other, leaving
// out what a lower bound shows to be no better than the best strategy known (FlexFlow 8.3).
//
// Wherever it stands, it first tries every placement of every block near the one just placed, and forgets
// those under which the bound is too high; then it goes on with the block that promises the smallest tree.
// When it has to turn back because nothing is left for some block, that block is tried next wherever it was
// not: often the placements in between have nothing to do with it (last conflicts, Lecoutre et al. 2009).
// What is forgotten at the root makes the bounds of unplaced blocks better, so that more is forgotten.
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
#include <string>
#include <unordered_set>
#include <vector>

#include "engine.h"
#include "partial.h"
#include "problem.h"
#include "space.h"
#include "symmetry.h"

namespace soapstone {

class Exact {
 public:
  // [choice] After so many bounds the search begins anew for the first time, knowing which blocks are decisive.
  static constexpr std::int64_t kFirstRestart = 20'000;

  // REQUIRES: problem outlives it.
  Exact(const Problem* problem, double tolerance, DeviceLists lists = DeviceLists::kAny,
        std::int64_t first_restart = kFirstRestart);

  Space* space() { return &space_; }
  const Symmetry& symmetry() const { return symmetry_; }

  // Takes a strategy as the best so far, if it is, with its relabellings.
  //
  // REQUIRES: it is one of the space: a placement for each block, with a layout of space(), in one copy, each
  // shard on a device of its own.
  void Offer(const std::vector<Placement>& strategy);

  // Looks at so many partial strategies, or fewer if that finishes the search. Returns whether it did.
  bool Step(std::int64_t count);

  // The bounds of a strategy with none of its blocks placed, with the first placed, and so on.
  //
  // REQUIRES: as for Offer(). Step() was not called.
  std::vector<double> Bounds(const std::vector<Placement>& strategy);

  // Begins anew and looks only into its share of the placements of the block that is placed first: of `parts`
  // searches that share a problem so, each with another `part`, all have to be finished. Each takes what another
  // knows: Beat() tells the makespan that a strategy must be better than to be of interest.
  //
  // REQUIRES: part < parts; all parts are given the same block.
  void Split(std::int32_t block, std::int32_t part, std::int32_t parts);
  void Beat(double makespan_s) { beat_s_ = std::min(beat_s_, makespan_s); }

  // The block to place first, and whether enough was tried to know: until then it is not worth sharing.
  std::int32_t first_block() const { return frames_.empty() ? -1 : frames_.front().branch; }
  bool has_settled() const;

  double best_s() const { return best_s_; }
  const std::vector<Placement>& best() const { return best_; }

  // No strategy is better than this; it rises while the search goes on.
  double lower_bound_s() const;

  std::int64_t bounded() const { return bounded_; }      // partial strategies for which a bound was found
  std::int64_t simulated() const { return simulated_; }  // whole strategies, relabellings included
  std::size_t block_count() const { return problem_->blocks.size(); }
  std::size_t placement_count(std::int32_t block) const { return partial_.domain(block).size(); }
  // By depth: partial strategies that had to be looked into.
  const std::vector<std::int64_t>& entered() const { return entered_; }

 private:
  struct Child {
    double bound_s;
    std::int32_t choice;
  };
  // A partial strategy. First, for the blocks near the one just placed, the placements that are no good here
  // are sorted out; then one block is placed in each of the ways that are left.
  struct Frame {
    std::int32_t placed = -1;              // the block it places, none at the root
    double bound_s = 0;
    std::vector<std::vector<Child>> left;  // by block: its placements, if it is not placed
    std::vector<std::int32_t> due;         // blocks whose placements are to be sorted out, the last one first
    std::vector<std::uint8_t> is_sorted;   // by block: whether they were sorted out here
    std::size_t at = 0;                    // the next of them
    std::size_t kept = 0;                  // how many of those before it stay
    std::int32_t branch = -1;              // the block to be placed next
    std::size_t next_child = 0;
    std::size_t reconsider_at = 1;         // the child at which the choice of the branch is looked at again
    std::vector<std::int32_t> fixing;      // relabellings that leave what is placed as it is
  };

  std::int32_t blocks() const { return static_cast<std::int32_t>(chosen_.size()); }
  double limit_s() const { return std::min(best_s_, beat_s_) * (1 - tolerance_); }
  bool IsTooHigh(double bound_s) const { return bound_s >= limit_s(); }
  void LeaveOut(double bound_s) { least_left_out_s_ = std::min(least_left_out_s_, bound_s); }
  void SortOut(Frame* frame);
  void EndBlock(Frame* frame);
  void SetDue(Frame* frame, std::int32_t block);
  bool Reconsider(Frame* frame);
  void ChooseBranch(Frame* frame);
  void Enter(Child child);
  void Leave();
  void Restart();
  void BeginAnew();
  void Simulate(const std::vector<Placement>& strategy);

  const Problem* problem_;
  double tolerance_;
  Space space_;
  Symmetry symmetry_;
  Partial partial_;
  Engine engine_;
  std::vector<std::int32_t> chosen_;  // by block
  std::vector<Frame> frames_;
  Frame root_;                   // as it was before anything was placed
  std::int64_t restart_at_;      // after so many bounds it begins anew
  std::int32_t culprit_ = -1;    // the block that had no placement left when the search last had to turn back
  std::vector<double> weight_;   // by block: how often it had to turn back because of it, or after placing it
  std::unordered_set<std::string> known_;  // keys of partial strategies that were looked into
  double least_left_out_s_;  // the least bound of what was left out
  double best_s_;
  double beat_s_;                // the best makespan known elsewhere
  std::int32_t first_ = -1;      // the block to place first, where that is given
  std::int32_t part_ = 0;
  std::int32_t parts_ = 1;
  std::vector<Placement> best_;
  std::int64_t bounded_ = 0;
  std::int64_t simulated_ = 0;
  std::vector<std::int64_t> entered_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_EXACT_H_

// A lower bound of the makespan from the longest path through the blocks, each passed by its quickest shard.
//
// It asks for no task to be built. For models that are nearly a chain it is close to the makespan, and
// drops most proposals that would make devices wait for each other's activations.
//
// Thread safety: a PathBound belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_PATH_BOUND_H_
#define SOAPSTONE_CPP_PATH_BOUND_H_

#include <cstdint>
#include <span>
#include <vector>

#include "layout.h"
#include "problem.h"
#include "tasks.h"

namespace soapstone {

class PathBound {
 public:
  // REQUIRES: problem, tables and graph outlive the bound.
  PathBound(const Problem* problem, const BoxTables* tables, const TaskGraph* graph);

  // Takes over all that is placed.
  void Reset();

  // The bound if some blocks were placed so. Stands until the next call, for Accept().
  //
  // REQUIRES: no block is named twice. The changes live until the next call.
  double Propose(std::span<const Change> changes);
  void Accept();

  double current_s() const { return current_s_; }

  // All blocks, each after those it reads from.
  std::span<const std::int32_t> order() const { return order_; }

 private:
  // A value as one of its readers waits for it.
  struct Edge {
    std::int32_t value;
    std::int32_t writer;
    std::int32_t reader;
    bool returns_gradient;  // to every shard of the writer, whatever the placements
  };

  const Placement& PlacementOf(std::int32_t block) const {
    return proposed_[block] != nullptr ? *proposed_[block] : graph_->placement(block);
  }

  // What the quickest of a reader's shards waits for a value at least; less than 0 if some shard reads none.
  double WaitOf(const Edge& edge) const;
  void SetBlock(std::int32_t block);
  double Longest();

  const Problem* problem_;
  const BoxTables* tables_;
  const TaskGraph* graph_;
  std::vector<Edge> edges_;                      // by reader
  std::vector<std::vector<std::int32_t>> into_;  // by block: edges
  std::vector<std::vector<std::int32_t>> out_of_;
  std::vector<double> bandwidth_;    // by device: of the best route to it
  std::vector<double> latency_;
  std::vector<std::int32_t> order_;  // blocks, each after those it reads from
  std::vector<double> forward_s_;   // by block: of its quickest shard
  std::vector<double> backward_s_;  // by block: the same, once the gradient of what it writes last is there
  std::vector<std::uint8_t> awaits_gradient_;
  std::vector<double> wait_s_;  // by edge
  std::vector<double> end_s_;
  double current_s_ = 0;

  // The proposal, and what it replaced, in the order of replacing.
  struct OldBlock {
    std::int32_t block;
    double forward_s;
    double backward_s;
    std::uint8_t awaits_gradient;
  };
  struct OldWait {
    std::int32_t edge;
    double wait_s;
  };
  void Restore();
  void Forget();
  std::vector<const Placement*> proposed_;  // by block; null for those that stay
  double proposed_s_ = 0;
  std::vector<OldBlock> old_blocks_;
  std::vector<OldWait> old_waits_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PATH_BOUND_H_

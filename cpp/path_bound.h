// A lower bound of the makespan from the longest path through the blocks, each passed by its quickest shard.
//
// It asks for no task to be built. For models that are nearly a chain it is close to the makespan, and
// drops most proposals that would make devices wait for each other's activations.
//
// Thread safety: a PathBound belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_PATH_BOUND_H_
#define SOAPSTONE_CPP_PATH_BOUND_H_

#include <cstdint>
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

  // The bound if a block were placed so. Stands until the next call, for Accept().
  double Propose(std::int32_t block, const Placement& placement);
  void Accept();

  double current_s() const { return current_s_; }

 private:
  // A value as one of its readers waits for it.
  struct Edge {
    std::int32_t value;
    std::int32_t writer;
    std::int32_t reader;
    bool returns_gradient;  // to every shard of the writer, whatever the placements
  };

  const Placement& PlacementOf(std::int32_t block) const {
    return block == proposed_ ? *placement_ : graph_->placement(block);
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

  // The proposal, and what it replaced.
  std::int32_t proposed_ = -1;
  const Placement* placement_ = nullptr;
  double proposed_s_ = 0;
  double old_forward_s_ = 0;
  double old_backward_s_ = 0;
  std::uint8_t old_awaits_ = 0;
  std::vector<double> old_wait_s_;
  void Restore();
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PATH_BOUND_H_

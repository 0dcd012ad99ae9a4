// What is sure to follow the last compute task of a device: the all-reduces of weights whose gradients it is part
// of, one after the other on a link, and an update.
//
// It sharpens the bound by the compute work that a device has left. Where a model's first weights are large
// (embeddings), devices are never idle but at the end, and without it a proposal would have to cost more than those
// all-reduces take to be noticed before they are simulated.
//
// A weight that all shards read whole has one all-reduce, which waits for every shard of its readers. A block is
// upstream of it if each of its shards, after all its other tasks, gives a gradient of the weight, or of a value
// whose writer is upstream: then all compute tasks of the block come before that all-reduce. The tail of a block is
// what the all-reduces that it is upstream of take on one link, or what those of one weight that is read in pieces
// take on theirs; whatever compute task of a device is its last, the tail of its block follows. And if the blocks
// with a shorter tail than some length have no more than `slack` of work on any device, a device with more than that
// left has a task of another block left, and that length follows what it has left but for the slack.
//
// Thread safety: a TailBound belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_TAIL_BOUND_H_
#define SOAPSTONE_CPP_TAIL_BOUND_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "path_bound.h"
#include "problem.h"
#include "tasks.h"

namespace soapstone {

class TailBound {
 public:
  // If a device has more than `slack_fs` of compute work left, the end comes no sooner than `tail_fs` after all of
  // it could be done.
  struct Tail {
    std::int64_t tail_fs = 0;
    std::int64_t slack_fs = 0;
  };

  // REQUIRES: problem, graph and path outlive the bound.
  TailBound(const Problem* problem, const TaskGraph* graph, const PathBound* path);

  // Takes over all that is placed, and gives its tail.
  //
  // REQUIRES: nothing of the graph is stale, and no change is under way.
  Tail Reset();

  // The tail if some blocks were placed so.
  //
  // REQUIRES: no block is named twice. Reset() was called after the last change of the graph.
  Tail Propose(std::span<const Change> changes);

 private:
  using Weights = std::uint32_t;  // a bit for each of `late_`

  struct Late {
    std::int32_t weight;
    bool is_whole;          // whether all shards read all of it
    std::int64_t hop_fs;    // of its all-reduce on the link looked at, if so; else of all
    std::int64_t update_fs; // of the shortest update
  };

  // What follows each shard's gradient of a weight that is not read whole.
  struct Own {
    Weights weight;
    std::int64_t tail_fs;
  };

  // What is known of a block: the weights that are read whole and that it is upstream of, and the longest tail of
  // another.
  struct Known {
    Weights upstream_of = 0;
    std::int64_t tail_fs = 0;
  };

  void FindLate();
  std::int64_t GateTail(const Late& late, std::int32_t gate);
  Known Passed(const Placement& placement) const;
  std::int64_t TailOf(Weights upstream_of) const;
  Tail Best(std::span<const Change> changes);

  const Problem* problem_;
  const TaskGraph* graph_;
  const PathBound* path_;
  std::vector<std::int32_t> writer_;   // by value
  std::vector<Late> late_;
  std::vector<Weights> reads_;         // by block
  std::vector<Weights> gives_;         // by block: those read whole of which every shard gives a gradient last
  std::vector<std::vector<Own>> own_;  // by block: the others

  // Memory kept between calls.
  std::vector<const Placement*> changed_;  // by block; null for those that stay
  std::vector<Known> known_;               // by block
  std::vector<std::pair<std::int64_t, std::int32_t>> by_tail_;  // tails and blocks
  std::vector<std::int64_t> work_fs_;      // by device
  std::vector<std::int64_t> link_fs_;      // by resource
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_TAIL_BOUND_H_

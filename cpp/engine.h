// Incremental simulation: when a block is placed anew, only the groups of tasks it touches are rebuilt, and
// the simulation starts again at the first moment that they can matter.
//
// Three things make a proposal cheap, none of which changes a bit of the outcome:
//   the threshold   the caller says beforehand up to what makespan a proposal is of interest; it is dropped
//                   as soon as the work that a resource has left cannot be done by then, or the longest path
//                   cannot be walked, or what is sure to follow a device's last compute task comes too late: for
//                   most proposals, before a single task is built;
//   the rewind      snapshots of the last accepted simulation, from the latest of which that no task of the
//                   changed groups precedes the simulation goes on; what tasks still wait for is worked out
//                   from the accepted timeline when it reaches them;
//   the calendar    a queue whose cost does not grow.
//
// Thread safety: an Engine belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_ENGINE_H_
#define SOAPSTONE_CPP_ENGINE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "calendar.h"
#include "path_bound.h"
#include "predecessors.h"
#include "problem.h"
#include "simulator.h"
#include "tail_bound.h"
#include "tasks.h"

namespace soapstone {

// What of the engine is used; for comparisons, all results being the same.
struct EngineOptions {
  bool uses_rewind = true;
  bool uses_threshold = true;
};

class Engine final : public Simulator {
 public:
  // REQUIRES: problem and tables outlive the engine.
  Engine(const Problem* problem, BoxTables* tables, EngineOptions options = {});

  void Place(std::int32_t block, const Placement& placement) override;
  double Makespan() override;
  // kNever as soon as the makespan is certain to exceed the threshold.
  double Propose(std::span<const Change> changes, double threshold_s) override;
  void Accept() override;
  void Reject() override;

  double LinkSeconds() const override;
  const Placement& placement(std::int32_t block) const override { return graph_.placement(block); }
  std::int32_t task_count() const override { return graph_.task_count(); }
  std::vector<Ended> Ends() const override;

 private:
  // A task or gate in the simulation that stands.
  struct Done {
    double end_s;
    std::int32_t taken_at;  // the moment it was taken from the queue
  };

  // A gate through which all has come. Moments are counted in slots taken from the queue.
  struct Opened {
    std::int32_t gate;
    std::int32_t at;
  };

  struct Snapshot {
    std::int32_t moment = 0;
    double makespan_s = 0;
    std::vector<double> free_s;
    std::vector<std::int64_t> done_fs;
    std::vector<std::int64_t> done_compute_fs;
    std::vector<Calendar::Event> queue;
  };

  void LookAtBounds();
  bool FitsCompute(double limit_fs);
  void Count(const Group& group, std::int64_t sign);
  bool Build(Pass pass, double limit_fs);
  void NextRun();
  void Reserve();
  void PutOffBackward();
  bool CatchUpBackward(double limit_fs);
  bool IsPending(const Slot& slot) const {
    return OrderPass(slot.order) == kBackwardPass && IsOfMarked(pending_in_, slot);
  }
  std::int32_t PendingOf(const Slot& slot) const;
  // Whether a task has to do with the groups that are still to be rebuilt.
  bool IsAwaited(const Slot& slot) const {
    return OrderPass(slot.order) == kBackwardPass && IsOfMarked(awaited_in_, slot);
  }
  bool IsOfMarked(const std::vector<std::int32_t>& marked_in, const Slot& slot) const;
  bool HasRoot(std::int32_t block) const;
  std::int32_t FirstMoment() const;
  std::int32_t LastStart() const;
  double Run(std::int32_t from, double threshold_s);
  void Start(std::int32_t from, double limit_s);
  bool FitsLeft(double now_s, double limit_fs);
  double WithTail(std::int32_t device) const;
  TailBound::Tail NextTail();
  std::int32_t TakeSnapshot();
  void Arrive(std::int32_t number, double end_s);
  void OpenGate(std::int32_t number);
  void Revive(Slot* slot);
  void TakeOver(Slot* slot);
  void Commit();

  TaskGraph graph_;
  PathBound path_;
  TailBound tail_bound_;
  EngineOptions options_;
  std::int32_t devices_;
  std::int32_t resources_;
  double makespan_s_ = 0;  // of what stands
  bool is_known_ = false;
  std::int32_t last_moment_ = 0;  // of the simulation that stands
  std::int32_t last_start_ = 0;   // of the proposals that change it

  std::vector<std::int64_t> work_fs_;     // by resource, of all its tasks
  std::vector<std::int64_t> compute_fs_;  // by device, of its compute tasks
  std::vector<std::int64_t> saved_work_fs_;
  std::vector<std::int64_t> new_compute_fs_;

  // What stands.
  std::vector<Done> done_;  // by slot
  std::vector<std::int32_t> first_forward_;  // by block: when its first forward task was taken
  std::vector<std::int32_t> first_backward_;
  std::vector<std::uint8_t> has_root_;  // by block: whether some forward task waits for nothing
  std::vector<Snapshot> snapshots_;     // the first `snapshot_count_` are valid
  std::size_t snapshot_count_ = 0;
  Predecessors predecessors_;

  // The proposal.
  std::span<const Change> changes_;
  bool is_begun_ = false;
  std::int32_t until_look_ = 0;
  bool uses_path_ = false;  // whether the bound of the longest path is close enough to be of use
  bool uses_tail_ = false;  // whether the tail is long enough to be of use
  TailBound::Tail tail_;
  std::int32_t tail_tries_ = 0;  // proposals since it was last asked whether it drops enough of them
  std::int64_t tail_drops_ = 0;  // by_tail at that time
  std::vector<std::uint8_t> had_root_;  // by change, before it
  bool awaits_backward_ = false;  // whether the groups of the backward pass are still to be rebuilt
  bool is_backward_due_ = false;  // whether it is time to do so
  std::vector<std::int32_t> awaited_in_;  // by block: the run in which taking its backward tasks makes it so
  std::vector<std::int32_t> pending_in_;  // by block: the run in which what they wait for is not yet known
  std::vector<std::int32_t> pending_;     // such blocks
  double proposed_s_ = 0;

  // The simulation under way.
  std::int32_t run_ = 0;
  std::int32_t start_ = 0;   // the moment it started from
  std::int32_t moment_ = 0;
  double so_far_s_ = 0;
  std::size_t kept_snapshots_ = 0;
  std::vector<std::int32_t> rebuilt_in_;  // by group: the run for which it was rebuilt
  std::vector<double> free_s_;
  std::vector<std::int64_t> left_fs_;
  std::vector<std::int64_t> done_compute_fs_;  // by device
  std::vector<std::int32_t> log_;  // slots, as they were taken from the queue
  std::vector<Opened> opened_;
  std::vector<Snapshot> taken_;  // the first `taken_count_`
  std::size_t taken_count_ = 0;
  Calendar queue_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_ENGINE_H_

// The delta simulation of FlexFlow (section 5.3, Algorithm 2) as written, to compare the Engine with.
//
//   UPDATETASKGRAPH  -> Propose(): groups of tasks are rebuilt, old tasks leave their resources' lists, and
//                       all that is new, waits for others than before, or follows a gap is looked at
//   lines 6 to 14    -> Propagate()
//   UPDATETASK       -> Update(), Move()
//   preTask,nextTask -> neighbours in the list of a resource, sorted by (ready time, task order)
//
// What the paper leaves open: a new task has no end, and whoever waits for it is left as it is, until it is
// first taken from the queue; when a task moves within a list, the one that it leaves behind is looked at too.
//
// That the outcome is that of Algorithm 1, to the bit: when the queue is empty, every task is ready when the
// last that it waits for ends, lists are sorted, and starts follow. Only one timeline is like that, because
// (ready time, task order) grows along every edge: a task that takes no time comes before those that wait for
// it in the task order too. The queue does run empty: the earliest of the tasks whose time is not yet final
// can only be held back by tasks that seem to be ready before it, and these go, since what they wait for is
// moved behind it as soon as it is taken.
//
// Thread safety: a PaperDelta belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_PAPER_DELTA_H_
#define SOAPSTONE_CPP_PAPER_DELTA_H_

#include <cstdint>
#include <queue>
#include <vector>

#include "calendar.h"
#include "predecessors.h"
#include "problem.h"
#include "simulator.h"
#include "tasks.h"

namespace soapstone {

class PaperDelta final : public Simulator {
 public:
  // REQUIRES: problem and tables outlive it.
  PaperDelta(const Problem* problem, BoxTables* tables);

  void Place(std::int32_t block, const Placement& placement) override;
  double Makespan() override;
  // The makespan whatever the threshold.
  double Propose(std::span<const Change> changes, double threshold_s) override;
  void Accept() override;
  void Reject() override;

  const TaskGraph& graph() const { return graph_; }
  const Placement& placement(std::int32_t block) const override { return graph_.placement(block); }
  std::int32_t task_count() const override { return graph_.task_count(); }

 private:
  static constexpr double kUnknown = -1;

  using Event = Calendar::Event;
  struct IsLater {
    bool operator()(const Event& a, const Event& b) const { return b < a; }
  };

  // Of a gate, which is on no list, start and end are when it is ready.
  struct Times {
    double ready_s = kUnknown;
    double start_s = kUnknown;
    double end_s = kUnknown;
    double queued_s = kUnknown;  // as what it stands in the queue, if it does
  };

  struct Saved {
    std::int32_t slot;
    Times times;
  };

  void TakeOut();
  void LookAtAffected();
  void LookAtAll(std::int32_t group);
  void LookAt(std::int32_t slot);
  bool Update(std::int32_t slot);
  double ReadyOf(std::int32_t slot);
  void Move(std::int32_t slot, double ready_s);
  double Propagate();
  std::size_t PlaceInList(std::int32_t slot) const;
  double EndBefore(std::int32_t slot) const;
  void Save(std::int32_t slot);
  void SaveList(std::int32_t resource);
  void Forget(const Group& group);

  TaskGraph graph_;
  Predecessors predecessors_;
  bool is_known_ = false;
  double makespan_s_ = 0;  // of what stands

  std::vector<Times> times_;               // by slot
  std::vector<std::vector<Event>> lists_;  // by resource: its tasks in FIFO order
  std::priority_queue<Event, std::vector<Event>, IsLater> queue_;
  std::vector<std::int32_t> left_behind_;  // slots whose neighbour before them has gone

  // The proposal, and how to take it back.
  bool is_proposed_ = false;
  double proposed_s_ = 0;
  std::int32_t run_ = 0;
  std::vector<std::int32_t> replaced_in_;    // by group: the run in which it was rebuilt
  std::vector<std::int32_t> saved_in_;       // by slot
  std::vector<std::int32_t> list_saved_in_;  // by resource
  std::vector<Saved> saved_;
  std::vector<std::int32_t> saved_resources_;
  std::vector<std::vector<Event>> saved_lists_;  // by resource
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PAPER_DELTA_H_

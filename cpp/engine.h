// Incremental simulation: when a block is placed anew, only the groups of tasks it touches are rebuilt, and
// the simulation runs over the groups as they stand.
//
// The makespan equals that of Simulate() on the flat task graph, to the bit: tasks leave the queue in the
// same order, by (ready time, task order).
//
// Thread safety: an Engine belongs to one thread; the Problem and the layouts are shared.

#ifndef SOAPSTONE_CPP_ENGINE_H_
#define SOAPSTONE_CPP_ENGINE_H_

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "problem.h"
#include "tasks.h"

namespace soapstone {

class Engine {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // REQUIRES: problem and tables outlive the engine.
  Engine(const Problem* problem, BoxTables* tables);

  // Places a block for good.
  void Place(std::int32_t block, Placement placement);

  // The makespan of what is placed.
  //
  // REQUIRES: every block is placed.
  double Makespan();

  // The makespan if a block were placed so; kNever as soon as it is certain to exceed `threshold_s`. The
  // proposal stands until Accept() or Reject(), one of which must follow; without a proposal they do nothing.
  double Propose(std::int32_t block, Placement placement, double threshold_s);
  void Accept();
  void Reject();

  std::int64_t task_count() const;

 private:
  struct Event {
    double ready_s;
    TaskOrder order;
    TaskRef task;
  };

  // What Reject() puts back.
  struct Saved {
    std::int32_t group;
    Group tasks;
  };

  void Adopt(std::int32_t group);
  void Count(const Group& group, std::int64_t sign);
  void SumWaits(std::int32_t block);
  double Run(double threshold_s);
  void Arrive(TaskRef task, double end_s);

  TaskGraph graph_;
  std::int32_t blocks_;
  std::int32_t resources_;
  std::vector<std::vector<std::int32_t>> waits_;  // by group: of all its tasks, from all groups
  std::vector<std::vector<std::int32_t>> touching_;  // by block: groups of values and weights it takes part in
  std::vector<std::int64_t> work_fs_;  // by resource: femtoseconds of all its tasks, rounded down
  std::int32_t proposed_ = -1;
  Placement replaced_;
  std::vector<Saved> saved_;

  // The simulation's own arrays, kept to save allocation.
  std::vector<std::int32_t> base_;
  std::vector<std::int32_t> remaining_;
  std::vector<double> ready_s_;
  std::vector<double> free_s_;
  std::vector<std::int64_t> left_fs_;
  std::vector<Event> queue_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_ENGINE_H_

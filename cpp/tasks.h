// The task graph of a strategy, kept in groups that are rebuilt one by one.
//
// The twin of src/soapstone/tasks/build.py. A group holds the tasks that appear and vanish together: the
// compute tasks of a block and what its shards tell each other (depends on the block's placement), the
// exchange of a value (on those of its writer and readers), the gradients and updates of a weight (on
// those of its readers). A task is known to other groups by its group and its place in it.
//
// Thread safety: a TaskGraph belongs to one thread; the Problem and the layouts are shared.

#ifndef SOAPSTONE_CPP_TASKS_H_
#define SOAPSTONE_CPP_TASKS_H_

#include <compare>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "exchange.h"
#include "layout.h"
#include "problem.h"

namespace soapstone {

// A task's place in the task order: what it is, in fields from the most significant down.
__extension__ typedef unsigned __int128 TaskOrder;

enum class TaskKind : std::uint8_t {
  kForward,
  kBackward,
  kTransfer,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kUpdate,
};

struct TaskRef {
  std::int32_t group;
  std::int32_t task;

  auto operator<=>(const TaskRef&) const = default;
};

struct Placement {
  std::shared_ptr<const Layout> layout;
  std::int32_t copies = 1;
  std::vector<std::int32_t> devices;  // [shard * copies + copy]
};

// Successors of tasks, in compressed rows.
struct Successors {
  std::vector<std::int32_t> begin;
  std::vector<TaskRef> targets;
};

// What a group says about the compute tasks of a block: which tasks follow them because of this group,
// and how many it makes each of them wait for.
struct Attachment {
  std::int32_t block = -1;
  Successors successors;
  std::vector<std::int32_t> waits;
};

// Tasks that appear and vanish together. After its tasks a group has gates: points where many tasks meet,
// so that n senders and m receivers of a collective take n + m edges and not n * m. A gate takes no time.
struct Group {
  std::vector<TaskKind> kind;
  std::vector<std::int32_t> resource;  // devices first, then links
  std::vector<double> duration_s;
  std::vector<std::int64_t> size_bytes;
  std::vector<TaskOrder> order;
  std::int32_t gates = 0;
  Successors own;                   // of tasks, then of gates
  std::vector<std::int32_t> waits;  // of tasks, then of gates: what they wait for because of this group
  std::vector<Attachment> attached;

  std::int32_t task_count() const { return static_cast<std::int32_t>(kind.size()); }
  std::int32_t size() const { return task_count() + gates; }
};

// Every task in task order, as flat arrays.
struct FlatTasks {
  std::vector<TaskKind> kind;
  std::vector<std::int32_t> resource;
  std::vector<double> duration_s;
  std::vector<std::int64_t> size_bytes;
  std::vector<std::int64_t> after_begin;
  std::vector<std::int32_t> after;
};

class GroupBuilder;

class TaskGraph {
 public:
  // REQUIRES: problem and tables outlive the graph.
  TaskGraph(const Problem* problem, BoxTables* tables);

  // Places a block; its group and those of the values and weights it touches are rebuilt when next needed.
  //
  // REQUIRES: the placement's layout is one of the block's, made with the graph's tables, and its devices
  // exist.
  void Place(std::int32_t block, Placement placement);

  // Rebuilds what placements have changed since the last call.
  //
  // REQUIRES: every block is placed.
  void Refresh();

  // REQUIRES: Refresh() was called after the last Place().
  FlatTasks Flat() const;

  // Groups are numbered: first one for each block, then for each value, then for each weight.
  const std::vector<Group>& groups() const { return groups_; }

  const Placement& placement(std::int32_t block) const { return placements_[block]; }

  // The groups that depend on a block's placement, its own first.
  const std::vector<std::int32_t>& touched(std::int32_t block) const { return touched_[block]; }

  // Rebuilds one group from the placements as they are; returns what it was.
  Group Rebuilt(std::int32_t group);

  // Puts back a placement whose groups are put back by SwapIn().
  void Restore(std::int32_t block, Placement placement) { placements_[block] = std::move(placement); }
  void SwapIn(std::int32_t group, Group* tasks) { std::swap(groups_[group], *tasks); }

 private:
  // Shards of a block that compute the gradient of one box, and where they run.
  struct Reading {
    std::int32_t block;
    std::int32_t segment;
    const std::vector<std::int32_t>* shards;
    std::int32_t box;
    std::vector<std::int32_t> devices;
  };

  std::int32_t ValueGroup(std::int32_t value) const;
  std::int32_t WeightGroup(std::int32_t weight) const;
  TaskRef Forward(std::int32_t block, std::int32_t segment, std::int32_t pc) const;
  TaskRef Backward(std::int32_t block, std::int32_t segment, std::int32_t pc) const;

  // How many compute tasks a block has.
  std::int32_t ComputeTasks(std::int32_t block) const;

  // Calls visit(place in the placement's devices) for the copies of some shards on one device.
  template <typename Visit>
  void ForEachOn(const Placement& placement, const std::vector<std::int32_t>& shards, std::int32_t device,
                 const Visit& visit) const;

  // Adds what a block's ports of one kind read of a value or weight, and compute the gradient of.
  void CollectReadings(std::int32_t block, std::int32_t subject, const std::vector<Port>& ports,
                       std::vector<Reading>* readings) const;

  Group Build(std::int32_t group) const;
  Group BuildCompute(std::int32_t block) const;
  Group BuildValue(std::int32_t value) const;
  Group BuildWeight(std::int32_t weight) const;
  void AddForward(std::int32_t value, const Written& written, GroupBuilder* builder) const;
  void AddBackward(std::int32_t value, const Written& written, GroupBuilder* builder) const;

  const Problem* problem_;
  BoxTables* tables_;
  std::vector<Placement> placements_;
  std::vector<Group> groups_;
  std::vector<std::uint8_t> is_stale_;
  std::vector<std::int32_t> writer_;                // by value
  std::vector<std::vector<std::int32_t>> readers_;  // by value: blocks, ascending
  std::vector<std::vector<std::int32_t>> users_;    // by weight: blocks, ascending
  std::vector<std::vector<std::int32_t>> touched_;  // by block: groups to rebuild
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_TASKS_H_

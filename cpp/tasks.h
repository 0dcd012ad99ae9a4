// The task graph of a strategy, kept in groups that are rebuilt one by one.
//
// The twin of src/soapstone/tasks/build.py. A group holds the tasks that appear and vanish together: the
// compute tasks of a block and what its shards tell each other (depends on the block's placement), the
// exchange of a value and that of its gradient (on those of its writer and readers), the gradients and updates
// of the weights of a shelf (on those of their readers); without buckets each weight has a shelf to itself.
// Every task has a slot, which it keeps until its group is rebuilt; a group has two ranges of slots, so that a
// change can be undone.
//
// Thread safety: a TaskGraph belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_TASKS_H_
#define SOAPSTONE_CPP_TASKS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "draft.h"
#include "layout.h"
#include "placement.h"
#include "problem.h"

namespace soapstone {

// What an engine knows of a task or gate, in the simulation under way and in the one that stands.
struct Live {
  double ready_s = 0;            // when it was done, once it is taken from the queue
  std::int32_t remaining = 0;    // of those it waits for
  std::int32_t run = 0;          // the run for which all this is so
  std::int32_t first = 0;        // the moment the first of those it waits for was taken from the queue
  std::int32_t stood_first = 0;  // the same in the simulation that stands
};

// What the simulation needs to know of a task or a gate when others give to it and when its turn comes: one
// cache line, since memory is what the simulation waits for.
struct alignas(64) Slot {
  static constexpr std::int32_t kGate = -1;

  // The `resource` of a batch with so many members.
  static constexpr std::int32_t BatchOf(std::int32_t members) { return kGate - members; }

  union {
    double duration_s;
    const Member* members;  // of a batch
  };
  TaskOrder order;
  // Slots that wait for it; a negative number is the complement of a handle: the gate of a gradient.
  const std::int32_t* next;
  std::int32_t next_count;
  std::int32_t resource;   // devices first, then links; kGate for a gate; below that for a batch
  std::int32_t waits = 0;  // for how many tasks and gates
  std::int32_t group = 0;
  Live live;

  bool is_batch() const { return resource < kGate; }
  std::int32_t member_count() const { return kGate - resource; }

  // Calls visit(resource, seconds) for its tasks.
  //
  // REQUIRES: it is no gate.
  template <typename Visit>
  void ForEachTask(const Visit& visit) const {
    if (!is_batch()) {
      visit(resource, duration_s);
      return;
    }
    for (std::int32_t i = 0; i < member_count(); ++i) visit(members[i].resource, members[i].duration_s);
  }
};

static_assert(sizeof(Slot) == 64);

// What is said of a task besides, for who looks at it.
struct SlotLabel {
  TaskKind kind;
  std::int64_t size_bytes;
};

// What a group says about the compute tasks of a block in one pass (forward in the exchange of a value,
// backward in all other groups): which slots follow them because of this group, and how many it makes each
// of them wait for. Empty where it says nothing.
struct Attachment {
  std::int32_t block = -1;
  Rows successors;
  std::vector<std::int32_t> waits;
};

// After its tasks a group has gates: points where many tasks meet, so that n senders and m receivers of a
// collective take n + m edges and not n * m. A gate takes no time.
struct Group {
  std::int32_t first = 0;     // slot of its first task
  std::int32_t capacity = 0;  // slots reserved
  std::int32_t tasks = 0;     // slots of tasks; a batch has one
  std::int32_t gates = 0;
  std::vector<Member> members;
  Rows successors;  // slots, by task and then by gate; what other groups add for compute tasks is not here
  std::vector<Attachment> attached;
  // Of weights: where gradients go. If it has gates, one for each box that shards read, the compute tasks
  // are told of them by handles, so that a weight with many readers is not attached anew for one.
  struct OfWeight {
    std::vector<std::int32_t> gate_of_box;       // slots
    std::vector<std::int32_t> update_of_device;  // slots, or -1
  };
  bool has_gates = false;
  std::vector<OfWeight> weights;  // those of a shelf

  std::int32_t size() const { return tasks + gates; }
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

class TaskGraph {
 public:
  // One of the groups that a block's tasks have edges with, and which of its attachments speaks of it.
  struct Touch {
    std::int32_t group;
    std::int32_t attachment;
  };

  // REQUIRES: problem and tables outlive the graph.
  TaskGraph(const Problem* problem, BoxTables* tables, Draft::Batches batches = Draft::Batches::kTogether);

  // Places a block for good; what depends on it is rebuilt by Refresh().
  //
  // REQUIRES: the placement's layout is one of the block's, made with the graph's tables, and outlives the
  // graph; its devices exist. No change is under way.
  void Place(std::int32_t block, const Placement& placement);

  // Rebuilds what Place() has changed.
  //
  // REQUIRES: every block is placed.
  void Refresh();

  // A change of some blocks: Begin(), then Rebuild() for the groups of affected(forward) in their order and
  // Link(forward), then the same for the backward pass; stopping anywhere, to end with Undo(), or with Keep()
  // if nothing is left out.
  //
  // REQUIRES: no block is named twice.
  void Begin(std::span<const Change> changes);
  // Enters the tasks of the group into the ledger, if there is one; if that is exceeded, the group is left as
  // it was, and false is returned.
  bool Rebuild(std::int32_t group, Ledger* ledger = nullptr);
  void Link(Pass pass);
  void Keep();
  void Undo();

  // REQUIRES: nothing is stale.
  FlatTasks Flat() const;

  const Problem& problem() const { return *problem_; }
  // Groups are numbered: first one for each block, then for each value forward, then for each value backward,
  // then for each shelf of weights.
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Slot>& slots() const { return slots_; }
  // A slot, with what only an engine writes.
  Slot* slot(std::int32_t number) { return &slots_[number]; }
  const Placement& placement(std::int32_t block) const { return placements_[block]; }
  std::int32_t block_count() const { return static_cast<std::int32_t>(placements_.size()); }
  std::int32_t task_count() const;

  // The groups that depend on the placements of the last change: forward the blocks' own and those of values;
  // backward those of values' gradients and of weights.
  std::span<const std::int32_t> affected(Pass pass) const { return affected_[pass]; }

  // The groups of values and weights that a block's tasks of a pass have edges with.
  std::span<const Touch> touching(std::int32_t block, Pass pass) const { return touching_[pass][block]; }

  // The blocks whose tasks come before any that depends on a block's placement: those that write what it
  // reads.
  std::span<const std::int32_t> writers(std::int32_t block) const { return writers_[block]; }
  // Those that use its weights, itself included.
  std::span<const std::int32_t> sharers(std::int32_t block) const { return sharers_[block]; }

  // Those that read a weight, ascending, and its group.
  std::span<const std::int32_t> users(std::int32_t weight) const { return users_[weight]; }
  std::int32_t WeightGroup(std::int32_t weight) const { return ShelfGroup(shelf_[weight]); }
  const Group::OfWeight& OfWeight(std::int32_t weight) const {
    return groups_[WeightGroup(weight)].weights[place_on_shelf_[weight]];
  }

  // How many compute tasks a block has in one pass: by segment, then by place. Its slots are those of the
  // forward pass, then those of the backward pass, then the rest.
  std::int32_t PassTasks(std::int32_t block) const {
    return static_cast<std::int32_t>(placements_[block].devices.size()) * placements_[block].layout->segments;
  }
  std::int32_t ComputeTasks(std::int32_t block) const {
    return PassTasks(block) * (problem_->blocks[block].needs_backward ? 2 : 1);
  }

  // Whether each backward task that a block's shards begin with is sure to wait for some reader's gradient.
  bool AwaitsGradient(std::int32_t block) const;

  // The pass whose compute tasks a group of values or weights has edges with.
  Pass PassOf(std::int32_t group) const {
    return group < block_count() + value_count() ? kForwardPass : kBackwardPass;
  }

  // The gate that waits for the gradient of a handle.
  std::int32_t GateOf(std::int32_t handle) const {
    return OfWeight(handles_[handle].weight).gate_of_box[handles_[handle].box];
  }
  std::int32_t GradientGroupOf(std::int32_t handle) const { return WeightGroup(handles_[handle].weight); }

  // Calls visit(slot) for all that waits for a task or gate.
  template <typename Visit>
  void ForEachSuccessor(const Slot& slot, const Visit& visit) const {
    for (std::int32_t i = 0; i < slot.next_count; ++i) {
      visit(slot.next[i] >= 0 ? slot.next[i] : GateOf(~slot.next[i]));
    }
  }

 private:
  // Shards of a block that compute the gradient of one box; where they run is in a list aside.
  struct Reading {
    std::int32_t attachment;
    std::int32_t block;
    std::int32_t segment;
    std::span<const std::int32_t> shards;
    std::int32_t box;
  };

  // A box of a weight, whose gradient others wait for.
  struct Handle {
    std::int32_t weight;
    std::int32_t box;
  };

  // The gate of a box in a draft.
  struct Gate {
    std::int32_t weight;  // its place on the shelf
    std::int32_t box;
    std::int32_t gate;
    std::int32_t givers;
  };

  // Gradients that are summed together.
  struct Bucket {
    std::vector<std::int32_t> ring;
    TaskOrder order = 0;  // of its last member
    std::int64_t size_bytes = 0;
    std::vector<Ref> before;
    std::vector<Ref> after;
  };

  // Boxes of a weight cut at each other's borders.
  struct Cut {
    std::vector<std::int64_t> volumes;  // by piece
    std::vector<BoxBounds> pieces;
    Rows of_box;  // by box, in the order of their numbers: pieces
  };

  std::int32_t ShelfGroup(std::int32_t shelf) const { return block_count() + 2 * value_count() + shelf; }
  std::int32_t value_count() const { return static_cast<std::int32_t>(problem_->values.size()); }
  std::int32_t ValueGroup(std::int32_t value, Pass pass) const {
    return block_count() + (pass == kForwardPass ? 0 : value_count()) + value;
  }
  // The place among a block's compute tasks of one pass.
  std::int32_t Place(std::int32_t block, std::int32_t segment, std::int32_t pc) const {
    return segment * static_cast<std::int32_t>(placements_[block].devices.size()) + pc;
  }

  void Build(std::int32_t group, Group* built);
  void BuildCompute(std::int32_t block);
  void AddSeam(std::int32_t block, const SeamData& seam, bool backward, bool is_spread, TaskOrder* order);
  void AddSeamInClasses(std::int32_t block, const SeamData& seam, bool backward, TaskOrder* order);
  const Written& WrittenOf(std::int32_t value) const;
  void AddForward(std::int32_t value, const Written& written);
  void AddBackward(std::int32_t value, const Written& written);
  void BuildShelf(std::int32_t shelf, Group* built);
  void FinishShelf(Group* built);
  // True if no gradient of the weight is computed by several devices at once, so that each piece that more
  // than one device holds is one all-reduce.
  bool IsPlain(std::int32_t weight) const;
  void AddPlainGradients(std::int32_t weight, Group::OfWeight* built);
  void AddGradients(std::int32_t weight, const Group& group, Group::OfWeight* built);
  // The bucket of a gradient among these devices, whose tasks would begin at `order`, which is counted up.
  Bucket* BucketOf(std::span<const std::int32_t> ring, std::int64_t size_bytes, TaskOrder* order);
  void AddBuckets();
  const Cut& CutOf(std::int32_t weight, const std::vector<std::int32_t>& boxes);
  // The updates of a weight; of a batch all devices have the one task.
  void AddUpdates(std::int32_t weight, const std::vector<std::int64_t>& held_bytes, bool is_batch,
                  Group::OfWeight* built);
  void CollectReadings(std::int32_t attachment, std::int32_t block, std::int32_t subject,
                       const std::vector<Port>& ports);
  void Install(std::int32_t group, Group* built);
  void Reserve(std::int32_t count, Group* group);
  void Attach(std::int32_t group, const Group& to, const Group& from);
  void LinkBlock(std::int32_t block, Pass pass);
  void PointAt(std::int32_t block, Pass pass);
  std::int32_t HandleOf(std::int32_t weight, std::int32_t box);

  const Problem* problem_;
  BoxTables* tables_;
  std::vector<Placement> placements_;
  std::vector<Group> groups_;
  std::vector<Group> spare_;  // what groups were before the change, or memory to build the next in
  std::vector<Slot> slots_;
  std::vector<SlotLabel> labels_;
  std::vector<std::vector<std::int32_t>> unused_;  // by power of two: first slots of ranges of that size
  std::vector<std::uint8_t> is_stale_;             // by group
  std::vector<std::uint8_t> is_new_;  // by block: rebuilt in this change, so no attachment counts yet
  std::vector<Change> replaced_;  // what the changed blocks were before; memory after the first `changes_`
  std::size_t changes_ = 0;
  std::span<const std::int32_t> affected_[2];
  std::vector<std::int32_t> merged_[2];  // groups of a change of several blocks
  std::vector<std::int32_t> rebuilt_;
  // All that follows the compute tasks of a block in a pass, put together from the groups that speak of them.
  std::vector<Rows> linked_[2];
  std::vector<Rows> spare_linked_[2];
  bool is_linked_[2] = {false, false};
  std::vector<std::int32_t> relinked_[2];          // blocks
  std::vector<std::uint8_t> is_relinked_[2];       // by block
  std::vector<std::vector<std::int32_t>> handle_;  // by weight, by box; -1 if there is none yet
  std::vector<Handle> handles_;

  std::vector<std::int32_t> writer_;                // by value
  std::vector<std::vector<std::int32_t>> readers_;  // by value: blocks, ascending
  std::vector<std::vector<std::int32_t>> users_;    // by weight: blocks, ascending
  std::vector<std::int32_t> first_user_;            // by weight: of those that give a gradient
  std::vector<std::uint8_t> is_covered_;            // by value: whether gradients of all its elements arrive
  std::vector<std::int32_t> value_rank_;            // among the values of its writer
  std::vector<std::int32_t> weight_rank_;           // among the weights with its first user
  std::vector<std::int32_t> shelf_;                 // by weight
  std::vector<std::int32_t> place_on_shelf_;        // by weight
  std::vector<std::vector<std::int32_t>> on_shelf_;  // by shelf: weights, ascending
  std::vector<std::vector<std::int32_t>> touched_[2];  // by pass, by block: groups, ascending
  std::vector<std::vector<Touch>> touching_[2];
  std::vector<std::vector<std::int32_t>> writers_;
  std::vector<std::vector<std::int32_t>> sharers_;

  // Memory kept between builds.
  Draft draft_;
  std::vector<Part> parts_;
  std::vector<Reading> readings_;
  Rows holders_;
  std::vector<std::int32_t> turns_;
  std::vector<std::unordered_map<std::uint64_t, std::pair<std::vector<std::int32_t>, Cut>>> cuts_;  // by weight
  std::vector<std::int32_t> distinct_;
  std::vector<Gate> box_gates_;
  std::vector<std::int32_t> bucket_of_piece_;  // or the complement of an update, in the draft
  std::vector<Bucket> buckets_;  // the first `bucket_count_`
  std::size_t bucket_count_ = 0;
  std::vector<std::int32_t> box_place_;
  std::vector<std::int32_t> counts_;
  std::vector<std::uint64_t> holding_;
  std::vector<std::uint64_t> box_holding_;
  std::vector<std::int64_t> held_bytes_;
  std::vector<std::int32_t> ring_;
  std::vector<std::int32_t> place_of_device_;
  std::vector<std::pair<std::int32_t, std::int32_t>> seam_rows_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_TASKS_H_

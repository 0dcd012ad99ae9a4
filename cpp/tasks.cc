#include "tasks.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

namespace soapstone {
namespace {

std::vector<std::int32_t> Sorted(const std::set<std::int32_t>& numbers) { return {numbers.begin(), numbers.end()}; }

}  // namespace

TaskGraph::TaskGraph(const Problem* problem, BoxTables* tables, Draft::Batches batches)
    : problem_(problem),
      tables_(tables),
      placements_(problem->blocks.size()),
      unused_(32),
      is_new_(problem->blocks.size(), 0),
      writer_(problem->values.size(), -1),
      readers_(problem->values.size()),
      users_(problem->weights.size()),
      first_user_(problem->weights.size(), -1),
      is_covered_(problem->values.size(), 0),
      value_rank_(problem->values.size(), 0),
      weight_rank_(problem->weights.size(), 0),
      shelf_(problem->weights.size()),
      place_on_shelf_(problem->weights.size()),
      writers_(problem->blocks.size()),
      sharers_(problem->blocks.size()),
      draft_(&problem->machine, batches),
      turns_(problem->machine.device_count, 0),
      cuts_(problem->weights.size()) {
  for (std::size_t weight = 0; weight < problem->weights.size(); ++weight) {
    shelf_[weight] = problem->has_buckets ? problem->weights[weight].shelf : static_cast<std::int32_t>(weight);
    const auto shelves = static_cast<std::size_t>(shelf_[weight]) + 1;
    if (on_shelf_.size() < shelves) on_shelf_.resize(shelves);
    place_on_shelf_[weight] = static_cast<std::int32_t>(on_shelf_[shelf_[weight]].size());
    on_shelf_[shelf_[weight]].push_back(static_cast<std::int32_t>(weight));
  }
  groups_.resize(problem->blocks.size() + 2 * problem->values.size() + on_shelf_.size());
  is_stale_.assign(groups_.size(), 1);
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    touched_[pass].resize(problem->blocks.size());
    touching_[pass].resize(problem->blocks.size());
    linked_[pass].resize(problem->blocks.size());
    is_relinked_[pass].resize(problem->blocks.size(), 0);
  }
  handle_.resize(problem->weights.size());
  const auto count = static_cast<std::int32_t>(problem->blocks.size());
  for (std::int32_t block = 0; block < count; ++block) {
    std::set<std::int32_t> values;
    std::set<std::int32_t> weights;
    for (const NodeData& node : problem->blocks[block].nodes) {
      for (const Access& output : node.outputs) {
        if (output.value < 0) continue;
        writer_[output.value] = block;
        values.insert(output.value);
      }
      for (const Access& operand : node.operands) {
        if (operand.value >= 0) {
          std::vector<std::int32_t>& readers = readers_[operand.value];
          if (readers.empty() || readers.back() != block) readers.push_back(block);
          values.insert(operand.value);
          if (node.writes_gradient && ReadsAll(node, operand)) is_covered_[operand.value] = 1;
        } else if (operand.weight >= 0) {
          std::vector<std::int32_t>& users = users_[operand.weight];
          if (users.empty() || users.back() != block) users.push_back(block);
          if (node.writes_gradient && first_user_[operand.weight] < 0) first_user_[operand.weight] = block;
          weights.insert(operand.weight);
        }
      }
    }
    touched_[kForwardPass][block].push_back(block);
    for (const Pass pass : {kForwardPass, kBackwardPass}) {
      for (const std::int32_t value : values) {
        if (pass == kBackwardPass && !problem->values[value].is_differentiable) continue;
        touched_[pass][block].push_back(ValueGroup(value, pass));
      }
    }
    std::set<std::int32_t> shelves;
    for (const std::int32_t weight : weights) shelves.insert(WeightGroup(weight));
    touched_[kBackwardPass][block].insert(touched_[kBackwardPass][block].end(), shelves.begin(), shelves.end());
  }
  std::vector<std::int32_t> values_of(count, 0);
  std::vector<std::set<std::int32_t>> writers(count);
  std::vector<std::set<std::int32_t>> sharers(count);
  std::vector<std::int32_t> by_number(problem->values.size());
  std::iota(by_number.begin(), by_number.end(), 0);
  std::sort(by_number.begin(), by_number.end(), [problem](std::int32_t a, std::int32_t b) {
    return problem->values[a].number < problem->values[b].number;
  });
  for (const std::int32_t value : by_number) value_rank_[value] = values_of[writer_[value]]++;
  for (std::size_t value = 0; value < problem->values.size(); ++value) {
    for (const std::int32_t reader : readers_[value]) writers[reader].insert(writer_[value]);
    for (const Pass pass : {kForwardPass, kBackwardPass}) {
      if (pass == kBackwardPass && !problem->values[value].is_differentiable) continue;
      Group& group = groups_[ValueGroup(static_cast<std::int32_t>(value), pass)];
      for (const std::int32_t reader : readers_[value]) group.attached.push_back({reader, {}, {}});
      group.attached.push_back({writer_[value], {}, {}});
    }
  }
  std::vector<std::int32_t> weights_of(count, 0);
  for (std::size_t weight = 0; weight < problem->weights.size(); ++weight) {
    weight_rank_[weight] = weights_of[first_user_[weight]]++;
    for (const std::int32_t user : users_[weight]) sharers[user].insert(users_[weight].begin(), users_[weight].end());
  }
  for (std::size_t shelf = 0; shelf < on_shelf_.size(); ++shelf) {
    Group& group = groups_[ShelfGroup(static_cast<std::int32_t>(shelf))];
    group.weights.resize(on_shelf_[shelf].size());
    std::set<std::int32_t> users;
    for (const std::int32_t weight : on_shelf_[shelf]) users.insert(users_[weight].begin(), users_[weight].end());
    for (const std::int32_t user : users) group.attached.push_back({user, {}, {}});
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < groups_[g].attached.size(); ++i) {
      touching_[PassOf(static_cast<std::int32_t>(g))][groups_[g].attached[i].block].push_back(
          {static_cast<std::int32_t>(g), static_cast<std::int32_t>(i)});
    }
  }
  for (std::int32_t block = 0; block < count; ++block) {
    writers_[block] = Sorted(writers[block]);
    sharers_[block] = Sorted(sharers[block]);
    if (values_of[block] >= 1 << kNumberBits || weights_of[block] >= 1 << kNumberBits) {
      throw std::invalid_argument("a block writes too many values, or reads too many weights");
    }
  }
  if (count >= 1 << kPositionBits || problem->weights.size() >= 1 << kPositionBits) {
    throw std::invalid_argument("there are too many blocks or weights");
  }
  spare_ = groups_;
  for (const Pass pass : {kForwardPass, kBackwardPass}) spare_linked_[pass] = linked_[pass];
}

std::int32_t TaskGraph::task_count() const {
  std::int32_t count = 0;
  for (const Group& group : groups_) {
    for (std::int32_t slot = group.first; slot < group.first + group.tasks; ++slot) {
      count += slots_[slot].is_batch() ? slots_[slot].member_count() : 1;
    }
  }
  return count;
}

bool TaskGraph::AwaitsGradient(std::int32_t block) const {
  const Layout& layout = *placements_[block].layout;
  return problem_->blocks[block].needs_backward &&
         std::any_of(layout.written.begin(), layout.written.end(), [&](const Written& written) {
           const std::int32_t value = written.port.subject;
           return is_covered_[value] && problem_->values[value].is_differentiable &&
                  written.port.segment == layout.segments - 1;
         });
}

// -- changes ----------------------------------------------------------------------------------------------

void TaskGraph::Place(std::int32_t block, const Placement& placement) {
  placements_[block] = placement;
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t group : touched_[pass][block]) is_stale_[group] = 1;
  }
}

void TaskGraph::Refresh() {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    if (is_stale_[group]) Rebuild(static_cast<std::int32_t>(group));
    is_stale_[group] = 0;
  }
  Link(kForwardPass);
  Link(kBackwardPass);
  Keep();
}

void TaskGraph::Begin(std::span<const Change> changes) {
  changes_ = changes.size();
  if (replaced_.size() < changes_) replaced_.resize(changes_);
  for (std::size_t i = 0; i < changes_; ++i) {
    const std::int32_t block = changes[i].block;
    replaced_[i].block = block;
    std::swap(replaced_[i].placement, placements_[block]);
    placements_[block] = changes[i].placement;
  }
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    if (changes_ == 1) {
      affected_[pass] = touched_[pass][changes[0].block];
      continue;
    }
    std::vector<std::int32_t>& merged = merged_[pass];
    merged.clear();
    for (const Change& change : changes) {
      merged.insert(merged.end(), touched_[pass][change.block].begin(), touched_[pass][change.block].end());
    }
    std::sort(merged.begin(), merged.end());
    merged.erase(std::unique(merged.begin(), merged.end()), merged.end());
    affected_[pass] = merged;
  }
}

bool TaskGraph::Rebuild(std::int32_t group, Ledger* ledger) {
  draft_.Keep(ledger);
  Build(group, &spare_[group]);
  if (ledger != nullptr && ledger->is_exceeded) return false;
  Install(group, &spare_[group]);
  std::swap(groups_[group], spare_[group]);
  rebuilt_.push_back(group);
  if (group < block_count()) {
    is_new_[group] = 1;
  } else {
    Attach(group, groups_[group], spare_[group]);
  }
  return true;
}

// Makes the tasks of attached blocks wait for what a group is now and not for what it was. Blocks rebuilt in
// this change wait for nothing of what it was.
void TaskGraph::Attach(std::int32_t group, const Group& to, const Group& from) {
  const Pass pass = PassOf(group);
  for (std::size_t i = 0; i < to.attached.size(); ++i) {
    const std::int32_t block = to.attached[i].block;
    Slot* slot = slots_.data() + groups_[block].first + (pass == kForwardPass ? 0 : PassTasks(block));
    const std::vector<std::int32_t>& more = to.attached[i].waits;
    const std::vector<std::int32_t>& less = from.attached[i].waits;
    for (std::size_t t = 0; t < more.size(); ++t) slot[t].waits += more[t];
    if (is_new_[block]) continue;
    for (std::size_t t = 0; t < less.size(); ++t) slot[t].waits -= less[t];
    // A weight says most of what it has to say by handles, which stay.
    if (more.empty() && less.empty()) continue;
    if (!std::exchange(is_relinked_[pass][block], 1)) relinked_[pass].push_back(block);
  }
}

// Puts together what follows the compute tasks of the blocks that the rebuilt groups speak of.
void TaskGraph::Link(Pass pass) {
  is_linked_[pass] = true;
  for (const std::int32_t group : rebuilt_) {
    if (group < block_count() && !std::exchange(is_relinked_[pass][group], 1)) relinked_[pass].push_back(group);
  }
  for (const std::int32_t block : relinked_[pass]) {
    if (pass == kForwardPass || problem_->blocks[block].needs_backward) LinkBlock(block, pass);
  }
}

void TaskGraph::LinkBlock(std::int32_t block, Pass pass) {
  const Group& own = groups_[block];
  const Placement& placement = placements_[block];
  const Layout& layout = *placement.layout;
  const auto places = static_cast<std::int32_t>(placement.devices.size());
  const std::int32_t tasks = PassTasks(block);
  const std::int32_t skipped = pass == kForwardPass ? 0 : tasks;
  Rows& rows = spare_linked_[pass][block];
  rows.begin.assign(1, 0);
  rows.items.clear();
  const std::vector<Touch>& touching = touching_[pass][block];
  for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
    for (std::int32_t pc = 0; pc < places; ++pc) {
      const std::int32_t task = segment * places + pc;
      const auto append = [&rows](std::span<const std::int32_t> row) {
        for (const std::int32_t next : row) rows.items.push_back(next);
      };
      append(own.successors[skipped + task]);
      for (const Touch& touch : touching) {
        const Rows& more = groups_[touch.group].attached[touch.attachment].successors;
        if (task < more.count()) append(more[task]);
      }
      if (pass == kBackwardPass) {
        for (const Port& port : layout.weights) {
          if (port.segment != segment || !port.gives_gradient) continue;
          if (!groups_[WeightGroup(port.subject)].has_gates) continue;
          const std::int32_t box = port.boxes[pc / placement.copies];
          if (box != BoxTable::kNone) rows.items.push_back(~HandleOf(port.subject, box));
        }
      }
      rows.begin.push_back(static_cast<std::int32_t>(rows.items.size()));
    }
  }
  std::swap(linked_[pass][block], spare_linked_[pass][block]);
  PointAt(block, pass);
}

void TaskGraph::PointAt(std::int32_t block, Pass pass) {
  const Rows& rows = linked_[pass][block];
  Slot* slot = slots_.data() + groups_[block].first + (pass == kForwardPass ? 0 : rows.count());
  for (std::int32_t task = 0; task < rows.count(); ++task) {
    slot[task].next = rows.items.data() + rows.begin[task];
    slot[task].next_count = rows.begin[task + 1] - rows.begin[task];
  }
}

std::int32_t TaskGraph::HandleOf(std::int32_t weight, std::int32_t box) {
  std::vector<std::int32_t>& handles = handle_[weight];
  if (static_cast<std::size_t>(box) >= handles.size()) handles.resize(tables_->weights[weight].size(), -1);
  if (handles[box] < 0) {
    handles[box] = static_cast<std::int32_t>(handles_.size());
    handles_.push_back({weight, box});
  }
  return handles[box];
}

void TaskGraph::Keep() {
  for (const std::int32_t group : rebuilt_) {
    if (group < block_count()) is_new_[group] = 0;
  }
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    for (const std::int32_t block : relinked_[pass]) is_relinked_[pass][block] = 0;
    relinked_[pass].clear();
  }
  is_linked_[kForwardPass] = is_linked_[kBackwardPass] = false;
  rebuilt_.clear();
  changes_ = 0;
}

void TaskGraph::Undo() {
  for (std::size_t i = 0; i < changes_; ++i) std::swap(placements_[replaced_[i].block], replaced_[i].placement);
  for (const std::int32_t group : rebuilt_) {
    std::swap(groups_[group], spare_[group]);
    // Changed blocks have their old slots again, which still wait for what the group was. They were rebuilt
    // before any other group.
    for (std::size_t i = 0; i < groups_[group].attached.size(); ++i) {
      const std::int32_t block = groups_[group].attached[i].block;
      if (is_new_[block]) continue;
      Slot* slot = slots_.data() + groups_[block].first + (PassOf(group) == kForwardPass ? 0 : PassTasks(block));
      const std::vector<std::int32_t>& more = groups_[group].attached[i].waits;
      const std::vector<std::int32_t>& less = spare_[group].attached[i].waits;
      for (std::size_t t = 0; t < more.size(); ++t) slot[t].waits += more[t];
      for (std::size_t t = 0; t < less.size(); ++t) slot[t].waits -= less[t];
    }
  }
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    if (!is_linked_[pass]) continue;
    for (const std::int32_t block : relinked_[pass]) {
      if (pass == kBackwardPass && !problem_->blocks[block].needs_backward) continue;
      std::swap(linked_[pass][block], spare_linked_[pass][block]);
      if (!is_new_[block]) PointAt(block, pass);
    }
  }
  Keep();
}

// -- building ---------------------------------------------------------------------------------------------

void TaskGraph::Build(std::int32_t group, Group* built) {
  draft_.Clear();
  const std::int32_t value = group - block_count();
  if (value < 0) {
    BuildCompute(group);
  } else if (value < value_count()) {
    AddForward(value, WrittenOf(value));
  } else if (value < 2 * value_count()) {
    const bool has_gradient = problem_->values[value - value_count()].is_differentiable;
    if (has_gradient) AddBackward(value - value_count(), WrittenOf(value - value_count()));
  } else {
    BuildShelf(value - 2 * value_count(), built);
  }
}

// Makes room for this many slots.
void TaskGraph::Reserve(std::int32_t count, Group* group) {
  if (count <= group->capacity) return;
  if (group->capacity > 0) unused_[std::bit_width(static_cast<unsigned>(group->capacity)) - 1].push_back(group->first);
  group->capacity = static_cast<std::int32_t>(std::bit_ceil(static_cast<unsigned>(count)));
  std::vector<std::int32_t>& unused = unused_[std::bit_width(static_cast<unsigned>(group->capacity)) - 1];
  if (unused.empty()) {
    group->first = static_cast<std::int32_t>(slots_.size());
    slots_.resize(slots_.size() + group->capacity);
    labels_.resize(slots_.size());
  } else {
    group->first = unused.back();
    unused.pop_back();
  }
}

// Turns the draft into slots and rows of successors.
void TaskGraph::Install(std::int32_t number, Group* built) {
  built->tasks = draft_.tasks();
  built->gates = draft_.gates();
  Reserve(built->size(), built);
  Slot* own = slots_.data() + built->first;
  built->members.assign(draft_.members_.begin(), draft_.members_.end());
  const Member* members = built->members.data();
  for (std::int32_t i = 0; i < built->tasks; ++i) {
    const Draft::Task& task = draft_.tasks_[i];
    own[i] = {{task.duration_s}, task.order, nullptr, 0, task.resource, 0, number, {}};
    if (task.members > 0) {
      own[i].members = members;
      own[i].resource = Slot::BatchOf(task.members);
      members += task.members;
    }
    labels_[built->first + i] = {task.kind, task.size_bytes};
  }
  for (std::int32_t i = built->tasks; i < built->size(); ++i) own[i] = {{0}, 0, nullptr, 0, Slot::kGate, 0, number, {}};
  built->successors.begin.assign(built->size() + 1, 0);
  for (Attachment& attachment : built->attached) {
    const std::int32_t tasks = PassTasks(attachment.block);
    attachment.successors.begin.assign(tasks + 1, 0);
    attachment.waits.assign(tasks, 0);
  }
  const auto rows_of = [built](Ref from) -> Rows& {
    return from.part < 0 ? built->successors : built->attached[from.part].successors;
  };
  const auto place_of = [built](Ref ref) { return ref.part == Ref::kGate ? built->tasks + ref.task : ref.task; };
  for (const Draft::Edge& edge : draft_.edges_) {
    ++rows_of(edge.from).begin[place_of(edge.from) + 1];
    if (edge.to.part < 0) {
      ++own[place_of(edge.to)].waits;
    } else {
      ++built->attached[edge.to.part].waits[edge.to.task];
    }
  }
  const bool is_forward = PassOf(number) == kForwardPass;
  const auto reserve = [](Rows* rows) {
    for (std::size_t i = 1; i < rows->begin.size(); ++i) rows->begin[i] += rows->begin[i - 1];
    rows->items.resize(rows->begin.back());
  };
  const auto first_of = [this, is_forward](std::int32_t block) {
    return groups_[block].first + (is_forward ? 0 : PassTasks(block));
  };
  reserve(&built->successors);
  for (Attachment& attachment : built->attached) reserve(&attachment.successors);
  for (const Draft::Edge& edge : draft_.edges_) {
    Rows& rows = rows_of(edge.from);
    const std::int32_t base = edge.to.part < 0 ? built->first : first_of(built->attached[edge.to.part].block);
    rows.items[rows.begin[place_of(edge.from)]++] = base + place_of(edge.to);
  }
  // Filling moved every row's begin to its end, which is the next row's begin.
  const auto shift_back = [](Rows* rows) {
    for (std::size_t i = rows->begin.size() - 1; i > 0; --i) rows->begin[i] = rows->begin[i - 1];
    rows->begin[0] = 0;
  };
  shift_back(&built->successors);
  for (Attachment& attachment : built->attached) shift_back(&attachment.successors);
  for (std::int32_t i = 0; i < built->size(); ++i) {
    own[i].next = built->successors.items.data() + built->successors.begin[i];
    own[i].next_count = built->successors.begin[i + 1] - built->successors.begin[i];
  }
  if (!built->weights.empty()) FinishShelf(built);
}

// -- the whole --------------------------------------------------------------------------------------------

FlatTasks TaskGraph::Flat() const {
  // Every task: its slot, and its place in the batch if that is one.
  struct FlatTask {
    TaskOrder order;
    std::int32_t slot;
    std::int32_t member;
  };
  std::vector<FlatTask> tasks;
  for (const Group& group : groups_) {
    for (std::int32_t slot = group.first; slot < group.first + group.tasks; ++slot) {
      const std::int32_t members = slots_[slot].is_batch() ? slots_[slot].member_count() : 1;
      for (std::int32_t i = 0; i < members; ++i) {
        tasks.push_back({slots_[slot].order + static_cast<TaskOrder>(i), slot, i});
      }
    }
  }
  std::sort(tasks.begin(), tasks.end(), [](const FlatTask& a, const FlatTask& b) { return a.order < b.order; });
  std::vector<std::int32_t> id(slots_.size(), -1);  // of the first task of a slot; the others follow
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].member == 0) id[tasks[i].slot] = static_cast<std::int32_t>(i);
  }
  const auto for_each_id = [&](std::int32_t slot, const auto& visit) {
    const std::int32_t members = slots_[slot].is_batch() ? slots_[slot].member_count() : 1;
    for (std::int32_t i = 0; i < members; ++i) visit(id[slot] + i);
  };

  // Gates are left out: who waits for a gate waits for all that the gate waits for.
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;  // task, what it waits for
  const auto for_each_task_after = [this](const auto& self, const Slot& slot, const auto& visit) -> void {
    ForEachSuccessor(slot, [&](std::int32_t next) {
      if (slots_[next].resource == Slot::kGate) {
        self(self, slots_[next], visit);
      } else {
        visit(next);
      }
    });
  };
  for (const FlatTask& task : tasks) {
    const std::int32_t before = id[task.slot] + task.member;
    const Slot& slot = slots_[task.slot];
    for_each_task_after(for_each_task_after, slot, [&](std::int32_t next) {
      for_each_id(next, [&](std::int32_t after) { edges.emplace_back(after, before); });
    });
    // The update of a piece waits for its own device's gradients too, besides the all-reduce.
    for (std::int32_t i = 0; i < slot.next_count; ++i) {
      if (slot.next[i] >= 0) continue;
      const std::int32_t update = OfWeight(handles_[~slot.next[i]].weight).update_of_device[slot.resource];
      std::int32_t member = 0;
      if (slots_[update].is_batch()) {
        while (slots_[update].members[member].resource != slot.resource) ++member;
      }
      edges.emplace_back(id[update] + member, before);
    }
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  FlatTasks flat;
  flat.after_begin.assign(tasks.size() + 1, 0);
  for (const auto& [task, before] : edges) {
    ++flat.after_begin[task + 1];
    flat.after.push_back(before);
  }
  for (std::size_t i = 1; i <= tasks.size(); ++i) flat.after_begin[i] += flat.after_begin[i - 1];
  for (const FlatTask& task : tasks) {
    const Slot& slot = slots_[task.slot];
    flat.kind.push_back(labels_[task.slot].kind);
    flat.resource.push_back(slot.is_batch() ? slot.members[task.member].resource : slot.resource);
    flat.duration_s.push_back(slot.is_batch() ? slot.members[task.member].duration_s : slot.duration_s);
    flat.size_bytes.push_back(labels_[task.slot].size_bytes);
  }
  return flat;
}

}  // namespace soapstone

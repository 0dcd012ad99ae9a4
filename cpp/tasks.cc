#include "tasks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

namespace soapstone {
namespace {

constexpr std::size_t kMostCuts = 4096;  // remembered for each weight

// Adds a row: where the copies of some shards run, each device once.
void AppendDevices(const Placement& placement, std::span<const std::int32_t> shards, Rows* rows) {
  const auto begin = static_cast<std::ptrdiff_t>(rows->items.size());
  for (const std::int32_t shard : shards) {
    for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
      const std::int32_t device = placement.devices[shard * placement.copies + copy];
      if (std::find(rows->items.begin() + begin, rows->items.end(), device) == rows->items.end()) {
        rows->items.push_back(device);
      }
    }
  }
  rows->begin.push_back(static_cast<std::int32_t>(rows->items.size()));
}

void Clear(Rows* rows) {
  rows->begin.assign(1, 0);
  rows->items.clear();
}

bool Holds(std::span<const std::int32_t> devices, std::int32_t device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

// Calls visit(place in the placement's devices) for the copies of some shards on one device.
template <typename Visit>
void ForEachOn(const Placement& placement, std::span<const std::int32_t> shards, std::int32_t device,
               const Visit& visit) {
  for (const std::int32_t shard : shards) {
    for (std::int32_t copy = 0; copy < placement.copies; ++copy) {
      const std::int32_t pc = shard * placement.copies + copy;
      if (placement.devices[pc] == device) visit(pc);
    }
  }
}

// The turn of each device among those that need something: its rank. `turns` has ones where it does.
void RankTurns(std::vector<std::int32_t>* turns) {
  std::int32_t rank = 0;
  for (std::int32_t& turn : *turns) {
    if (turn != 0) turn = rank++;
  }
}

// Whether all devices of a placement are different.
bool IsSpread(const Placement& placement) {
  for (std::size_t i = 0; i < placement.devices.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (placement.devices[i] == placement.devices[j]) return false;
    }
  }
  return true;
}

std::vector<std::int32_t> Sorted(const std::set<std::int32_t>& numbers) { return {numbers.begin(), numbers.end()}; }

}  // namespace

TaskGraph::TaskGraph(const Problem* problem, BoxTables* tables, Draft::Batches batches)
    : problem_(problem),
      tables_(tables),
      placements_(problem->blocks.size()),
      groups_(problem->blocks.size() + 2 * problem->values.size() + problem->weights.size()),
      unused_(32),
      is_stale_(groups_.size(), 1),
      is_new_(problem->blocks.size(), 0),
      writer_(problem->values.size(), -1),
      readers_(problem->values.size()),
      users_(problem->weights.size()),
      first_user_(problem->weights.size(), -1),
      is_covered_(problem->values.size(), 0),
      value_rank_(problem->values.size(), 0),
      weight_rank_(problem->weights.size(), 0),
      writers_(problem->blocks.size()),
      sharers_(problem->blocks.size()),
      draft_(&problem->machine, batches),
      turns_(problem->machine.device_count, 0),
      cuts_(problem->weights.size()) {
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
    for (const std::int32_t weight : weights) touched_[kBackwardPass][block].push_back(WeightGroup(weight));
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
    Group& group = groups_[WeightGroup(static_cast<std::int32_t>(weight))];
    for (const std::int32_t user : users_[weight]) {
      group.attached.push_back({user, {}, {}});
      sharers[user].insert(users_[weight].begin(), users_[weight].end());
    }
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

void TaskGraph::Begin(std::int32_t block, const Placement& placement) {
  changed_ = block;
  std::swap(replaced_, placements_[block]);
  placements_[block] = placement;
}

void TaskGraph::Rebuild(std::int32_t group) {
  Build(group, &spare_[group]);
  std::swap(groups_[group], spare_[group]);
  rebuilt_.push_back(group);
  if (group < block_count()) {
    is_new_[group] = 1;
  } else {
    Attach(group, groups_[group], spare_[group]);
  }
}

// Makes the tasks of attached blocks wait for what a group is now and not for what it was. Blocks rebuilt in
// this change wait for nothing of what it was.
void TaskGraph::Attach(std::int32_t group, const Group& to, const Group& from) {
  const Pass pass = PassOf(group);
  for (std::size_t i = 0; i < to.attached.size(); ++i) {
    const std::int32_t block = to.attached[i].block;
    std::int32_t* waits = waits_.data() + groups_[block].first + (pass == kForwardPass ? 0 : PassTasks(block));
    const std::vector<std::int32_t>& more = to.attached[i].waits;
    const std::vector<std::int32_t>& less = from.attached[i].waits;
    for (std::size_t t = 0; t < more.size(); ++t) waits[t] += more[t];
    if (is_new_[block]) continue;
    for (std::size_t t = 0; t < less.size(); ++t) waits[t] -= less[t];
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
    handles_.push_back({WeightGroup(weight), box});
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
  changed_ = -1;
}

void TaskGraph::Undo() {
  if (changed_ >= 0) std::swap(placements_[changed_], replaced_);
  for (const std::int32_t group : rebuilt_) {
    std::swap(groups_[group], spare_[group]);
    // The changed block has its old slots again, which still wait for what the group was.
    for (std::size_t i = 0; i < groups_[group].attached.size(); ++i) {
      const std::int32_t block = groups_[group].attached[i].block;
      if (block == changed_) continue;
      std::int32_t* waits =
          waits_.data() + groups_[block].first + (PassOf(group) == kForwardPass ? 0 : PassTasks(block));
      const std::vector<std::int32_t>& more = groups_[group].attached[i].waits;
      const std::vector<std::int32_t>& less = spare_[group].attached[i].waits;
      for (std::size_t t = 0; t < more.size(); ++t) waits[t] += more[t];
      for (std::size_t t = 0; t < less.size(); ++t) waits[t] -= less[t];
    }
  }
  for (const Pass pass : {kForwardPass, kBackwardPass}) {
    if (!is_linked_[pass]) continue;
    for (const std::int32_t block : relinked_[pass]) {
      if (pass == kBackwardPass && !problem_->blocks[block].needs_backward) continue;
      std::swap(linked_[pass][block], spare_linked_[pass][block]);
      if (block != changed_) PointAt(block, pass);
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
    BuildWeight(value - 2 * value_count(), built);
    return;
  }
  Install(group, built);
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
    group_of_.resize(slots_.size());
    waits_.resize(slots_.size());
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
  std::int32_t* waits = waits_.data() + built->first;
  built->members.assign(draft_.members_.begin(), draft_.members_.end());
  const Member* members = built->members.data();
  for (std::int32_t i = 0; i < built->tasks; ++i) {
    own[i] = {{draft_.duration_s_[i]}, draft_.order_[i], nullptr, 0, draft_.resource_[i]};
    if (const std::int32_t count = draft_.member_count_[i]; count > 0) {
      own[i].members = members;
      own[i].resource = Slot::kFirstBatch + 1 - count;
      members += count;
    }
    labels_[built->first + i] = {draft_.kind_[i], draft_.size_bytes_[i]};
  }
  for (std::int32_t i = built->tasks; i < built->size(); ++i) own[i] = {{0}, 0, nullptr, 0, Slot::kGate};
  std::fill(waits, waits + built->size(), 0);
  std::fill(group_of_.begin() + built->first, group_of_.begin() + built->first + built->size(), number);
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
      ++waits[place_of(edge.to)];
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
}

void TaskGraph::BuildCompute(std::int32_t block) {
  const Placement& placement = placements_[block];
  const Layout& layout = *placement.layout;
  const MachineData& machine = problem_->machine;
  const bool has_backward = problem_->blocks[block].needs_backward;
  const std::int64_t back_position = static_cast<std::int64_t>(block_count()) - 1 - block;
  const std::int32_t last = layout.segments - 1;
  const auto places = static_cast<std::int32_t>(placement.devices.size());
  for (const bool backward : {false, true}) {
    if (backward && !has_backward) break;
    const std::vector<double>& seconds = backward ? layout.backward_s : layout.forward_s;
    for (std::int32_t segment = 0; segment < layout.segments; ++segment) {
      const TaskOrder order = backward ? Order(kBackwardPass, back_position, kComputeClass, last - segment, 0)
                                       : Order(kForwardPass, block, kComputeClass, segment, 0);
      for (std::int32_t pc = 0; pc < places; ++pc) {
        const std::int32_t device = placement.devices[pc];
        const std::int32_t shard = pc / placement.copies;
        const std::size_t cost = (machine.kind[device] * layout.segments + segment) * layout.parts + shard;
        const Ref task = draft_.Add(backward ? TaskKind::kBackward : TaskKind::kForward, device, seconds[cost], 0,
                                    order + static_cast<TaskOrder>(pc));
        if (backward) {
          draft_.Wait(task, {Ref::kOwn, segment == last ? Place(block, last, pc)
                                                        : PassTasks(block) + Place(block, segment + 1, pc)});
        } else if (segment > 0) {
          draft_.Wait(task, {Ref::kOwn, Place(block, segment - 1, pc)});
        }
      }
    }
  }
  if (layout.seams.empty()) return;
  const bool has_classes = placement.copies == 1 && IsSpread(placement);
  TaskOrder forward_order = 0;
  TaskOrder backward_order = 0;
  for (std::size_t s = 0; s < layout.seams.size(); ++s) {
    const SeamData& seam = layout.seams[s];
    if (s == 0 || layout.seams[s - 1].segment != seam.segment) {
      forward_order = Order(kForwardPass, block, kSeamClass, seam.segment, 0);
      backward_order = Order(kBackwardPass, back_position, kSeamClass, last - seam.segment, 0);
    }
    for (const bool backward : {false, true}) {
      if (backward && !(seam.is_mutual && has_backward)) break;
      TaskOrder* order = backward ? &backward_order : &forward_order;
      if (has_classes && seam.classes.count() > 0) {
        AddSeamInClasses(block, seam, backward, order);
      } else {
        AddSeam(block, seam, backward, order);
      }
    }
  }
}

void TaskGraph::AddSeamInClasses(std::int32_t block, const SeamData& seam, bool backward, TaskOrder* order) {
  const Placement& placement = placements_[block];
  const std::int32_t skipped = backward ? PassTasks(block) : 0;
  // Moves come in the order of their first devices.
  std::vector<std::pair<std::int32_t, std::int32_t>>& rows = seam_rows_;
  rows.clear();
  for (std::int32_t row = 0; row < seam.classes.count(); ++row) {
    if (seam.classes[row].size() < 2) continue;
    std::int32_t least = problem_->machine.device_count;
    for (const std::int32_t shard : seam.classes[row]) least = std::min(least, placement.devices[shard]);
    rows.emplace_back(least, row);
  }
  std::sort(rows.begin(), rows.end());
  for (const auto& [least, row] : rows) {
    distinct_.clear();
    for (const std::int32_t shard : seam.classes[row]) distinct_.push_back(placement.devices[shard]);
    std::sort(distinct_.begin(), distinct_.end());
    const std::int64_t size_bytes = Volume(seam.boxes[seam.classes[row][0]]) * seam.item_bytes;
    const auto [enter, leave] = draft_.AddMove(Pattern::kAllReduce, distinct_, size_bytes, order);
    for (const std::int32_t shard : seam.classes[row]) {
      draft_.Wait(enter, {Ref::kOwn, skipped + Place(block, seam.segment + (backward ? 1 : 0), shard)});
      draft_.Wait({Ref::kOwn, skipped + Place(block, seam.segment + (backward ? 0 : 1), shard)}, leave);
    }
  }
}

void TaskGraph::AddSeam(std::int32_t block, const SeamData& seam, bool backward, TaskOrder* order) {
  const Placement& placement = placements_[block];
  const Alike& behind = placement.layout->alike[seam.alike];
  Rows devices;
  for (std::int32_t i = 0; i < behind.count(); ++i) AppendDevices(placement, behind[i], &devices);
  std::vector<Source> sources;
  for (std::int32_t i = 0; i < behind.count(); ++i) {
    sources.push_back({seam.summands[i], &seam.boxes[behind[i][0]], devices[i]});
  }
  std::set<std::pair<std::int32_t, BoxBounds>> wanted;
  for (std::size_t pc = 0; pc < placement.devices.size(); ++pc) {
    wanted.emplace(placement.devices[pc], seam.boxes[pc / placement.copies]);
  }
  std::vector<Sink> sinks;
  for (const auto& [device, box] : wanted) sinks.push_back({&box, device});
  // The tasks of some shards, on one device, in one segment.
  const auto on = [&](std::span<const std::int32_t> shards, std::int32_t device, std::int32_t segment) {
    std::vector<Ref> found;
    ForEachOn(placement, shards, device, [&](std::int32_t pc) {
      found.push_back({Ref::kOwn, (backward ? PassTasks(block) : 0) + Place(block, segment, pc)});
    });
    return found;
  };
  const auto gives = [&](std::int32_t source, std::int32_t device) {
    return on(behind[source], device, seam.segment + (backward ? 1 : 0));
  };
  const auto takes = [&](std::int32_t sink) {
    std::vector<Ref> found;
    for (std::int32_t i = 0; i < behind.count(); ++i) {
      if (!Intersection(*sources[i].box, *sinks[sink].box)) continue;
      const std::vector<Ref> more = on(behind[i], sinks[sink].device, seam.segment + (backward ? 0 : 1));
      found.insert(found.end(), more.begin(), more.end());
    }
    return found;
  };
  draft_.AddExchange(MakeExchange(problem_->machine, sources, sinks), sinks, seam.item_bytes, gives, takes, order);
}

const Written& TaskGraph::WrittenOf(std::int32_t value) const {
  const std::vector<Written>& written = placements_[writer_[value]].layout->written;
  return *std::find_if(written.begin(), written.end(),
                       [value](const Written& each) { return each.port.subject == value; });
}

void TaskGraph::AddForward(std::int32_t value, const Written& written) {
  const ValueData& data = problem_->values[value];
  const MachineData& machine = problem_->machine;
  BoxTable& table = tables_->values[value];
  const std::int32_t writer = writer_[value];
  const std::vector<std::int32_t>& readers = readers_[value];
  const Placement& from = placements_[writer];
  const auto of_writer = static_cast<std::int32_t>(readers.size());
  Clear(&holders_);
  for (std::int32_t entry = 0; entry < written.shards.count(); ++entry) {
    AppendDevices(from, written.shards[entry], &holders_);
  }
  if (holders_.items.size() != static_cast<std::size_t>(holders_.count())) {
    std::fill(turns_.begin(), turns_.end(), 0);
    for (const std::int32_t reader : readers) {
      const Placement& to = placements_[reader];
      for (const Port& port : to.layout->read) {
        if (port.subject != value) continue;
        for (std::size_t pc = 0; pc < to.devices.size(); ++pc) {
          if (port.boxes[pc / to.copies] != BoxTable::kNone) turns_[to.devices[pc]] = 1;
        }
      }
    }
    RankTurns(&turns_);
  }
  const auto givers = [&](std::int32_t source, std::int32_t device, const auto& visit) {
    ForEachOn(from, written.shards[source], device, [&](std::int32_t pc) {
      visit(Ref{of_writer, Place(writer, written.port.segment, pc)});
    });
  };
  parts_.clear();
  for (std::size_t r = 0; r < readers.size(); ++r) {
    const std::int32_t reader = readers[r];
    const Placement& to = placements_[reader];
    for (const Port& port : to.layout->read) {
      if (port.subject != value) continue;
      for (std::int32_t shard = 0; shard < to.layout->parts; ++shard) {
        const std::int32_t box = port.boxes[shard];
        if (box == BoxTable::kNone) continue;
        written.ForEachUnder(table.Bounds(box), [&](std::int32_t source, std::int64_t volume) {
          const std::span<const std::int32_t> devices = holders_[source];
          for (std::int32_t copy = 0; copy < to.copies; ++copy) {
            const std::int32_t pc = shard * to.copies + copy;
            const std::int32_t device = to.devices[pc];
            const Ref task = {static_cast<std::int32_t>(r), Place(reader, port.segment, pc)};
            if (Holds(devices, device)) {
              givers(source, device, [&](Ref before) { draft_.Wait(task, before); });
              continue;
            }
            const std::int32_t giver = Nearest(machine, devices, device, turns_[device]);
            parts_.push_back({giver, device, written.box[source], box, source, task, volume});
          }
        });
      }
    }
  }
  const auto adds = [&](const std::vector<std::int32_t>& sources) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        const std::int32_t a = sources[i];
        const std::int32_t b = sources[j];
        if (written.summand[a] != written.summand[b] && written.box[a] == written.box[b]) return true;
      }
    }
    return false;
  };
  TaskOrder order = Order(kForwardPass, writer, kValueClass, value_rank_[value], 0);
  draft_.AddParts(&parts_, &table, data.item_bytes, givers, adds, &order);
}

// Adds what a block's ports of one kind read of a value or weight, and compute the gradient of; where they
// run goes to `holders_`.
void TaskGraph::CollectReadings(std::int32_t attachment, std::int32_t block, std::int32_t subject,
                                const std::vector<Port>& ports) {
  const Placement& placement = placements_[block];
  for (const Port& port : ports) {
    if (port.subject != subject || !port.gives_gradient) continue;
    const Alike& alike = placement.layout->alike[port.alike];
    for (std::int32_t i = 0; i < alike.count(); ++i) {
      const std::int32_t box = port.boxes[alike[i][0]];
      if (box == BoxTable::kNone) continue;
      readings_.push_back({attachment, block, port.segment, alike[i], box});
      AppendDevices(placement, alike[i], &holders_);
    }
  }
}

void TaskGraph::AddBackward(std::int32_t value, const Written& written) {
  const ValueData& data = problem_->values[value];
  const MachineData& machine = problem_->machine;
  BoxTable& table = tables_->values[value];
  const std::int32_t writer = writer_[value];
  const std::vector<std::int32_t>& readers = readers_[value];
  const Placement& to = placements_[writer];
  const auto of_writer = static_cast<std::int32_t>(readers.size());
  readings_.clear();
  Clear(&holders_);
  for (std::size_t r = 0; r < readers.size(); ++r) {
    CollectReadings(static_cast<std::int32_t>(r), readers[r], value, placements_[readers[r]].layout->read);
  }
  if (holders_.items.size() != readings_.size()) {
    std::fill(turns_.begin(), turns_.end(), 0);
    for (const std::int32_t device : to.devices) turns_[device] = 1;
    RankTurns(&turns_);
  }
  const auto givers = [&](std::int32_t source, std::int32_t device, const auto& visit) {
    const Reading& reading = readings_[source];
    ForEachOn(placements_[reading.block], reading.shards, device, [&](std::int32_t pc) {
      visit(Ref{reading.attachment, Place(reading.block, reading.segment, pc)});
    });
  };
  parts_.clear();
  for (std::size_t i = 0; i < readings_.size(); ++i) {
    const Reading& reading = readings_[i];
    const auto source = static_cast<std::int32_t>(i);
    const std::span<const std::int32_t> devices = holders_[source];
    written.ForEachUnder(table.Bounds(reading.box), [&](std::int32_t entry, std::int64_t volume) {
      for (const std::int32_t shard : written.shards[entry]) {
        for (std::int32_t copy = 0; copy < to.copies; ++copy) {
          const std::int32_t pc = shard * to.copies + copy;
          const std::int32_t device = to.devices[pc];
          const Ref task = {of_writer, Place(writer, written.port.segment, pc)};
          if (Holds(devices, device)) {
            givers(source, device, [&](Ref before) { draft_.Wait(task, before); });
            continue;
          }
          const std::int32_t giver = Nearest(machine, devices, device, turns_[device]);
          parts_.push_back({giver, device, reading.box, written.box[entry], source, task, volume});
        }
      }
    });
  }
  const auto adds = [&](const std::vector<std::int32_t>& sources) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (table.Overlaps(readings_[sources[i]].box, readings_[sources[j]].box)) return true;
      }
    }
    return false;
  };
  TaskOrder order = Order(kBackwardPass, block_count() - 1 - writer, kValueClass, value_rank_[value], 0);
  draft_.AddParts(&parts_, &table, data.item_bytes, givers, adds, &order);
}

// -- weights ----------------------------------------------------------------------------------------------

bool TaskGraph::IsPlain(std::int32_t weight) const {
  for (const std::int32_t user : users_[weight]) {
    const Placement& placement = placements_[user];
    if (placement.copies > 1) return false;
    for (const Port& port : placement.layout->weights) {
      if (port.subject != weight || !port.gives_gradient) continue;
      const Alike& alike = placement.layout->alike[port.alike];
      if (alike.items.size() != static_cast<std::size_t>(alike.count())) return false;
    }
  }
  return true;
}

void TaskGraph::BuildWeight(std::int32_t weight, Group* built) {
  built->has_gates = IsPlain(weight);
  if (built->has_gates) {
    AddPlainGradients(weight, built);
    return;
  }
  AddGradients(weight, built);
  Install(WeightGroup(weight), built);
  for (std::int32_t& slot : built->update_of_device) slot = slot < 0 ? -1 : built->first + slot;
}

// The pieces of boxes cut at each other's borders, so that any two are equal or apart.
const TaskGraph::Cut& TaskGraph::CutOf(std::int32_t weight, const std::vector<std::int32_t>& boxes) {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (const std::int32_t box : boxes) {
    hash = (hash ^ static_cast<std::uint64_t>(box)) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  auto& known = cuts_[weight];
  const auto found = known.find(hash);
  if (found != known.end() && found->second.first == boxes) return found->second.second;
  if (known.size() >= kMostCuts) known.clear();

  const BoxTable& table = tables_->weights[weight];
  const auto rank = static_cast<std::size_t>(problem_->weights[weight].rank);
  std::vector<std::vector<std::int64_t>> edges(rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    for (const std::int32_t box : boxes) {
      edges[axis].push_back(table.Bounds(box)[2 * axis]);
      edges[axis].push_back(table.Bounds(box)[2 * axis + 1]);
    }
    std::sort(edges[axis].begin(), edges[axis].end());
    edges[axis].erase(std::unique(edges[axis].begin(), edges[axis].end()), edges[axis].end());
  }
  std::int64_t atoms = 1;
  for (const std::vector<std::int64_t>& each : edges) atoms *= static_cast<std::int64_t>(each.size()) - 1;
  // Every atom of the grid of edges, by the boxes that cover it.
  std::vector<std::vector<std::int32_t>> covered(boxes.size());
  std::vector<std::int32_t> covers(atoms, 0);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const auto bounds = table.Bounds(boxes[i]);
    std::vector<std::int32_t> inside = {0};
    for (std::size_t axis = 0; axis < rank; ++axis) {
      const auto at = [&](std::int64_t edge) {
        return static_cast<std::int32_t>(std::lower_bound(edges[axis].begin(), edges[axis].end(), edge) -
                                         edges[axis].begin());
      };
      std::vector<std::int32_t> longer;
      for (const std::int32_t prefix : inside) {
        for (std::int32_t cell = at(bounds[2 * axis]); cell < at(bounds[2 * axis + 1]); ++cell) {
          longer.push_back(prefix * (static_cast<std::int32_t>(edges[axis].size()) - 1) + cell);
        }
      }
      inside = std::move(longer);
    }
    for (const std::int32_t atom : inside) ++covers[atom];
    covered[i] = std::move(inside);
  }
  const bool is_apart = std::all_of(covers.begin(), covers.end(), [](std::int32_t count) { return count < 2; });
  Cut cut;
  if (is_apart) {
    std::vector<std::int32_t> sorted = boxes;
    std::sort(sorted.begin(), sorted.end(), [&table](std::int32_t a, std::int32_t b) { return table.Less(a, b); });
    for (const std::int32_t box : sorted) {
      cut.pieces.emplace_back(table.Bounds(box).begin(), table.Bounds(box).end());
      cut.volumes.push_back(table.Volume(box));
    }
    for (const std::int32_t box : boxes) {
      const auto piece = static_cast<std::int32_t>(std::find(sorted.begin(), sorted.end(), box) - sorted.begin());
      cut.of_box.Append({&piece, 1});
    }
  } else {
    std::vector<std::int32_t> piece_of(atoms, -1);
    for (std::int64_t atom = 0; atom < atoms; ++atom) {
      if (covers[atom] == 0) continue;
      piece_of[atom] = static_cast<std::int32_t>(cut.pieces.size());
      BoxBounds bounds(2 * rank);
      std::int64_t rest = atom;
      for (std::size_t axis = rank; axis-- > 0;) {
        const auto cells = static_cast<std::int64_t>(edges[axis].size()) - 1;
        bounds[2 * axis] = edges[axis][rest % cells];
        bounds[2 * axis + 1] = edges[axis][rest % cells + 1];
        rest /= cells;
      }
      cut.volumes.push_back(Volume(bounds));
      cut.pieces.push_back(std::move(bounds));
    }
    for (std::vector<std::int32_t>& row : covered) {
      for (std::int32_t& atom : row) atom = piece_of[atom];
      cut.of_box.Append(row);
    }
  }
  auto& kept = known[hash];
  kept = {boxes, std::move(cut)};
  return kept.second;
}

void TaskGraph::AddUpdates(std::int32_t weight, const std::vector<std::int64_t>& held_bytes, bool is_batch,
                           Group* built) {
  const MachineData& machine = problem_->machine;
  built->update_of_device.assign(machine.device_count, -1);
  for (std::int32_t device = 0; device < machine.device_count; ++device) {
    if (held_bytes[device] == 0) continue;
    const std::int32_t kind = machine.kind[device];
    const double traffic = static_cast<double>(held_bytes[device]) * machine.update_bytes_per_byte;
    const double seconds = std::max(machine.launch_s[kind], traffic / machine.memory_bytes_per_s[kind]);
    if (is_batch) {
      draft_.AddMember(device, seconds);
      built->update_of_device[device] = 0;
      continue;
    }
    const TaskOrder order = Order(kUpdatePass, weight, kComputeClass, 0, device);
    built->update_of_device[device] = draft_.Add(TaskKind::kUpdate, device, seconds, 0, order).task;
  }
  if (is_batch) draft_.AddBatch(TaskKind::kUpdate, 0, Order(kUpdatePass, weight, kComputeClass, 0, 0));
}

void TaskGraph::AddPlainGradients(std::int32_t weight, Group* built) {
  const std::int32_t devices = problem_->machine.device_count;
  const auto words = static_cast<std::size_t>(devices + 63) / 64;
  const auto for_each_reading = [&](const auto& visit) {
    for (const std::int32_t user : users_[weight]) {
      const Placement& placement = placements_[user];
      for (const Port& port : placement.layout->weights) {
        if (port.subject != weight || !port.gives_gradient) continue;
        for (std::int32_t shard = 0; shard < placement.layout->parts; ++shard) {
          if (port.boxes[shard] != BoxTable::kNone) visit(port.boxes[shard], placement.devices[shard]);
        }
      }
    }
  };
  std::vector<std::int32_t>& gate_of_box = built->gate_of_box;
  gate_of_box.resize(std::max(gate_of_box.size(), tables_->weights[weight].size()));
  box_place_.resize(std::max(box_place_.size(), gate_of_box.size()), -1);
  // The boxes read, and how many shards read each.
  distinct_.clear();
  for_each_reading([&](std::int32_t box, std::int32_t) {
    if (box_place_[box] < 0) distinct_.push_back(box);
    box_place_[box] = 0;
  });
  std::sort(distinct_.begin(), distinct_.end());
  for (std::size_t i = 0; i < distinct_.size(); ++i) box_place_[distinct_[i]] = static_cast<std::int32_t>(i);
  counts_.assign(distinct_.size(), 0);
  box_holding_.assign(distinct_.size() * words, 0);
  for_each_reading([&](std::int32_t box, std::int32_t device) {
    ++counts_[box_place_[box]];
    box_holding_[box_place_[box] * words + device / 64] |= std::uint64_t{1} << (device % 64);
  });
  for (const std::int32_t box : distinct_) box_place_[box] = -1;

  const Cut& cut = CutOf(weight, distinct_);
  const std::size_t pieces = cut.volumes.size();
  holding_.assign(pieces * words, 0);
  for (std::size_t i = 0; i < distinct_.size(); ++i) {
    for (const std::int32_t piece : cut.of_box[static_cast<std::int32_t>(i)]) {
      for (std::size_t word = 0; word < words; ++word) {
        holding_[piece * words + word] |= box_holding_[i * words + word];
      }
    }
  }
  const std::int64_t item_bytes = problem_->weights[weight].item_bytes;
  const auto for_each_holder = [&](std::size_t piece, const auto& visit) {
    for (std::size_t word = 0; word < words; ++word) {
      for (std::uint64_t left = holding_[piece * words + word]; left != 0; left &= left - 1) {
        visit(static_cast<std::int32_t>(64 * word) + std::countr_zero(left));
      }
    }
  };
  held_bytes_.assign(devices, 0);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    for_each_holder(piece, [&](std::int32_t device) { held_bytes_[device] += cut.volumes[piece] * item_bytes; });
  }
  // All devices that hold the one piece update it as soon as the all-reduce is over.
  const bool is_batch =
      draft_.has_batches() && pieces == 1 &&
      std::count_if(held_bytes_.begin(), held_bytes_.end(), [](std::int64_t bytes) { return bytes > 0; }) > 1;
  AddUpdates(weight, held_bytes_, is_batch, built);
  // Where the gradient of a piece goes: to the gate of its all-reduce, or to its one holder's update.
  TaskOrder order = Order(kBackwardPass, block_count() - 1 - first_user_[weight], kWeightClass, weight_rank_[weight], 0);
  targets_.clear();
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    ring_.clear();
    for_each_holder(piece, [&](std::int32_t device) { ring_.push_back(device); });
    if (ring_.size() == 1) {
      targets_.push_back({Ref::kOwn, built->update_of_device[ring_[0]]});
      continue;
    }
    const auto [enter, leave] = draft_.AddMove(Pattern::kAllReduce, ring_, cut.volumes[piece] * item_bytes, &order);
    for (const std::int32_t device : ring_) {
      draft_.Wait({Ref::kOwn, built->update_of_device[device]}, leave);
      if (is_batch) break;
    }
    targets_.push_back(enter);
  }
  const std::int32_t first_gate = draft_.gates();
  for (std::size_t i = 0; i < distinct_.size(); ++i) {
    const Ref gate = draft_.AddGate();
    for (const std::int32_t piece : cut.of_box[static_cast<std::int32_t>(i)]) draft_.Wait(targets_[piece], gate);
  }
  Install(WeightGroup(weight), built);
  for (std::int32_t& slot : built->update_of_device) slot = slot < 0 ? -1 : built->first + slot;
  for (std::size_t i = 0; i < distinct_.size(); ++i) {
    const std::int32_t gate = built->first + built->tasks + first_gate + static_cast<std::int32_t>(i);
    gate_of_box[distinct_[i]] = gate;
    waits_[gate] = counts_[i];
  }
  // What an attachment would say is said by the gates.
  for (Attachment& attachment : built->attached) {
    Clear(&attachment.successors);
    attachment.waits.clear();
  }
}

void TaskGraph::AddGradients(std::int32_t weight, Group* built) {
  const MachineData& machine = problem_->machine;
  readings_.clear();
  Clear(&holders_);
  for (std::size_t u = 0; u < users_[weight].size(); ++u) {
    const std::int32_t user = users_[weight][u];
    CollectReadings(static_cast<std::int32_t>(u), user, weight, placements_[user].layout->weights);
  }
  std::vector<std::int32_t> boxes;
  for (const Reading& reading : readings_) boxes.push_back(reading.box);
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  const Cut& cut = CutOf(weight, boxes);
  const std::size_t pieces = cut.volumes.size();
  std::vector<std::vector<std::int32_t>> givers(pieces);
  for (std::size_t i = 0; i < readings_.size(); ++i) {
    const auto at = std::lower_bound(boxes.begin(), boxes.end(), readings_[i].box) - boxes.begin();
    for (const std::int32_t piece : cut.of_box[static_cast<std::int32_t>(at)]) {
      givers[piece].push_back(static_cast<std::int32_t>(i));
    }
  }
  const std::int64_t item_bytes = problem_->weights[weight].item_bytes;
  std::vector<std::set<std::int32_t>> holders(pieces);
  held_bytes_.assign(machine.device_count, 0);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    for (const std::int32_t giver : givers[piece]) holders[piece].insert(holders_[giver].begin(), holders_[giver].end());
    for (const std::int32_t device : holders[piece]) held_bytes_[device] += cut.volumes[piece] * item_bytes;
  }
  AddUpdates(weight, held_bytes_, false, built);
  TaskOrder order = Order(kBackwardPass, block_count() - 1 - first_user_[weight], kWeightClass, weight_rank_[weight], 0);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    std::vector<Source> sources;
    for (std::size_t i = 0; i < givers[piece].size(); ++i) {
      sources.push_back({static_cast<std::int32_t>(i), &cut.pieces[piece], holders_[givers[piece][i]]});
    }
    std::vector<Sink> sinks;
    for (const std::int32_t device : holders[piece]) sinks.push_back({&cut.pieces[piece], device});
    const auto gives = [&](std::int32_t source, std::int32_t device) {
      const Reading& reading = readings_[givers[piece][source]];
      std::vector<Ref> found;
      ForEachOn(placements_[reading.block], reading.shards, device, [&](std::int32_t pc) {
        found.push_back({reading.attachment, Place(reading.block, reading.segment, pc)});
      });
      return found;
    };
    const auto takes = [&](std::int32_t sink) {
      return std::array<Ref, 1>{Ref{Ref::kOwn, built->update_of_device[sinks[sink].device]}};
    };
    draft_.AddExchange(MakeExchange(machine, sources, sinks), sinks, item_bytes, gives, takes, &order);
  }
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
      const std::int32_t update = groups_[handles_[~slot.next[i]].group].update_of_device[slot.resource];
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

// Who a task or gate waits for: the task graph's edges read backwards, listed group by group when first asked
// for.
//
// Thread safety: Predecessors belong to the thread of their graph.

#ifndef SOAPSTONE_CPP_PREDECESSORS_H_
#define SOAPSTONE_CPP_PREDECESSORS_H_

#include <cstdint>
#include <vector>

#include "tasks.h"

namespace soapstone {

class Predecessors {
 public:
  // REQUIRES: graph outlives the predecessors.
  explicit Predecessors(const TaskGraph* graph)
      : graph_(*graph), lists_(graph->groups().size()), aside_(graph->groups().size()) {}

  // Says that a group was rebuilt for good.
  void Forget(std::int32_t group) { lists_[group].Forget(); }
  void ForgetAll() {
    for (Lists& lists : lists_) lists.Forget();
  }

  // Says that a group was rebuilt in a change that may be undone, and that it was undone.
  void PutAside(std::int32_t group) {
    std::swap(lists_[group], aside_[group]);
    lists_[group].Forget();
  }
  void TakeBack(std::int32_t group) { std::swap(lists_[group], aside_[group]); }

  // Calls visit(slot) for all that a task or gate waits for, once for each edge, except where
  // is_skipped(group) for the group of values or weights because of which a compute task waits.
  template <typename IsSkipped, typename Visit>
  void ForEach(std::int32_t slot, const IsSkipped& is_skipped, const Visit& visit) {
    const std::int32_t number = graph_.slots()[slot].group;
    const Group& group = graph_.groups()[number];
    const std::int32_t local = slot - group.first;
    const auto visit_row = [&visit](const Rows& rows, std::int32_t row) {
      if (row >= rows.count()) return;
      for (const std::int32_t before : rows[row]) visit(before);
    };
    visit_row(ListsOf(number).rows[0], local);
    if (number < graph_.block_count()) {
      const std::int32_t forward = graph_.PassTasks(number);
      const Pass pass = local < forward ? kForwardPass : kBackwardPass;
      for (const TaskGraph::Touch& touch : graph_.touching(number, pass)) {
        if (is_skipped(touch.group)) continue;
        visit_row(ListsOf(touch.group).rows[1 + touch.attachment], pass == kForwardPass ? local : local - forward);
      }
    }
    if (group.has_gates && local >= group.tasks) visit_row(GivingOf(number), local - group.tasks);
  }

 private:
  struct Lists {
    bool is_known = false;
    bool is_giving_known = false;
    // Those because of a group: of its own slots, then for each attachment of the block's tasks of its pass.
    std::vector<Rows> rows;
    Rows giving;  // by gate of a weight: the compute tasks that give a gradient by a handle

    void Forget() { is_known = is_giving_known = false; }
  };

  const Lists& ListsOf(std::int32_t group) {
    if (!lists_[group].is_known) List(group);
    return lists_[group];
  }
  const Rows& GivingOf(std::int32_t group) {
    if (!lists_[group].is_giving_known) ListGiving(group);
    return lists_[group].giving;
  }
  void List(std::int32_t group);
  void ListGiving(std::int32_t group);

  const TaskGraph& graph_;
  std::vector<Lists> lists_;  // by group
  std::vector<Lists> aside_;  // what they were before the change, or memory for the next
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PREDECESSORS_H_

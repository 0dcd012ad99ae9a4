#include "predecessors.h"

#include <span>

namespace soapstone {
namespace {

void Reset(Rows* rows, std::int32_t count) {
  rows->begin.assign(count + 1, 0);
  rows->items.clear();
}

// Fills rows that were reset: edges are counted, then put in place. for_each_edge calls back with the rows,
// the row and what comes before.
template <typename ForEachEdge>
void Fill(std::span<Rows> all, const ForEachEdge& for_each_edge) {
  for_each_edge([](Rows& rows, std::int32_t row, std::int32_t) { ++rows.begin[row + 1]; });
  for (Rows& rows : all) {
    for (std::size_t i = 1; i < rows.begin.size(); ++i) rows.begin[i] += rows.begin[i - 1];
    rows.items.resize(rows.begin.back());
  }
  for_each_edge([](Rows& rows, std::int32_t row, std::int32_t before) { rows.items[rows.begin[row]++] = before; });
  // Filling moved every row's begin to its end, which is the next row's begin.
  for (Rows& rows : all) {
    for (std::size_t i = rows.begin.size() - 1; i > 0; --i) rows.begin[i] = rows.begin[i - 1];
    rows.begin[0] = 0;
  }
}

}  // namespace

void Predecessors::List(std::int32_t number) {
  Lists& found = lists_[number];
  found.is_known = true;
  const Group& group = graph_.groups()[number];
  const bool is_forward = graph_.PassOf(number) == kForwardPass;
  found.rows.resize(1 + group.attached.size());
  Reset(&found.rows[0], group.size());
  for (std::size_t i = 0; i < group.attached.size(); ++i) {
    Reset(&found.rows[1 + i], group.attached[i].successors.count());
  }
  Fill(found.rows, [&](const auto& visit) {
    const auto visit_edge = [&](std::int32_t before, std::int32_t slot) {
      const std::int32_t block = graph_.slots()[slot].group;
      std::int32_t row = slot - graph_.groups()[block].first;
      if (block == number) {
        visit(found.rows[0], row, before);
        return;
      }
      if (row >= graph_.PassTasks(block)) row -= graph_.PassTasks(block);
      std::size_t i = 0;
      while (group.attached[i].block != block) ++i;
      visit(found.rows[1 + i], row, before);
    };
    for (std::int32_t i = 0; i < group.size(); ++i) {
      for (const std::int32_t next : group.successors[i]) visit_edge(group.first + i, next);
    }
    for (const Attachment& attachment : group.attached) {
      const std::int32_t skipped = is_forward ? 0 : graph_.PassTasks(attachment.block);
      const std::int32_t first = graph_.groups()[attachment.block].first + skipped;
      for (std::int32_t i = 0; i < attachment.successors.count(); ++i) {
        for (const std::int32_t next : attachment.successors[i]) visit_edge(first + i, next);
      }
    }
  });
}

void Predecessors::ListGiving(std::int32_t number) {
  Lists& found = lists_[number];
  found.is_giving_known = true;
  const Group& group = graph_.groups()[number];
  Reset(&found.giving, group.gates);
  Fill({&found.giving, 1}, [&](const auto& visit) {
    for (const Attachment& attachment : group.attached) {
      const std::int32_t first = graph_.groups()[attachment.block].first;
      for (std::int32_t i = graph_.PassTasks(attachment.block); i < graph_.ComputeTasks(attachment.block); ++i) {
        const Slot& before = graph_.slots()[first + i];
        for (std::int32_t n = 0; n < before.next_count; ++n) {
          if (before.next[n] >= 0 || graph_.GradientGroupOf(~before.next[n]) != number) continue;
          visit(found.giving, graph_.GateOf(~before.next[n]) - group.first - group.tasks, first + i);
        }
      }
    }
  });
}

}  // namespace soapstone

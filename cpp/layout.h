// A block under given degrees: which boxes every shard reads and writes, in which segment, at what cost.
//
// The twin of src/soapstone/strategy/layout.py and tasks/segments.py; independent of devices.
//
// Thread safety: immutable once made; boxes are numbered in tables that belong to one thread.

#ifndef SOAPSTONE_CPP_LAYOUT_H_
#define SOAPSTONE_CPP_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "boxtable.h"
#include "problem.h"

namespace soapstone {

// Intervals [lo, hi) of each axis, one after the other. Boxes of one value compare lexicographically.
using BoxBounds = std::vector<std::int64_t>;

// The elements of a box: 1 for rank 0, 0 if some interval is empty.
std::int64_t Volume(const BoxBounds& box);

// The common elements of two boxes of one rank; nullopt when there are none.
std::optional<BoxBounds> Intersection(const BoxBounds& a, const BoxBounds& b);

// Boxes cut at each other's borders, so that any two pieces are equal or apart.
//
// REQUIRES: there is a box, and all have one rank.
std::vector<BoxBounds> CutAtBorders(const std::vector<BoxBounds>& boxes);

// Rows of numbers, one after the other.
struct Rows {
  std::vector<std::int32_t> begin = {0};
  std::vector<std::int32_t> items;

  std::int32_t count() const { return static_cast<std::int32_t>(begin.size()) - 1; }
  std::span<const std::int32_t> operator[](std::int32_t row) const {
    return std::span(items).subspan(begin[row], begin[row + 1] - begin[row]);
  }
  void Clear() {
    begin.assign(1, 0);
    items.clear();
  }
  void Append(std::span<const std::int32_t> row) {
    items.insert(items.end(), row.begin(), row.end());
    begin.push_back(static_cast<std::int32_t>(items.size()));
  }
};

// Shards put together where they compute the same part of a node, as the followers of a split sum do.
using Alike = Rows;

// What the shards read or write of one value or weight. A shard that reads nothing has no box.
struct Port {
  std::int32_t subject = -1;    // number of the value or weight
  std::int32_t segment = 0;     // before which it is needed, or after which it exists
  std::int32_t alike = 0;       // which entry of Layout::alike says what shards have in common
  bool gives_gradient = false;  // whether reading it leads to a gradient of it
  bool is_kept = false;         // whether the backward pass reads it again
  bool is_of_all = true;        // whether no shard is without a box
  std::vector<std::int32_t> boxes;  // by shard: its number, or kNone
};

// What the shards write of a value: the cells of a grid, so that the cells under a box are found directly.
// What is held is a box in each cell: copies of it, or summands of it.
struct Written {
  Port port;
  std::vector<std::int32_t> summand;  // by entry held, sorted by (summand, box)
  std::vector<std::int32_t> box;      // by entry held
  Rows shards;                        // by entry held: those that hold it
  std::vector<std::int64_t> steps;    // by axis: the length of a cell
  std::vector<std::int64_t> counts;   // by axis: how many cells
  Rows cells;                         // by cell, row-major: entries held

  // Calls visit(entry held, elements of the overlap) for every box held that overlaps the box.
  template <typename Visit>
  void ForEachUnder(std::span<const std::int64_t> bounds, const Visit& visit) const {
    Descend(bounds, 0, 0, 1, visit);
  }

 private:
  template <typename Visit>
  void Descend(std::span<const std::int64_t> bounds, std::size_t axis, std::int64_t cell, std::int64_t volume,
               const Visit& visit) const {
    if (axis == steps.size()) {
      for (const std::int32_t entry : cells[static_cast<std::int32_t>(cell)]) visit(entry, volume);
      return;
    }
    const std::int64_t step = steps[axis];
    const std::int64_t lo = bounds[2 * axis];
    const std::int64_t hi = bounds[2 * axis + 1];
    if (counts[axis] == 1) return Descend(bounds, axis + 1, cell, volume * (hi - lo), visit);
    const std::int64_t last = (hi - 1) / step;
    for (std::int64_t at = lo / step; at <= last; ++at) {
      const std::int64_t length = std::min(hi, (at + 1) * step) - std::max(lo, at * step);
      Descend(bounds, axis + 1, cell * counts[axis] + at, volume * length, visit);
    }
  }
};

// The boxes of all values and weights.
struct BoxTables {
  explicit BoxTables(const Problem& problem);

  std::vector<BoxTable> values;
  std::vector<BoxTable> weights;
};

// Boxes that shards exchange among themselves between two segments.
struct SeamData {
  std::int32_t segment = 0;  // it lies between this one and the next
  std::int64_t item_bytes = 4;
  bool is_mutual = false;
  std::int32_t alike = 0;              // the shards behind each source
  std::vector<BoxBounds> boxes;        // by shard
  std::vector<std::int32_t> summands;  // by source
  // Shards whose boxes are the same, where any two boxes are the same or apart and shards with one box have
  // different summands: then each row is an all-reduce. Empty otherwise.
  Rows classes;
};

struct Layout {
  std::vector<std::int32_t> degrees;      // by dim of the leader
  std::int32_t sample_dim = -1;           // of the leader, as in BlockData
  std::int32_t parts = 1;
  std::int32_t segments = 1;
  bool is_partial = false;                // whether its values are partial sums to their readers
  std::vector<std::int32_t> summands;     // by shard
  std::vector<Alike> alike;               // by node
  std::vector<Written> written;           // values
  std::vector<Port> read;                 // values
  std::vector<Port> weights;              // weights read
  std::vector<SeamData> seams;
  std::vector<double> forward_s;          // [(kind * segments + segment) * parts + shard]
  std::vector<double> backward_s;
  std::vector<std::int64_t> work_fs;      // [kind * parts + shard]: femtoseconds of all its tasks
  std::vector<std::int64_t> kept_bytes;   // by shard: of what it writes and the backward pass needs
};

// Femtoseconds, rounded down: sums of them are exact in any order, and never more than the seconds.
constexpr double kFemto = 1e15;
inline std::int64_t Femtoseconds(double seconds) { return static_cast<std::int64_t>(seconds * kFemto); }

// Whether a node as a whole reads every element of an operand.
bool ReadsAll(const NodeData& node, const Access& operand);

// The layout of a block whose leader is split by `degrees` (one for each dim of the leader); nullopt if a
// follower would be cut across its factors, or read what another shard of the block wrote.
//
// REQUIRES: degrees are legal for the leader: they divide the sizes, and a factored axis is cut outermost
// first.
std::optional<Layout> MakeLayout(const Problem& problem, BoxTables* tables, std::int32_t block,
                                 const std::vector<std::int32_t>& degrees);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_LAYOUT_H_

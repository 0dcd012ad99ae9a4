// A block under given degrees: which boxes every shard reads and writes, in which segment, at what cost.
//
// The twin of src/soapstone/strategy/layout.py and tasks/segments.py; independent of devices.
//
// Thread safety: immutable once made.

#ifndef SOAPSTONE_CPP_LAYOUT_H_
#define SOAPSTONE_CPP_LAYOUT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "problem.h"

namespace soapstone {

// Intervals [lo, hi) of each axis, one after the other. Boxes of one value compare lexicographically.
using BoxBounds = std::vector<std::int64_t>;

// The elements of a box: 1 for rank 0, 0 if some interval is empty.
std::int64_t Volume(const BoxBounds& box);

// The common elements of two boxes of one rank; nullopt when there are none.
std::optional<BoxBounds> Intersection(const BoxBounds& a, const BoxBounds& b);

// Shards put together where they compute the same part of a node, as the followers of a split sum do.
using Alike = std::vector<std::vector<std::int32_t>>;

// What the shards read or write of one value or weight. A shard that reads nothing has no box.
struct Port {
  std::int32_t subject = -1;    // number of the value or weight
  std::int32_t segment = 0;     // before which it is needed, or after which it exists
  std::int32_t alike = 0;       // which entry of Layout::alike says what shards have in common
  bool gives_gradient = false;  // whether reading it leads to a gradient of it
  std::vector<std::optional<BoxBounds>> boxes;
};

// Boxes that shards exchange among themselves between two segments.
struct SeamData {
  std::int32_t segment = 0;  // it lies between this one and the next
  std::int64_t item_bytes = 4;
  bool is_mutual = false;
  std::int32_t alike = 0;              // the shards behind each source
  std::vector<BoxBounds> boxes;        // by shard
  std::vector<std::int32_t> summands;  // by source
};

struct Layout {
  std::int32_t parts = 1;
  std::int32_t segments = 1;
  bool is_partial = false;                // whether its values are partial sums to their readers
  std::vector<std::int32_t> summands;     // by shard
  std::vector<Alike> alike;               // by node
  std::vector<Port> written;              // values
  std::vector<Port> read;                 // values
  std::vector<Port> weights;              // weights read
  std::vector<SeamData> seams;
  std::vector<double> forward_s;          // [(kind * segments + segment) * parts + shard]
  std::vector<double> backward_s;
};

// The layout of a block whose leader is split by `degrees` (one for each dim of the leader); nullopt if a
// follower would be cut across its factors, or read what another shard of the block wrote.
//
// REQUIRES: degrees are legal for the leader: they divide the sizes, and a factored axis is cut outermost
// first.
std::optional<Layout> MakeLayout(const Problem& problem, std::int32_t block,
                                 const std::vector<std::int64_t>& degrees);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_LAYOUT_H_

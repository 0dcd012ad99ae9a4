// Which box of a tensor an iteration box of a node reads or writes, and the other way round.
//
// The twin of the geometry in src/soapstone/ops/signature.py. Boxes are lo and hi of each axis, iteration boxes
// lo and hi of each dim of the node. Nothing here takes memory of its own: layouts ask millions of times.
//
// Thread safety: pure functions.

#ifndef SOAPSTONE_CPP_ACCESS_H_
#define SOAPSTONE_CPP_ACCESS_H_

#include <cstdint>
#include <span>

#include "problem.h"

namespace soapstone {

// REQUIRES: `box` has two places for each axis of the output; likewise below.
void WriteInto(const Access& output, std::span<const std::int64_t> points, std::span<std::int64_t> box);

// False if it reads nothing; the box is then of no meaning.
bool ReadInto(const NodeData& node, const Access& operand, std::span<const std::int64_t> points,
              std::span<std::int64_t> box);

// The part of a follower's iteration space that reads exactly this box of the operand that it follows; false
// if there is none.
bool FollowInto(const NodeData& node, std::span<const std::int64_t> box, std::span<std::int64_t> points);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_ACCESS_H_

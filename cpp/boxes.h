// Which boxes overlap: the question behind every transfer of the task graph.
//
// A box is one half-open interval [lower, upper) per dim. It is empty when some interval is, and an
// empty box overlaps nothing. A box of rank 0 is the one element of a scalar and overlaps every other.
//
// Thread safety: the functions are pure; any number of threads may call them at the same time, also on
// the same boxes, as long as nobody writes those boxes meanwhile.

#ifndef SOAPSTONE_CPP_BOXES_H_
#define SOAPSTONE_CPP_BOXES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace soapstone {

// A view of `count` boxes of one rank. It does not own the bounds.
//
// REQUIRES: `bounds` points to count * rank * 2 integers that outlive the view: for each box, for each
// dim, the lower and the upper bound.
struct Boxes {
  const std::int64_t* bounds;
  std::size_t count;
  std::size_t rank;

  std::int64_t Lower(std::size_t box, std::size_t dim) const { return bounds[(box * rank + dim) * 2]; }
  std::int64_t Upper(std::size_t box, std::size_t dim) const { return bounds[(box * rank + dim) * 2 + 1]; }
};

// Cuts a tensor into equal cells: `degrees[d]` of them along dim d, numbered in row-major order.
//
// REQUIRES: for every dim, size >= 0, degree >= 1 and degree divides size; the number of cells fits in
// an int64.
struct Grid {
  std::span<const std::int64_t> sizes;
  std::span<const std::int64_t> degrees;
};

// The index of a written box and the index of a read box that share at least one element.
using Overlap = std::array<std::int64_t, 2>;

// Returns all overlaps of a written with a read box, sorted. Tests every pair.
//
// REQUIRES: written.rank == read.rank.
std::vector<Overlap> Overlaps(const Boxes& written, const Boxes& read);

// Returns Overlaps(cells of the grid, read), but in time proportional to the answer (and its sorting),
// not to the number of pairs. What a read box covers outside the grid (padding) overlaps nothing.
//
// REQUIRES: grid.sizes.size() == grid.degrees.size() == read.rank.
std::vector<Overlap> GridOverlaps(const Grid& grid, const Boxes& read);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_BOXES_H_

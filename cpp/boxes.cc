#include "boxes.h"

#include <algorithm>

namespace soapstone {
namespace {

bool Overlapping(const Boxes& written, std::size_t w, const Boxes& read, std::size_t r) {
  for (std::size_t dim = 0; dim < written.rank; ++dim) {
    const std::int64_t lower = std::max(written.Lower(w, dim), read.Lower(r, dim));
    const std::int64_t upper = std::min(written.Upper(w, dim), read.Upper(r, dim));
    if (lower >= upper) return false;
  }
  return true;
}

// Replaces `cells` by the numbers of the grid cells that box `r` of `read` touches. The numbers grow by
// one dim at a time, which is Horner's rule for the row-major number, and so come out in order.
void CellsTouched(const Grid& grid, const Boxes& read, std::size_t r, std::vector<std::int64_t>& cells,
                  std::vector<std::int64_t>& scratch) {
  cells.assign(1, 0);
  for (std::size_t dim = 0; dim < read.rank; ++dim) {
    const std::int64_t lower = std::max<std::int64_t>(read.Lower(r, dim), 0);
    const std::int64_t upper = std::min(read.Upper(r, dim), grid.sizes[dim]);
    if (lower >= upper) {
      cells.clear();
      return;
    }
    const std::int64_t extent = grid.sizes[dim] / grid.degrees[dim];
    scratch.clear();
    for (const std::int64_t outer : cells) {
      for (std::int64_t inner = lower / extent; inner <= (upper - 1) / extent; ++inner) {
        scratch.push_back(outer * grid.degrees[dim] + inner);
      }
    }
    cells.swap(scratch);
  }
}

}  // namespace

std::vector<Overlap> Overlaps(const Boxes& written, const Boxes& read) {
  std::vector<Overlap> found;
  for (std::size_t w = 0; w < written.count; ++w) {
    for (std::size_t r = 0; r < read.count; ++r) {
      if (Overlapping(written, w, read, r)) {
        found.push_back({static_cast<std::int64_t>(w), static_cast<std::int64_t>(r)});
      }
    }
  }
  return found;
}

std::vector<Overlap> GridOverlaps(const Grid& grid, const Boxes& read) {
  std::vector<Overlap> found;
  std::vector<std::int64_t> cells;
  std::vector<std::int64_t> scratch;
  for (std::size_t r = 0; r < read.count; ++r) {
    CellsTouched(grid, read, r, cells, scratch);
    for (const std::int64_t cell : cells) found.push_back({cell, static_cast<std::int64_t>(r)});
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace soapstone

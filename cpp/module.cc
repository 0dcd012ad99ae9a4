// The Python module soapstone._core: checks what the headers REQUIRE, releases the interpreter lock
// around the work, and hands arrays over without copying them.
//
// Callers use soapstone.native, which documents and types these functions.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "boxes.h"
#include "module.h"

namespace nb = nanobind;

namespace soapstone {
namespace {

using BoxArray = nb::ndarray<const std::int64_t, nb::shape<-1, -1, 2>, nb::c_contig, nb::device::cpu>;
using PairArray = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 2>>;

Boxes View(const BoxArray& array) { return Boxes{array.data(), array.shape(0), array.shape(1)}; }

// Returns a numpy array that owns the pairs.
PairArray ToNumpy(std::vector<Overlap> pairs) {
  auto* kept = new std::vector<Overlap>(std::move(pairs));
  nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<Overlap>*>(vector); });
  return PairArray(kept->data(), {kept->size(), 2}, owner);
}

void Check(const Grid& grid, std::size_t rank) {
  if (grid.sizes.size() != rank || grid.degrees.size() != rank) {
    throw std::invalid_argument("sizes and degrees need one entry for each dim of the read boxes");
  }
  std::int64_t cells = 1;
  for (std::size_t dim = 0; dim < rank; ++dim) {
    if (grid.sizes[dim] < 0) throw std::invalid_argument("a size is negative");
    if (grid.degrees[dim] < 1) throw std::invalid_argument("a degree is less than 1");
    if (grid.sizes[dim] % grid.degrees[dim] != 0) {
      throw std::invalid_argument("a degree does not divide the size of its dim");
    }
    if (__builtin_mul_overflow(cells, grid.degrees[dim], &cells)) {
      throw std::invalid_argument("the grid has more cells than an int64 can count");
    }
  }
}

PairArray BoundOverlaps(const BoxArray& written, const BoxArray& read) {
  if (written.shape(1) != read.shape(1)) {
    throw std::invalid_argument("the written and the read boxes differ in rank");
  }
  std::vector<Overlap> pairs;
  {
    const nb::gil_scoped_release unlocked;
    pairs = Overlaps(View(written), View(read));
  }
  return ToNumpy(std::move(pairs));
}

PairArray BoundGridOverlaps(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& degrees,
                            const BoxArray& read) {
  const Grid grid{sizes, degrees};
  Check(grid, read.shape(1));
  std::vector<Overlap> pairs;
  {
    const nb::gil_scoped_release unlocked;
    pairs = GridOverlaps(grid, View(read));
  }
  return ToNumpy(std::move(pairs));
}

}  // namespace
}  // namespace soapstone

NB_MODULE(_core, module) {
  module.doc() = "The native core of Soapstone; see soapstone.native.";
  module.def("overlaps", &soapstone::BoundOverlaps, nb::arg("written").noconvert(),
             nb::arg("read").noconvert());
  module.def("grid_overlaps", &soapstone::BoundGridOverlaps, nb::arg("sizes"), nb::arg("degrees"),
             nb::arg("read").noconvert());
  soapstone::BindTasks(module);
  soapstone::BindExact(module);
  soapstone::BindSubst(module);
  soapstone::BindWords(module);
}

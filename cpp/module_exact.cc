// Bindings of the exact search and of lower bounds; see soapstone.native.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "exact.h"
#include "lower_bound.h"
#include "module.h"
#include "placement.h"
#include "problem.h"

namespace nb = nanobind;

namespace soapstone {
namespace {

// Degrees, copies and devices of a block.
using Placed = std::tuple<std::vector<std::int32_t>, std::int32_t, std::vector<std::int32_t>>;

class ExactSearch {
 public:
  ExactSearch(const Problem& problem, double tolerance, bool has_ranges, std::int64_t first_restart)
      : problem_(std::make_shared<const Problem>(problem)),
        has_ranges_(has_ranges),
        exact_(problem_.get(), tolerance, has_ranges ? DeviceLists::kRanges : DeviceLists::kAny, first_restart) {}

  void Offer(const std::vector<Placed>& strategy) { exact_.Offer(Checked(strategy)); }

  std::vector<double> Bounds(const std::vector<Placed>& strategy) { return exact_.Bounds(Checked(strategy)); }

  void Split(std::int32_t block, std::int32_t part, std::int32_t parts) {
    if (block < 0 || block >= static_cast<std::int32_t>(problem_->blocks.size())) {
      throw std::invalid_argument("there is no such block");
    }
    if (part < 0 || part >= parts) throw std::invalid_argument("a part must be less than the number of parts");
    exact_.Split(block, part, parts);
  }

  void Beat(double makespan_s) { exact_.Beat(makespan_s); }

  bool Step(std::int64_t count) {
    const nb::gil_scoped_release unlocked;
    return exact_.Step(count);
  }

  // Empty while none is known.
  std::vector<Placed> Best() const {
    std::vector<Placed> found;
    for (const Placement& each : exact_.best()) found.emplace_back(each.layout->degrees, each.copies, each.devices);
    return found;
  }

  const Exact& exact() const { return exact_; }

 private:
  std::vector<Placement> Checked(const std::vector<Placed>& strategy) {
    if (strategy.size() != problem_->blocks.size()) throw std::invalid_argument("not every block is placed");
    std::vector<Placement> placements;
    for (std::size_t block = 0; block < strategy.size(); ++block) {
      const auto& [degrees, copies, devices] = strategy[block];
      if (degrees.size() != problem_->blocks[block].nodes[0].sizes.size()) {
        throw std::invalid_argument("a degree is needed for each dim of the leader");
      }
      const Layout* layout = exact_.space()->Find(static_cast<std::int32_t>(block), degrees);
      if (layout == nullptr || copies != 1 || layout->parts != static_cast<std::int32_t>(devices.size())) {
        throw std::invalid_argument("a strategy that is offered must be one of the space");
      }
      std::vector<std::int32_t> distinct = devices;
      std::sort(distinct.begin(), distinct.end());
      const bool is_range = distinct == devices && distinct.back() - distinct.front() + 1 == layout->parts;
      if (std::adjacent_find(distinct.begin(), distinct.end()) != distinct.end() || distinct.front() < 0 ||
          distinct.back() >= problem_->machine.device_count || (has_ranges_ && !is_range)) {
        throw std::invalid_argument("a strategy that is offered must be one of the space");
      }
      placements.push_back({layout, copies, devices});
    }
    return placements;
  }

  std::shared_ptr<const Problem> problem_;
  bool has_ranges_;
  Exact exact_;
};

}  // namespace

void BindExact(nb::module_& module) {
  nb::class_<ExactSearch>(module, "ExactSearch")
      .def("__init__",
           [](ExactSearch* self, const Problem& problem, double tolerance, bool has_ranges,
              std::int64_t first_restart) {
             const nb::gil_scoped_release unlocked;
             new (self) ExactSearch(problem, tolerance, has_ranges, first_restart);
           },
           nb::arg("problem"), nb::arg("tolerance"), nb::arg("has_ranges") = false,
           nb::arg("first_restart") = Exact::kFirstRestart)
      .def("offer", &ExactSearch::Offer, nb::arg("strategy"))
      .def("bounds", &ExactSearch::Bounds, nb::arg("strategy"))
      .def("step", &ExactSearch::Step, nb::arg("count"))
      .def("split", &ExactSearch::Split, nb::arg("block"), nb::arg("part"), nb::arg("parts"))
      .def("beat", &ExactSearch::Beat, nb::arg("makespan_s"))
      .def("best", &ExactSearch::Best)
      .def_prop_ro("best_s", [](const ExactSearch& self) { return self.exact().best_s(); })
      .def_prop_ro("lower_bound_s", [](const ExactSearch& self) { return self.exact().lower_bound_s(); })
      .def_prop_ro("first_block", [](const ExactSearch& self) { return self.exact().first_block(); })
      .def_prop_ro("has_settled", [](const ExactSearch& self) { return self.exact().has_settled(); })
      .def_prop_ro("bounded", [](const ExactSearch& self) { return self.exact().bounded(); })
      .def_prop_ro("simulated", [](const ExactSearch& self) { return self.exact().simulated(); })
      .def_prop_ro("symmetry", [](const ExactSearch& self) { return self.exact().symmetry().relabellings().size(); })
      .def_prop_ro("entered", [](const ExactSearch& self) { return self.exact().entered(); });
  module.def("lower_bound", [](const Problem& problem) {
    LowerBound bound;
    {
      const nb::gil_scoped_release unlocked;
      bound = MakeLowerBound(problem);
    }
    return std::make_tuple(bound.compute_s, bound.path_s);
  }, nb::arg("problem"));
}

}  // namespace soapstone

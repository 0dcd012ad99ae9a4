// The enumeration of graphs for substitutions, in the Python module soapstone._core.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "module.h"
#include "subst_bank.h"
#include "subst_program.h"

namespace nb = nanobind;

namespace soapstone {
namespace {

using Positions = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Steps = std::vector<std::pair<std::int32_t, std::int64_t>>;
using Table = nb::ndarray<nb::numpy, std::int32_t, nb::shape<-1, 6>>;

std::vector<Step> ToSteps(const Steps& pairs) {
  std::vector<Step> steps;
  int depth = 0;
  for (const auto& [kind, argument] : pairs) {
    if (kind < 0 || kind > Step::kHash) throw std::invalid_argument("there is no such step");
    const int popped = kind <= Step::kConstant ? 0
                       : kind == Step::kNegate ? 1
                       : kind == Step::kHash   ? static_cast<int>(argument & 0xff)
                                               : 2;
    depth += 1 - popped;
    if (depth < 1 || depth > 60) throw std::invalid_argument("an expression needs too few or too many places");
    steps.push_back({kind, argument});
  }
  if (!steps.empty() && depth != 1) throw std::invalid_argument("an expression must leave one value");
  return steps;
}

std::int32_t BoundProgram(TermBank* bank, std::int32_t arity, std::int64_t size, std::int64_t points,
                          std::int32_t combine, std::int64_t outside, const Positions& gather, const Steps& body,
                          std::int32_t extra, const Positions& finish_gather, const Steps& finish,
                          std::vector<std::int64_t> salt) {
  if (static_cast<std::int64_t>(gather.shape(0)) != size * points * arity) {
    throw std::invalid_argument("the table of positions has another size than elements, points and operands say");
  }
  if (static_cast<std::int64_t>(finish_gather.shape(0)) != size * extra) {
    throw std::invalid_argument("the table of what follows the sum has a wrong size");
  }
  if (combine < 0 || combine > 3) throw std::invalid_argument("there is no such way to combine points");
  if (combine == 3 && static_cast<std::int64_t>(salt.size()) != size) {
    throw std::invalid_argument("a chain needs a number for each element");
  }
  Program program;
  program.arity = arity;
  program.size = size;
  program.points = points;
  program.combine = static_cast<Combine>(combine);
  program.outside = static_cast<Element>(outside);
  program.gather.assign(gather.data(), gather.data() + gather.shape(0));
  program.body = ToSteps(body);
  program.extra = extra;
  program.finish_gather.assign(finish_gather.data(), finish_gather.data() + finish_gather.shape(0));
  program.finish = ToSteps(finish);
  program.salt = std::move(salt);
  return bank->AddProgram(std::move(program));
}

Table BoundEqualGraphs(TermBank* bank, int most_nodes, int most_outputs) {
  if (most_nodes < 0 || most_nodes > 6) throw std::invalid_argument("graphs have 0 to 6 nodes");
  if (most_outputs < 1 || most_outputs > 4) throw std::invalid_argument("graphs have 1 to 4 outputs");
  auto* kept = new std::vector<TermBank::Member>();
  nb::capsule owner(kept, [](void* made) noexcept { delete static_cast<std::vector<TermBank::Member>*>(made); });
  {
    const nb::gil_scoped_release unlocked;
    *kept = bank->EqualGraphs(most_nodes, most_outputs);
  }
  static_assert(sizeof(TermBank::Member) == 6 * sizeof(std::int32_t));
  return Table(reinterpret_cast<std::int32_t*>(kept->data()), {kept->size(), 6}, owner);
}

}  // namespace

void BindSubst(nb::module_& module) {
  nb::class_<TermBank>(module, "TermBank")
      .def(nb::init<std::uint64_t>(), nb::arg("seed"))
      .def("add_program", &BoundProgram, nb::arg("arity"), nb::arg("size"), nb::arg("points"), nb::arg("combine"),
           nb::arg("outside"), nb::arg("gather").noconvert(), nb::arg("body"), nb::arg("extra"),
           nb::arg("finish_gather").noconvert(), nb::arg("finish"), nb::arg("salt"))
      .def("add_operator", &TermBank::AddOperator, nb::arg("operands"), nb::arg("outputs"), nb::arg("programs"),
           nb::arg("commutes"))
      .def("add_variable", &TermBank::AddVariable, nb::arg("type"), nb::arg("size"), nb::arg("enumerated"))
      .def("apply", &TermBank::Apply, nb::arg("op"), nb::arg("operands"))
      .def("fingerprint", &TermBank::Fingerprint, nb::arg("value"))
      .def("type", &TermBank::Type, nb::arg("value"))
      .def("node_of", &TermBank::NodeOf, nb::arg("value"))
      .def("output_of", &TermBank::OutputOf, nb::arg("value"))
      .def("operator_of", &TermBank::OperatorOf, nb::arg("node"))
      .def("operands_of", &TermBank::OperandsOf, nb::arg("node"))
      .def("equal_graphs", &BoundEqualGraphs, nb::arg("most_nodes"), nb::arg("most_outputs"))
      .def_prop_ro("node_count", &TermBank::node_count)
      .def_prop_ro("value_count", &TermBank::value_count)
      .def_prop_ro("graph_count", &TermBank::graph_count);
}

}  // namespace soapstone

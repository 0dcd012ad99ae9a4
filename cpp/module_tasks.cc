// Bindings of the planning problem and its task graph; see soapstone.native.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "chain.h"
#include "footprint.h"
#include "layout.h"
#include "module.h"
#include "plain.h"
#include "plain_builder.h"
#include "problem.h"
#include "simulate.h"
#include "simulator.h"
#include "space.h"
#include "tasks.h"

namespace nb = nanobind;

namespace soapstone {
namespace {

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns a numpy array that owns the values.
template <typename T>
Array<T> Owned(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<T>*>(vector); });
  return Array<T>(kept->data(), {kept->size()}, owner);
}

template <typename T>
std::span<const T> View(const Input<T>& array) {
  return {array.data(), array.shape(0)};
}

// Refuses nodes whose curves are not one for each kind of device, or are not there.
void CheckCurves(const MachineData& machine, const std::vector<BlockData>& blocks, std::size_t count) {
  for (const BlockData& block : blocks) {
    for (const NodeData& node : block.nodes) {
      for (const std::vector<std::int32_t>* curves : {&node.forward_curve, &node.backward_curve}) {
        if (!curves->empty() && curves->size() != machine.launch_s.size()) {
          throw std::invalid_argument("a node needs a curve for each kind of device, or none");
        }
        for (const std::int32_t curve : *curves) {
          if (curve >= static_cast<std::int64_t>(count)) throw std::invalid_argument("there is no such curve");
        }
      }
    }
  }
}

void CheckBlock(const Problem& problem, std::int32_t block) {
  if (block < 0 || block >= static_cast<std::int32_t>(problem.blocks.size())) {
    throw std::invalid_argument("there is no such block");
  }
}

void Check(const Problem& problem, std::int32_t block, const std::vector<std::int32_t>& degrees, std::int32_t copies,
           const std::vector<std::int32_t>& devices, std::int32_t lanes, std::int32_t in_flight) {
  CheckBlock(problem, block);
  const std::vector<std::int64_t>& sizes = problem.blocks[block].nodes[0].sizes;
  if (degrees.size() != sizes.size()) throw std::invalid_argument("a degree is needed for each dim of the leader");
  std::int64_t parts = 1;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (degrees[dim] < 1 || sizes[dim] % degrees[dim] != 0) {
      throw std::invalid_argument("a degree does not divide the size of its dim");
    }
    parts *= degrees[dim];
  }
  if (copies < 1 || parts * copies != static_cast<std::int64_t>(devices.size())) {
    throw std::invalid_argument("a device is needed for each copy of each shard");
  }
  for (const std::int32_t device : devices) {
    if (device < 0 || device >= problem.machine.device_count) throw std::invalid_argument("there is no such device");
  }
  const std::int32_t dim = problem.blocks[block].sample_dim;
  if (lanes < 1 || in_flight < 0 || (lanes > 1 && (dim < 0 || degrees[dim] % lanes != 0))) {
    throw std::invalid_argument("a block is split along its samples into a multiple of the micro-batches");
  }
}

Method MethodNamed(const std::string& name) {
  if (name == "engine") return Method::kEngine;
  if (name == "full") return Method::kFull;
  if (name == "paper_delta") return Method::kPaperDelta;
  if (name == "plain") return Method::kPlain;
  throw std::invalid_argument("there is no such method");
}

// A task graph that is built whole when it is asked for.
class PlannedTasks {
 public:
  explicit PlannedTasks(std::shared_ptr<const Problem> problem)
      : problem_(std::move(problem)), space_(problem_.get()), graph_(problem_.get(), space_.tables()) {}

  // False if the block cannot be split so.
  bool Place(std::int32_t block, const std::vector<std::int32_t>& degrees, std::int32_t copies,
             std::vector<std::int32_t> devices, std::int32_t lanes, std::int32_t in_flight) {
    Check(*problem_, block, degrees, copies, devices, lanes, in_flight);
    const Layout* layout = space_.Find(block, degrees);
    if (layout == nullptr) return false;
    graph_.Place(block, Placement{layout, copies, std::move(devices), lanes, in_flight});
    placed_.insert(block);
    return true;
  }

  const TaskGraph& Refreshed() {
    CheckPlaced();
    graph_.Refresh();
    return graph_;
  }

  // What is told of a timeline without its tasks.
  struct Outcome {
    double makespan_s = 0;
    std::int64_t moved_bytes = 0;
    std::int64_t gradient_bytes = 0;  // the part of them that sums gradients of weights
    std::vector<double> busy_s;       // by device
    std::vector<Peak> peaks;          // by device; none where nothing is said of what is held
  };

  Outcome Foretold(const std::vector<BlockHeld>& held, const std::vector<std::int64_t>& input_bytes,
                   std::int64_t states_per_weight) {
    const std::vector<Placement> strategy = Placements();
    Buffers buffers(&held);
    PlainBuilder builder(*problem_, *space_.tables(), strategy, held.empty() ? nullptr : &buffers);
    const DraftView draft(builder.Built());
    const MachineData& machine = problem_->machine;
    const PlainTimes times = RunInOrder(draft, machine.device_count + machine.link_count);
    Outcome outcome{times.makespan_s, 0, 0, std::vector<double>(machine.device_count, 0), {}};
    for (std::int32_t task = 0; task < draft.tasks(); ++task) {
      if (draft.resource(task) < machine.device_count) {
        outcome.busy_s[draft.resource(task)] += draft.duration_s(task);
        continue;
      }
      outcome.moved_bytes += draft.size_bytes(task);
      if (ClassOf(draft.order(task)) == kWeightClass) outcome.gradient_bytes += draft.size_bytes(task);
    }
    if (!held.empty()) outcome.peaks = buffers.Peaks(times.start_s, times.end_s, input_bytes, states_per_weight);
    return outcome;
  }

  std::size_t block_count() const { return problem_->blocks.size(); }
  std::size_t device_count() const { return problem_->machine.device_count; }

 private:
  std::vector<Placement> Placements() const {
    CheckPlaced();
    std::vector<Placement> strategy;
    for (std::size_t block = 0; block < block_count(); ++block) {
      strategy.push_back(graph_.placement(static_cast<std::int32_t>(block)));
    }
    return strategy;
  }

  void CheckPlaced() const {
    if (placed_.size() != problem_->blocks.size()) throw std::invalid_argument("not every block is placed");
  }

  std::shared_ptr<const Problem> problem_;
  Space space_;
  std::set<std::int32_t> placed_;
  TaskGraph graph_;
};

// Proposals simulated one after the other, by whoever asks or by a chain's own rule.
class Proposals {
 public:
  Proposals(std::shared_ptr<const Problem> problem, std::uint64_t seed, ChainOptions options)
      : problem_(std::move(problem)), chain_(problem_.get(), seed, options) {}

  bool Place(std::int32_t block, const std::vector<std::int32_t>& degrees, std::int32_t copies,
             std::vector<std::int32_t> devices, std::int32_t lanes, std::int32_t in_flight) {
    Check(*problem_, block, degrees, copies, devices, lanes, in_flight);
    const Layout* layout = chain_.space()->Find(block, degrees);
    if (layout == nullptr) return false;
    chain_.Place(block, Placement{layout, copies, std::move(devices), lanes, in_flight});
    placed_.insert(block);
    return true;
  }

  void PlaceAtRandom() {
    chain_.PlaceAtRandom();
    for (std::size_t block = 0; block < problem_->blocks.size(); ++block) placed_.insert(static_cast<std::int32_t>(block));
  }

  void Limit(std::vector<std::int64_t> capacity_bytes, std::int64_t numbers_per_weight) {
    if (capacity_bytes.size() != static_cast<std::size_t>(problem_->machine.device_count)) {
      throw std::invalid_argument("a capacity is needed for each device");
    }
    chain_.Limit({std::move(capacity_bytes), numbers_per_weight});
  }

  std::vector<std::int64_t> FootprintBytes(std::int64_t numbers_per_weight) {
    CheckPlaced();
    const std::vector<std::int64_t> none(problem_->machine.device_count, 0);
    Footprint footprint(problem_.get(), chain_.space()->tables(), {none, numbers_per_weight});
    return footprint.Bytes(*chain_.simulator(), {});
  }

  double Makespan() {
    CheckPlaced();
    return chain_.makespan_s();
  }

  // More than the threshold when the makespan exceeds it; infinity if the block cannot be split so.
  double Propose(std::int32_t block, const std::vector<std::int32_t>& degrees, std::int32_t copies,
                 std::vector<std::int32_t> devices, double threshold_s, std::int32_t lanes, std::int32_t in_flight) {
    CheckPlaced();
    Check(*problem_, block, degrees, copies, devices, lanes, in_flight);
    chain_.makespan_s();
    const Layout* layout = chain_.space()->Find(block, degrees);
    if (layout == nullptr) return Simulator::kNever;
    proposed_.assign(1, Change{block, Placement{layout, copies, std::move(devices), lanes, in_flight}});
    return chain_.simulator()->Propose(proposed_, threshold_s);
  }

  void Accept() { chain_.simulator()->Accept(); }
  void Reject() { chain_.simulator()->Reject(); }

  std::int64_t Step(std::int64_t proposals, double temperature_s) {
    CheckPlaced();
    const nb::gil_scoped_release unlocked;
    return chain_.Step(proposals, temperature_s);
  }

  std::int64_t Quieten(std::int64_t proposals, double limit_s) {
    CheckPlaced();
    const nb::gil_scoped_release unlocked;
    return chain_.Quieten(proposals, limit_s);
  }

  double link_s() {
    Makespan();
    return chain_.simulator()->LinkSeconds();
  }

  // The timeline of what stands: how many tasks that follow each other end together, and when.
  nb::tuple Ends() {
    CheckPlaced();
    chain_.makespan_s();
    std::vector<std::int32_t> counts;
    std::vector<double> ends_s;
    for (const Simulator::Ended& ended : chain_.simulator()->Ends()) {
      counts.push_back(ended.count);
      ends_s.push_back(ended.end_s);
    }
    return nb::make_tuple(Owned(std::move(counts)), Owned(std::move(ends_s)));
  }

  // Degrees, copies and devices of a block as it is placed.
  nb::tuple Placed(std::int32_t block) {
    CheckPlaced();
    CheckBlock(*problem_, block);
    const Placement& placement = chain_.simulator()->placement(block);
    return nb::make_tuple(placement.layout->degrees, placement.copies, placement.devices);
  }

  // The same as it was when the chain was at its best.
  nb::tuple Best(std::int32_t block) {
    CheckBlock(*problem_, block);
    if (chain_.best_s() == Simulator::kNever) throw std::invalid_argument("the chain has made no step");
    const Placement& placement = chain_.best()[block];
    return nb::make_tuple(placement.layout->degrees, placement.copies, placement.devices);
  }
  double best_s() const { return chain_.best_s(); }
  std::int64_t best_at() const { return chain_.best_at(); }
  std::int64_t best_excess_bytes() const { return chain_.best_excess_bytes(); }

  // The degrees of every layout that may be drawn for a block.
  std::vector<std::vector<std::int32_t>> Degrees(std::int32_t block) {
    CheckBlock(*problem_, block);
    chain_.space()->Count(block);  // which tries those not yet known to be legal
    return chain_.space()->degrees(block);
  }

  std::int64_t task_count() {
    Makespan();
    return chain_.simulator()->task_count();
  }
  nb::tuple Counters() {
    const Simulator::Counters& counters = chain_.simulator()->counters();
    return nb::make_tuple(counters.built, counters.run, counters.simulated, counters.by_tail);
  }

 private:
  void CheckPlaced() const {
    if (problem_->blocks.empty()) throw std::invalid_argument("there is nothing to place");
    if (placed_.size() != problem_->blocks.size()) throw std::invalid_argument("not every block is placed");
  }

  std::shared_ptr<const Problem> problem_;
  std::set<std::int32_t> placed_;
  std::vector<Change> proposed_;
  Chain chain_;
};

nb::tuple BoundFlat(PlannedTasks& planned) {
  FlatTasks flat;
  {
    const nb::gil_scoped_release unlocked;
    flat = planned.Refreshed().Flat();
  }
  std::vector<std::uint8_t> kind;
  for (const TaskKind each : flat.kind) kind.push_back(static_cast<std::uint8_t>(each));
  return nb::make_tuple(Owned(std::move(kind)), Owned(std::move(flat.resource)), Owned(std::move(flat.duration_s)),
                        Owned(std::move(flat.size_bytes)), Owned(std::move(flat.after_begin)),
                        Owned(std::move(flat.after)));
}

// The makespan, the bytes that are moved and those of gradients, how long each device computes and, where it is
// said what blocks hold, the peak of each device, when it is reached and its parts.
nb::tuple BoundForetold(PlannedTasks& planned, const std::vector<BlockHeld>& held,
                        const std::vector<std::int64_t>& input_bytes, std::int64_t states_per_weight) {
  if (!held.empty() && (held.size() != planned.block_count() || input_bytes.size() != planned.device_count())) {
    throw std::invalid_argument("what is held is needed for each block, and inputs for each device");
  }
  PlannedTasks::Outcome outcome;
  {
    const nb::gil_scoped_release unlocked;
    outcome = planned.Foretold(held, input_bytes, states_per_weight);
  }
  nb::list peaks;
  for (const Peak& peak : outcome.peaks) peaks.append(nb::make_tuple(peak.peak_bytes, peak.at_s, peak.parts));
  return nb::make_tuple(outcome.makespan_s, outcome.moved_bytes, outcome.gradient_bytes, outcome.busy_s, peaks);
}

nb::tuple BoundSimulate(const Input<double>& duration_s, const Input<std::int32_t>& resource,
                        const Input<std::int64_t>& after_begin, const Input<std::int32_t>& after,
                        std::int32_t resource_count) {
  const std::size_t count = duration_s.shape(0);
  if (resource.shape(0) != count || after_begin.shape(0) != count + 1 ||
      after_begin.data()[count] != static_cast<std::int64_t>(after.shape(0))) {
    throw std::invalid_argument("the arrays do not describe the same tasks");
  }
  for (const std::int32_t each : View(resource)) {
    if (each < 0 || each >= resource_count) throw std::invalid_argument("there is no such resource");
  }
  for (const std::int32_t each : View(after)) {
    if (each < 0 || each >= static_cast<std::int64_t>(count)) throw std::invalid_argument("there is no such task");
  }
  Timeline timeline;
  {
    const nb::gil_scoped_release unlocked;
    timeline = Simulate(View(duration_s), View(resource), View(after_begin), View(after), resource_count);
  }
  return nb::make_tuple(Owned(std::move(timeline.start_s)), Owned(std::move(timeline.end_s)), timeline.makespan_s);
}

}  // namespace

void BindTasks(nb::module_& module) {
  nb::class_<Axis>(module, "Axis")
      .def(nb::init<>())
      .def_rw("offset", &Axis::offset)
      .def_rw("divisor", &Axis::divisor)
      .def_rw("dims", &Axis::dims)
      .def_rw("strides", &Axis::strides);
  nb::class_<Access>(module, "Access")
      .def(nb::init<>())
      .def_rw("value", &Access::value)
      .def_rw("weight", &Access::weight)
      .def_rw("inner_node", &Access::inner_node)
      .def_rw("inner_output", &Access::inner_output)
      .def_rw("is_present", &Access::is_present)
      .def_rw("is_finishing", &Access::is_finishing)
      .def_rw("is_gathered", &Access::is_gathered)
      .def_rw("wants_gradient", &Access::wants_gradient)
      .def_rw("is_kept", &Access::is_kept)
      .def_rw("item_bytes", &Access::item_bytes)
      .def_rw("shape", &Access::shape)
      .def_rw("axes", &Access::axes);
  nb::class_<TimeCurve>(module, "TimeCurve")
      .def(nb::init<>())
      .def_rw("base_s", &TimeCurve::base_s)
      .def_rw("s_per_flop", &TimeCurve::s_per_flop)
      .def_rw("s_per_byte", &TimeCurve::s_per_byte)
      .def_rw("least_s_per_flop", &TimeCurve::least_s_per_flop)
      .def_rw("least_s_per_byte", &TimeCurve::least_s_per_byte)
      .def_rw("shapes", &TimeCurve::shapes)
      .def_rw("seconds", &TimeCurve::seconds);
  nb::class_<NodeData>(module, "NodeData")
      .def(nb::init<>())
      .def_rw("sizes", &NodeData::sizes)
      .def_rw("is_splittable", &NodeData::is_splittable)
      .def_rw("is_summed", &NodeData::is_summed)
      .def_rw("is_shared", &NodeData::is_shared)
      .def_rw("is_gathered", &NodeData::is_gathered)
      .def_rw("synchronises", &NodeData::synchronises)
      .def_rw("factored", &NodeData::factored)
      .def_rw("carried", &NodeData::carried)
      .def_rw("flops", &NodeData::flops)
      .def_rw("flops_per_s", &NodeData::flops_per_s)
      .def_rw("forward_curve", &NodeData::forward_curve)
      .def_rw("backward_curve", &NodeData::backward_curve)
      .def_rw("operands", &NodeData::operands)
      .def_rw("outputs", &NodeData::outputs)
      .def_rw("has_backward", &NodeData::has_backward)
      .def_rw("writes_gradient", &NodeData::writes_gradient)
      .def_rw("is_free_forward", &NodeData::is_free_forward)
      .def_rw("is_free_backward", &NodeData::is_free_backward);
  nb::class_<BlockData>(module, "BlockData")
      .def(nb::init<>())
      .def_rw("nodes", &BlockData::nodes)
      .def_rw("needs_backward", &BlockData::needs_backward)
      .def_rw("passes_sums", &BlockData::passes_sums)
      .def_rw("sample_dim", &BlockData::sample_dim);
  nb::class_<ValueData>(module, "ValueData")
      .def(nb::init<>())
      .def_rw("rank", &ValueData::rank)
      .def_rw("item_bytes", &ValueData::item_bytes)
      .def_rw("is_differentiable", &ValueData::is_differentiable)
      .def_rw("number", &ValueData::number);
  nb::class_<WeightData>(module, "WeightData")
      .def(nb::init<>())
      .def_rw("rank", &WeightData::rank)
      .def_rw("item_bytes", &WeightData::item_bytes)
      .def_rw("number", &WeightData::number)
      .def_rw("shelf", &WeightData::shelf);
  nb::class_<MachineData>(module, "MachineData")
      .def(nb::init<>())
      .def_rw("device_count", &MachineData::device_count)
      .def_rw("link_count", &MachineData::link_count)
      .def_rw("kind", &MachineData::kind)
      .def_rw("link", &MachineData::link)
      .def_rw("bandwidth", &MachineData::bandwidth)
      .def_rw("latency", &MachineData::latency)
      .def_rw("launch_s", &MachineData::launch_s)
      .def_rw("message_s", &MachineData::message_s)
      .def_rw("memory_bytes_per_s", &MachineData::memory_bytes_per_s)
      .def_rw("update_bytes_per_byte", &MachineData::update_bytes_per_byte)
      .def_rw("sums_by_one_device", &MachineData::sums_by_one_device);
  nb::class_<Problem>(module, "Problem")
      .def("__init__",
           [](Problem* self, MachineData machine, std::vector<BlockData> blocks, std::vector<ValueData> values,
              std::vector<WeightData> weights, std::vector<TimeCurve> curves, bool has_buckets) {
             for (const TimeCurve& curve : curves) {
               if (curve.shapes.size() != curve.seconds.size()) {
                 throw std::invalid_argument("a curve needs a time for each of its shapes");
               }
             }
             CheckCurves(machine, blocks, curves.size());
             new (self) Problem{std::move(machine), std::move(blocks), std::move(values), std::move(weights),
                                std::move(curves), has_buckets};
           },
           nb::arg("machine"), nb::arg("blocks"), nb::arg("values"), nb::arg("weights"),
           nb::arg("curves") = std::vector<TimeCurve>(), nb::arg("has_buckets") = false)
      .def("in_buckets", [](const Problem& problem) {
        Problem bucketed = problem;
        bucketed.has_buckets = true;
        return bucketed;
      });
  nb::class_<HeldData>(module, "HeldData")
      .def(nb::init<>())
      .def_rw("size_bytes", &HeldData::size_bytes)
      .def_rw("made_in", &HeldData::made_in)
      .def_rw("needed_in", &HeldData::needed_in)
      .def_rw("kept_for", &HeldData::kept_for);
  nb::class_<BlockHeld>(module, "BlockHeld")
      .def(nb::init<>())
      .def_rw("held", &BlockHeld::held)
      .def_rw("outputs", &BlockHeld::outputs)
      .def_rw("values", &BlockHeld::values);
  nb::class_<PlannedTasks>(module, "PlannedTasks")
      .def("__init__",
           [](PlannedTasks* self, const Problem& problem) {
             new (self) PlannedTasks(std::make_shared<const Problem>(problem));
           })
      .def("place", &PlannedTasks::Place, nb::arg("block"), nb::arg("degrees"), nb::arg("copies"),
           nb::arg("devices"), nb::arg("lanes") = 1, nb::arg("in_flight") = 0)
      .def("flat", &BoundFlat)
      .def("foretold", &BoundForetold, nb::arg("held"), nb::arg("input_bytes"), nb::arg("states_per_weight"));
  nb::class_<Proposals>(module, "Proposals")
      .def("__init__",
           [](Proposals* self, const Problem& problem, std::uint64_t seed, const std::string& method,
              bool uses_threshold, bool is_structured, bool has_ranges) {
             const MoveKind moves = is_structured ? MoveKind::kStructured
                                    : has_ranges  ? MoveKind::kRanges
                                                  : MoveKind::kPaper;
             const ChainOptions options{MethodNamed(method), moves, uses_threshold};
             new (self) Proposals(std::make_shared<const Problem>(problem), seed, options);
           },
           nb::arg("problem"), nb::arg("seed") = 0, nb::arg("method") = "engine", nb::arg("uses_threshold") = true,
           nb::arg("is_structured") = false, nb::arg("has_ranges") = false)
      .def("place", &Proposals::Place, nb::arg("block"), nb::arg("degrees"), nb::arg("copies"),
           nb::arg("devices"), nb::arg("lanes") = 1, nb::arg("in_flight") = 0)
      .def("makespan", &Proposals::Makespan)
      .def("propose", &Proposals::Propose, nb::arg("block"), nb::arg("degrees"), nb::arg("copies"),
           nb::arg("devices"), nb::arg("threshold_s"), nb::arg("lanes") = 1, nb::arg("in_flight") = 0)
      .def("accept", &Proposals::Accept)
      .def("reject", &Proposals::Reject)
      .def("place_at_random", &Proposals::PlaceAtRandom)
      .def("limit", &Proposals::Limit, nb::arg("capacity_bytes"), nb::arg("numbers_per_weight"))
      .def("footprint_bytes", &Proposals::FootprintBytes, nb::arg("numbers_per_weight"))
      .def("step", &Proposals::Step, nb::arg("proposals"), nb::arg("temperature_s"))
      .def("quieten", &Proposals::Quieten, nb::arg("proposals"), nb::arg("limit_s"))
      .def_prop_ro("link_s", &Proposals::link_s)
      .def("placed", &Proposals::Placed, nb::arg("block"))
      .def("best", &Proposals::Best, nb::arg("block"))
      .def_prop_ro("best_s", &Proposals::best_s)
      .def_prop_ro("best_at", &Proposals::best_at)
      .def_prop_ro("best_excess_bytes", &Proposals::best_excess_bytes)
      .def("ends", &Proposals::Ends)
      .def("degrees", &Proposals::Degrees, nb::arg("block"))
      .def_prop_ro("counters", &Proposals::Counters)
      .def_prop_ro("task_count", &Proposals::task_count);
  module.def("simulate", &BoundSimulate, nb::arg("duration_s").noconvert(), nb::arg("resource").noconvert(),
             nb::arg("after_begin").noconvert(), nb::arg("after").noconvert(), nb::arg("resource_count"));
}

}  // namespace soapstone

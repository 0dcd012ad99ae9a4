// A group of tasks while it is being put together: tasks, gates, edges, and the moves of an exchange.
//
// Thread safety: a Draft belongs to one thread. It keeps its memory, so that the next group costs none.

#ifndef SOAPSTONE_CPP_DRAFT_H_
#define SOAPSTONE_CPP_DRAFT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "boxtable.h"
#include "exchange.h"
#include "problem.h"

namespace soapstone {

enum class TaskKind : std::uint8_t {
  kForward,
  kBackward,
  kTransfer,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kUpdate,
  kTake,
};

// A task's place in the task order: what it is, in fields from the most significant down. Numbers within a
// field are in the order of the keys in tasks/build.py, so comparing orders is comparing keys.
using TaskOrder = std::uint64_t;

enum Pass : std::uint64_t { kForwardPass, kBackwardPass, kUpdatePass };
enum Class : std::uint64_t { kComputeClass, kSeamClass, kValueClass, kWeightClass };

constexpr int kPositionBits = 20;
constexpr int kNumberBits = 12;
constexpr int kLocalBits = 28;

inline TaskOrder Order(Pass pass, std::int64_t position, Class what, std::int64_t number, std::int64_t local) {
  return (static_cast<TaskOrder>(pass) << (2 + kPositionBits + kNumberBits + kLocalBits)) |
         (static_cast<TaskOrder>(position) << (2 + kNumberBits + kLocalBits)) |
         (static_cast<TaskOrder>(what) << (kNumberBits + kLocalBits)) |
         (static_cast<TaskOrder>(number) << kLocalBits) | static_cast<TaskOrder>(local);
}

inline Pass OrderPass(TaskOrder order) {
  return static_cast<Pass>(order >> (2 + kPositionBits + kNumberBits + kLocalBits));
}

inline Class ClassOf(TaskOrder order) { return static_cast<Class>((order >> (kNumberBits + kLocalBits)) & 3); }

// A task or gate as the draft of a group knows it.
struct Ref {
  static constexpr std::int32_t kOwn = -1;
  static constexpr std::int32_t kGate = -2;

  std::int32_t part;  // kOwn, kGate, or the number of an attachment
  std::int32_t task;
};

// One box on its way from a device to another, before equal ones are put together.
struct Part {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t held = 0;    // the box of which it is a part, where it comes from
  std::int32_t wanted = 0;  // the same, where it goes
  std::int32_t source = 0;  // as the caller numbers them
  Ref taker = {Ref::kOwn, 0};
  std::int64_t volume = 0;
  std::int32_t lane = 0;  // of the source
  std::int32_t box = BoxTable::kNone;  // a number of what it moves, among the parts between the two
  std::int32_t sum = 0;  // which sum of sources it is part of, among those of this box between the two
};

// One task of a batch.
struct Member {
  double duration_s;
  std::int32_t resource;
};

// What resources have to do, and the most that is of interest.
struct Ledger {
  std::vector<std::int64_t>* work_fs;  // by resource
  double limit_fs;
  bool is_exceeded = false;

  void Add(std::int32_t resource, double duration_s) {
    is_exceeded |= static_cast<double>((*work_fs)[resource] += Femtoseconds(duration_s)) > limit_fs;
  }
};

// Seconds of a collective of `count` devices on the slowest link of its ring, as cost/analytic.py has them.
double CollectiveSeconds(Pattern pattern, std::int64_t piece_bytes, std::int64_t count, double bandwidth,
                         double latency, bool sums_by_one_device);

// Tasks that follow each other in the task order, become ready at one moment and are waited for together are
// a batch: the hops of a ring, or the updates after it. Unless told to keep them apart, a draft has one task
// for all of them.
class Draft {
 public:
  enum class Batches : std::uint8_t { kTogether, kApart };

  Draft(const MachineData* machine, Batches batches);

  void Clear();

  // Enters all tasks that are added from now on; null for none. Once the ledger is exceeded, an exchange is
  // not put together any further.
  void Keep(Ledger* ledger) { ledger_ = ledger; }

  Ref Add(TaskKind kind, std::int32_t resource, double duration_s, std::int64_t size_bytes, TaskOrder order) {
    if (ledger_ != nullptr) ledger_->Add(resource, duration_s);
    tasks_.push_back({duration_s, order, size_bytes, resource, 0, kind});
    return {Ref::kOwn, static_cast<std::int32_t>(tasks_.size()) - 1};
  }

  // A batch, whose members are those added by AddMember() since the last one; `order` is that of the first.
  Ref AddBatch(TaskKind kind, std::int64_t size_bytes, TaskOrder order) {
    const Ref batch = Add(kind, 0, 0, size_bytes, order);
    tasks_.back().members = static_cast<std::int32_t>(members_.size()) - batched_;
    batched_ = static_cast<std::int32_t>(members_.size());
    return batch;
  }
  void AddMember(std::int32_t resource, double duration_s) {
    if (ledger_ != nullptr) ledger_->Add(resource, duration_s);
    members_.push_back({duration_s, resource});
  }

  bool has_batches() const { return batches_ == Batches::kTogether; }

  Ref AddGate() { return {Ref::kGate, gates_++}; }

  void Wait(Ref task, Ref before) { edges_.push_back({before, task}); }

  // The tasks of one move, and where to enter and leave them: a transfer, or the hops of a ring, which are a
  // batch, or apart behind a gate and before another; and what its messages take of devices. `order` is counted
  // up.
  std::pair<Ref, Ref> AddMove(Pattern pattern, std::span<const std::int32_t> devices, std::int64_t size_bytes,
                              TaskOrder* order);

  // How many tasks of devices a move ends with, which take its messages.
  static std::int32_t TakeCount(const MachineData& machine, Pattern pattern, std::span<const std::int32_t> devices);

  // The tasks of an exchange, between those that give and those that take.
  template <typename Gives, typename Takes>
  void AddExchange(const Exchange& exchange, const std::vector<Sink>& sinks, std::int64_t item_bytes,
                   const Gives& gives, const Takes& takes, TaskOrder* order) {
    AddLocal(exchange, sinks, gives, takes);
    for (const Move& move : exchange.moves) {
      const auto [enter, leave] = AddMove(move.pattern, move.devices, move.elements * item_bytes, order);
      for (const auto& [source, device] : move.sources) {
        for (const Ref before : gives(source, device)) Wait(enter, before);
      }
      for (const std::int32_t sink : move.sinks) {
        for (const Ref task : takes(sink)) Wait(task, leave);
      }
    }
  }

  // What sinks of an exchange wait for on their own devices.
  template <typename Gives, typename Takes>
  void AddLocal(const Exchange& exchange, const std::vector<Sink>& sinks, const Gives& gives, const Takes& takes) {
    for (const auto& [source, sink] : exchange.local) {
      for (const Ref before : gives(source, sinks[sink].device)) {
        for (const Ref task : takes(sink)) Wait(task, before);
      }
    }
  }

  // The same from parts: sorts them, puts equal ones together and finds patterns. `gives(source, device,
  // visit)` visits the tasks that give a source; `adds(sources)` says whether different summands among them
  // overlap.
  template <typename Gives, typename Adds>
  void AddParts(std::vector<Part>* parts, BoxTable* table, std::int64_t item_bytes, const Gives& gives,
                const Adds& adds, TaskOrder* order) {
    if (parts->empty()) return;
    Sort(parts, table);
    FindRuns(*parts);
    if (first_.size() == 2) {
      AddTransfer(*parts, 0, item_bytes, gives, order);
      return;
    }
    FindConnected(*parts);
    for (std::size_t set = 0; set + 1 < set_begin_.size(); ++set) {
      const std::span<const std::int32_t> runs(set_runs_.data() + set_begin_[set],
                                               set_begin_[set + 1] - set_begin_[set]);
      const Pattern pattern = Recognised(*parts, runs, table, adds);
      if (pattern == Pattern::kTransfer) {
        for (const std::int32_t run : runs) {
          AddTransfer(*parts, run, item_bytes, gives, order);
          if (ledger_ != nullptr && ledger_->is_exceeded) return;
        }
        continue;
      }
      const auto ends = AddMove(pattern, ring_, (*parts)[first_[runs[0]]].volume * item_bytes, order);
      // Every device sends a source to all others: one of its runs names each source it gives.
      for (const std::int32_t run : runs) Connect(*parts, run, gives, ends);
    }
  }

  std::int32_t tasks() const { return static_cast<std::int32_t>(tasks_.size()); }
  std::int32_t gates() const { return gates_; }

 private:
  friend class TaskGraph;
  friend class DraftView;

  struct Task {
    double duration_s;
    TaskOrder order;
    std::int64_t size_bytes;
    std::int32_t resource;
    std::int32_t members;  // 0 if it is no batch
    TaskKind kind;
  };

  struct Edge {
    Ref from;
    Ref to;
  };

  // Calls visit(device, seconds) for the devices of which the messages of a move take some time; sums of all are
  // no messages.
  template <typename Visit>
  static void ForEachTaker(const MachineData& machine, Pattern pattern, std::span<const std::int32_t> devices,
                           const Visit& visit) {
    if (pattern == Pattern::kAllReduce) return;
    for (const std::int32_t device : pattern == Pattern::kTransfer ? devices.subspan(1) : devices) {
      const double seconds = static_cast<double>(devices.size() - 1) * machine.message_s[machine.kind[device]];
      if (seconds > 0) visit(device, seconds);
    }
  }
  // What messages take of devices once they have been moved, and where to leave that.
  Ref AddTakes(Pattern pattern, std::span<const std::int32_t> devices, Ref moved, TaskOrder* order);

  static bool IsSamePair(const Part& a, const Part& b) { return a.from == b.from && a.to == b.to; }

  // The number of the box that is moved.
  static std::int32_t BoxOf(const Part& part, BoxTable* table);

  void SortBy(std::int32_t Part::*device, std::vector<Part>* parts);
  void Sort(std::vector<Part>* parts, BoxTable* table);
  void SortPair(std::span<Part> parts, BoxTable* table);
  void NumberBoxes(std::span<Part> parts, const BoxTable& table);
  static void NumberSums(std::span<Part> parts);
  void FindRuns(const std::vector<Part>& parts);
  void FindConnected(const std::vector<Part>& parts);
  std::int32_t Leader(std::int32_t device);
  // What the runs form as far as pairs and sizes tell, the sources they give in `given_`, the devices in
  // `ring_`; kTransfer unless every pair of devices moves one box, all of one size.
  bool IsComplete(const std::vector<Part>& parts, std::span<const std::int32_t> runs);
  bool IsApart(const std::vector<Part>& parts, std::span<const std::int32_t> runs, const BoxTable& table);
  Pattern PatternOf(const std::vector<Part>& parts, std::span<const std::int32_t> runs, BoxTable* table,
                    bool adds);

  template <typename Adds>
  Pattern Recognised(const std::vector<Part>& parts, std::span<const std::int32_t> runs, BoxTable* table,
                     const Adds& adds) {
    if (!IsComplete(parts, runs)) return Pattern::kTransfer;
    given_.clear();
    for (const std::int32_t run : runs) {
      for (std::int32_t i = first_[run]; i < first_[run + 1]; ++i) given_.push_back(parts[i].source);
    }
    std::sort(given_.begin(), given_.end());
    given_.erase(std::unique(given_.begin(), given_.end()), given_.end());
    return PatternOf(parts, runs, table, adds(given_));
  }

  template <typename Gives>
  void AddTransfer(const std::vector<Part>& parts, std::int32_t run, std::int64_t item_bytes, const Gives& gives,
                   TaskOrder* order) {
    const Part& part = parts[first_[run]];
    const std::int32_t devices[2] = {part.from, part.to};
    Connect(parts, run, gives, AddMove(Pattern::kTransfer, devices, part.volume * item_bytes, order));
  }

  template <typename Gives>
  void Connect(const std::vector<Part>& parts, std::int32_t run, const Gives& gives, std::pair<Ref, Ref> ends) {
    for (std::int32_t i = first_[run]; i < first_[run + 1]; ++i) {
      if (i == first_[run] || parts[i].source != parts[i - 1].source) {
        gives(parts[i].source, parts[i].from, [&](Ref before) { Wait(ends.first, before); });
      }
      Wait(parts[i].taker, ends.second);
    }
  }

  const MachineData& machine_;
  Batches batches_;
  Ledger* ledger_ = nullptr;
  std::vector<Member> members_;
  std::int32_t batched_ = 0;
  std::vector<Task> tasks_;
  std::int32_t gates_ = 0;
  std::vector<Edge> edges_;

  std::vector<std::int32_t> begin_;
  std::vector<Part> sorted_;
  std::vector<std::int32_t> first_;      // where runs of parts that are one transfer begin
  std::vector<std::pair<std::int32_t, std::int32_t>> ends_;  // by run: where it comes from and goes to
  std::vector<std::int32_t> set_begin_;  // sets of runs between devices that exchange among themselves
  std::vector<std::int32_t> set_runs_;
  std::vector<std::int32_t> set_of_run_;
  std::vector<std::int32_t> leader_;
  std::vector<std::int32_t> place_;
  std::vector<std::int32_t> ring_;
  std::vector<std::int32_t> given_;
  std::vector<std::int32_t> boxes_;
  std::vector<std::int64_t> bounds_;  // of boxes between two devices
  std::vector<std::int32_t> by_sender_;
  std::vector<std::int32_t> by_receiver_;
};

// A draft that is a whole task graph: its tasks, then its gates, by number.
class DraftView {
 public:
  // REQUIRES: the draft outlives the view and has no attachments.
  explicit DraftView(const Draft& draft) : draft_(draft) {}

  std::int32_t tasks() const { return draft_.tasks(); }
  std::int32_t gates() const { return draft_.gates(); }
  std::int64_t size_bytes(std::int32_t task) const { return draft_.tasks_[task].size_bytes; }
  double duration_s(std::int32_t task) const { return draft_.tasks_[task].duration_s; }
  std::int32_t resource(std::int32_t task) const { return draft_.tasks_[task].resource; }
  TaskOrder order(std::int32_t task) const { return draft_.tasks_[task].order; }

  // Calls visit(before, task) for each edge.
  template <typename Visit>
  void ForEachEdge(const Visit& visit) const {
    for (const Draft::Edge& edge : draft_.edges_) visit(NumberOf(edge.from), NumberOf(edge.to));
  }

 private:
  std::int32_t NumberOf(Ref ref) const { return ref.part == Ref::kGate ? draft_.tasks() + ref.task : ref.task; }

  const Draft& draft_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_DRAFT_H_

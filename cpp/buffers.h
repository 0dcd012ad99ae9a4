// What every device holds while a strategy runs, and for how long.
//
// The twin of src/soapstone/tasks/buffers.py: a buffer lives from the start of the first task that makes it until
// the end of the last that needs it; one that no task makes is there throughout.
//
// Thread safety: a Buffers belongs to one thread.

#ifndef SOAPSTONE_CPP_BUFFERS_H_
#define SOAPSTONE_CPP_BUFFERS_H_

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "draft.h"
#include "exchange.h"

namespace soapstone {

// The numbers are those of soapstone.tasks.task.BufferKind, in its order.
enum class BufferKind : std::uint8_t { kInput, kWeight, kWeightGradient, kActivation, kReceived, kGradient };
constexpr int kBufferKinds = 6;

// What each shard of a block writes of one value and holds. A view is no memory of its own.
struct HeldData {
  std::vector<std::int64_t> size_bytes;  // by shard
  std::int32_t made_in = 0;              // segment
  std::int32_t needed_in = 0;            // the last segment of the forward pass in which the block needs it
  std::int32_t kept_for = -1;            // the last segment of the backward pass that needs it; -1 for none
};

struct BlockHeld {
  std::vector<HeldData> held;
  std::vector<std::int32_t> outputs;  // by output of the leader: of `held`
  std::vector<std::pair<std::int32_t, std::int32_t>> values;  // number of a value that others read; of `held`
};

// The most that one device holds, when that is first reached, and of what kinds.
struct Peak {
  std::int64_t peak_bytes = 0;
  double at_s = 0;
  std::vector<std::int64_t> parts;  // by kind
};

class Buffers {
 public:
  // Tasks that follow each other.
  struct Span {
    std::int32_t first;
    std::int32_t count;
  };

  // REQUIRES: there is an entry for each block; it outlives the buffers.
  explicit Buffers(const std::vector<BlockHeld>* blocks) : blocks_(*blocks), first_(blocks->size()) {}

  // Returns the number of the buffer, which no task makes yet.
  std::int32_t Hold(BufferKind kind, std::int32_t device, std::int64_t size_bytes) {
    slots_.push_back({kind, device, size_bytes});
    return static_cast<std::int32_t>(slots_.size()) - 1;
  }
  void Make(std::int32_t slot, Span tasks) {
    made_.push_back({slot, tasks});
    Need(slot, tasks);
  }
  void Need(std::int32_t slot, Span tasks) { needed_.push_back({slot, tasks}); }

  // The buffer of the value that a block's shard writes: one of `held`, at a place.
  std::int32_t Of(std::int32_t block, std::int32_t held, std::int32_t places, std::int32_t place) const {
    return first_[block] + held * places + place;
  }
  void Begin(std::int32_t block) { first_[block] = static_cast<std::int32_t>(slots_.size()); }
  const BlockHeld& block(std::int32_t block) const { return blocks_[block]; }

  // Enters what an exchange needs, whose tasks begin with number `first`. `takes(sink)` and `keeps(sink)` are the
  // tasks that wait for it and those that come back to it later; `holds(source, device)` are buffers.
  template <typename Takes, typename Keeps, typename Holds>
  void Exchanged(const MachineData& machine, const Exchange& exchange, const std::vector<Source>& sources,
                 const std::vector<Sink>& sinks, std::int64_t item_bytes, std::int32_t first, BufferKind kind,
                 const Takes& takes, const Keeps& keeps, const Holds& holds) {
    std::vector<std::vector<Span>> arrivals(sinks.size());
    for (const Move& move : exchange.moves) {
      const bool is_ring = move.pattern != Pattern::kTransfer;
      const Span own{first, is_ring ? static_cast<std::int32_t>(move.devices.size()) : 1};
      first += own.count + Draft::TakeCount(machine, move.pattern, move.devices);
      for (const auto& [source, device] : move.sources) {
        for (const std::int32_t slot : holds(source, device)) Need(slot, own);
      }
      for (const std::int32_t sink : move.sinks) arrivals[sink].push_back(own);
    }
    const auto each = [](const auto& tasks, const auto& visit) {
      for (const Ref task : tasks) visit(Span{task.task, 1});
    };
    std::vector<std::int32_t> at_hand(sinks.size(), kNone);  // the first source of its own device that contains it
    for (const auto& [source, sink] : exchange.local) {
      for (const std::int32_t slot : holds(source, sinks[sink].device)) {
        each(takes(sink), [&](Span task) { Need(slot, task); });
      }
      if (source < at_hand[sink] && Intersection(*sources[source].box, *sinks[sink].box) == *sinks[sink].box) {
        at_hand[sink] = source;
      }
    }
    for (std::int32_t sink = 0; sink < static_cast<std::int32_t>(sinks.size()); ++sink) {
      std::vector<std::int32_t> slots;
      if (at_hand[sink] != kNone) {
        slots = holds(at_hand[sink], sinks[sink].device);
      } else {
        slots = {Hold(kind, sinks[sink].device, Volume(*sinks[sink].box) * item_bytes)};
        for (const Span own : arrivals[sink]) Make(slots[0], own);
        if (arrivals[sink].empty()) each(takes(sink), [&](Span task) { Make(slots[0], task); });
      }
      for (const std::int32_t slot : slots) {
        each(takes(sink), [&](Span task) { Need(slot, task); });
        each(keeps(sink), [&](Span task) { Need(slot, task); });
      }
    }
  }

  // By device. `states_per_weight` numbers are held for each weight besides itself; they are no part of `parts`.
  std::vector<Peak> Peaks(std::span<const double> start_s, std::span<const double> end_s,
                          const std::vector<std::int64_t>& input_bytes, std::int64_t states_per_weight) const;

 private:
  static constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();

  struct Slot {
    BufferKind kind;
    std::int32_t device;
    std::int64_t size_bytes;
  };
  struct Use {
    std::int32_t slot;
    Span tasks;
  };

  const std::vector<BlockHeld>& blocks_;
  std::vector<std::int32_t> first_;  // by block: its first buffer
  std::vector<Slot> slots_;
  std::vector<Use> made_;
  std::vector<Use> needed_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_BUFFERS_H_

// What every way of simulating proposals has in common: a strategy that stands, and one change of it at a time.
//
// All implementations give the same makespan to the bit, and so the same chain of accepted proposals:
//   Engine      incremental, with threshold and rewind (engine.h): what the search uses;
//   PaperDelta  the delta simulation of FlexFlow as written (paper_delta.h), for comparison;
//   Plain       everything built and simulated anew (plain.h), for comparison.
//
// Thread safety: a Simulator belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_SIMULATOR_H_
#define SOAPSTONE_CPP_SIMULATOR_H_

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tasks.h"

namespace soapstone {

class Simulator {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // What was done so far, over all proposals.
  struct Counters {
    std::int64_t built = 0;      // proposals for which tasks were built
    std::int64_t run = 0;        // proposals that were simulated
    std::int64_t simulated = 0;  // tasks whose start was worked out
    std::int64_t by_tail = 0;    // proposals dropped because of what follows the last compute task of a device
  };

  // When tasks that follow each other in the task order are over: one, or all of a batch.
  struct Ended {
    TaskOrder order;
    std::int32_t count;
    double end_s;
  };

  virtual ~Simulator() = default;

  // Places a block for good.
  virtual void Place(std::int32_t block, const Placement& placement) = 0;

  // The makespan of what is placed.
  //
  // REQUIRES: every block is placed.
  virtual double Makespan() = 0;

  // The makespan if some blocks were placed so; if that exceeds `threshold_s`, anything that does. The proposal
  // stands until Accept() or Reject(), one of which must follow; without a proposal they do nothing.
  //
  // REQUIRES: Makespan() was called after the last Place(). No block is named twice. A proposal that exceeds
  // its threshold is rejected. The changes live until then.
  virtual double Propose(std::span<const Change> changes, double threshold_s) = 0;
  virtual void Accept() = 0;
  virtual void Reject() = 0;

  // How long all links are busy together, of what stands or is proposed; 0 if that is not kept.
  //
  // REQUIRES: what is proposed did not exceed its threshold.
  virtual double LinkSeconds() const { return 0; }

  virtual const Placement& placement(std::int32_t block) const = 0;
  virtual std::int32_t task_count() const = 0;

  // The timeline of what stands, in task order; empty if it is not kept.
  //
  // REQUIRES: Makespan() was called after the last Place(), and no proposal stands.
  virtual std::vector<Ended> Ends() const { return {}; }

  const Counters& counters() const { return counters_; }

 protected:
  Counters counters_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_SIMULATOR_H_

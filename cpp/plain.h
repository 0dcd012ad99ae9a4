// The plain way to simulate a proposal: build every task anew, comparing every box with every other, and run
// Algorithm 1 of FlexFlow with a standard priority queue.
//
// It keeps nothing from one proposal to the next. It is what the Engine is measured against (bench/simulator.py)
// and checked against (tests/property), and the shortest way to read what a task graph is in C++.
//
// Thread safety: a Plain belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_PLAIN_H_
#define SOAPSTONE_CPP_PLAIN_H_

#include <cstdint>
#include <vector>

#include "draft.h"
#include "layout.h"
#include "problem.h"
#include "simulator.h"
#include "tasks.h"

namespace soapstone {

// When every task starts and ends, by number.
struct PlainTimes {
  std::vector<double> start_s;
  std::vector<double> end_s;
  double makespan_s = 0;
};

// Algorithm 1 of FlexFlow with a standard priority queue.
PlainTimes RunInOrder(const DraftView& draft, std::int32_t resources);

class Plain final : public Simulator {
 public:
  // REQUIRES: problem and tables outlive it.
  Plain(const Problem* problem, const BoxTables* tables)
      : problem_(*problem), tables_(*tables), strategy_(problem->blocks.size()) {}

  void Place(std::int32_t block, const Placement& placement) override;
  double Makespan() override;
  // The makespan whatever the threshold.
  double Propose(std::span<const Change> changes, double threshold_s) override;
  void Accept() override;
  void Reject() override;

  const Placement& placement(std::int32_t block) const override { return strategy_[block]; }
  // Builds every task, to count them.
  std::int32_t task_count() const override;

 private:
  double Simulated();

  const Problem& problem_;
  const BoxTables& tables_;
  std::vector<Placement> strategy_;  // by block
  bool is_known_ = false;
  double makespan_s_ = 0;  // of what stands
  double proposed_s_ = 0;
  std::vector<Change> replaced_;  // what the proposed blocks were before
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PLAIN_H_

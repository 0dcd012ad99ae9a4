// The plain way to simulate a proposal: build every task anew, comparing every box with every other, and run
// Algorithm 1 of FlexFlow with a standard priority queue.
//
// It keeps nothing from one proposal to the next. It is what the Engine is measured against (bench/simulator.py)
// and checked against (tests/property), and the shortest way to read what a task graph is in C++.
//
// Thread safety: pure functions.

#ifndef SOAPSTONE_CPP_PLAIN_H_
#define SOAPSTONE_CPP_PLAIN_H_

#include <vector>

#include "layout.h"
#include "problem.h"
#include "tasks.h"

namespace soapstone {

// The makespan of a strategy: a placement for every block.
double PlainMakespan(const Problem& problem, const BoxTables& tables, const std::vector<Placement>& strategy);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PLAIN_H_

// Algorithm 1 of FlexFlow on flat arrays; src/soapstone/sim/reference.py is its specification.
//
// Thread safety: a pure function.

#ifndef SOAPSTONE_CPP_SIMULATE_H_
#define SOAPSTONE_CPP_SIMULATE_H_

#include <cstdint>
#include <span>
#include <vector>

namespace soapstone {

struct Timeline {
  std::vector<double> start_s;
  std::vector<double> end_s;
  double makespan_s = 0;
};

// When every task starts and ends. Tasks are numbered in task order; task t waits for
// after[after_begin[t] .. after_begin[t + 1]) and occupies resource[t] for duration_s[t].
//
// REQUIRES: after_begin has one entry more than there are tasks; numbers are in range; no cycle.
Timeline Simulate(std::span<const double> duration_s, std::span<const std::int32_t> resource,
                  std::span<const std::int64_t> after_begin, std::span<const std::int32_t> after,
                  std::int32_t resource_count);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_SIMULATE_H_

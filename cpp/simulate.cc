#include "simulate.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>
#include <utility>

namespace soapstone {

Timeline Simulate(std::span<const double> duration_s, std::span<const std::int32_t> resource,
                  std::span<const std::int64_t> after_begin, std::span<const std::int32_t> after,
                  std::int32_t resource_count) {
  const std::size_t count = duration_s.size();
  std::vector<std::int64_t> next_begin(count + 1, 0);
  for (const std::int32_t before : after) ++next_begin[before + 1];
  for (std::size_t i = 1; i <= count; ++i) next_begin[i] += next_begin[i - 1];
  std::vector<std::int32_t> next(after.size());
  std::vector<std::int64_t> fill(next_begin.begin(), next_begin.end() - 1);
  std::vector<std::int32_t> waiting(count);
  for (std::size_t task = 0; task < count; ++task) {
    waiting[task] = static_cast<std::int32_t>(after_begin[task + 1] - after_begin[task]);
    for (std::int64_t e = after_begin[task]; e < after_begin[task + 1]; ++e) {
      next[fill[after[e]]++] = static_cast<std::int32_t>(task);
    }
  }
  using Ready = std::pair<double, std::int32_t>;
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> queue;
  for (std::size_t task = 0; task < count; ++task) {
    if (waiting[task] == 0) queue.emplace(0.0, static_cast<std::int32_t>(task));
  }
  Timeline timeline;
  timeline.start_s.assign(count, 0.0);
  timeline.end_s.assign(count, 0.0);
  std::vector<double> ready(count, 0.0);
  std::vector<double> free_at(resource_count, 0.0);
  std::size_t done = 0;
  while (!queue.empty()) {
    const auto [ready_s, task] = queue.top();
    queue.pop();
    ++done;
    double& free_s = free_at[resource[task]];
    const double start_s = std::max(ready_s, free_s);
    const double end_s = start_s + duration_s[task];
    timeline.start_s[task] = start_s;
    timeline.end_s[task] = free_s = end_s;
    timeline.makespan_s = std::max(timeline.makespan_s, end_s);
    for (std::int64_t e = next_begin[task]; e < next_begin[task + 1]; ++e) {
      const std::int32_t follower = next[e];
      ready[follower] = std::max(ready[follower], end_s);
      if (--waiting[follower] == 0) queue.emplace(ready[follower], follower);
    }
  }
  if (done < count) throw std::invalid_argument("tasks wait for each other in a circle");
  return timeline;
}

}  // namespace soapstone

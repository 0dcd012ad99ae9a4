#include "relaxation.h"

#include <algorithm>
#include <limits>

namespace soapstone {

void Relaxation::Clear(std::int32_t resources) {
  resources_ = resources;
  tasks_.clear();
  edges_.clear();
}

std::int32_t Relaxation::Add(std::int32_t resource, double duration_s) {
  tasks_.push_back({duration_s, resource, false, false});
  return static_cast<std::int32_t>(tasks_.size()) - 1;
}

std::int32_t Relaxation::AddPoint(double duration_s, bool first_before, bool first_after) {
  tasks_.push_back({duration_s, kNoResource, first_before, first_after});
  return static_cast<std::int32_t>(tasks_.size()) - 1;
}

void Relaxation::ListEdges(std::int32_t Edge::* end, Lists* lists) const {
  lists->begin.assign(tasks_.size() + 1, 0);
  lists->items.resize(edges_.size());
  for (const Edge& edge : edges_) ++lists->begin[edge.*end + 1];
  for (std::size_t i = 1; i < lists->begin.size(); ++i) lists->begin[i] += lists->begin[i - 1];
  for (std::size_t e = edges_.size(); e-- > 0;) {
    // Filled from the back, so that `begin` is right in the end.
    lists->items[--lists->begin[edges_[e].*end + 1]] = static_cast<std::int32_t>(e);
  }
  for (std::size_t i = 0; i + 1 < lists->begin.size(); ++i) lists->begin[i] = lists->begin[i + 1];
  lists->begin.back() = static_cast<std::int32_t>(edges_.size());
}

void Relaxation::SetOrder() {
  order_.clear();
  left_.assign(tasks_.size(), 0);
  for (const Edge& edge : edges_) ++left_[edge.to];
  for (std::size_t task = 0; task < tasks_.size(); ++task) {
    if (left_[task] == 0) order_.push_back(static_cast<std::int32_t>(task));
  }
  for (std::size_t at = 0; at < order_.size(); ++at) {
    const std::int32_t task = order_[at];
    for (std::int32_t i = out_of_.begin[task]; i < out_of_.begin[task + 1]; ++i) {
      const std::int32_t to = edges_[out_of_.items[i]].to;
      if (--left_[to] == 0) order_.push_back(to);
    }
  }
}

// Finds which of the tasks walked are served before this one on its resource because they are there first. Those
// last to be walked come first, as the others are mostly before these.
void Relaxation::ServeFirst(std::int32_t number) {
  const std::int32_t resource = tasks_[number].resource;
  std::uint64_t* own = before_.data() + words_ * number;
  const std::uint64_t* earlier = long_before_.data() + words_ * number;
  if (std::all_of(own, own + words_, [](std::uint64_t word) { return word == 0; })) return;
  const std::vector<std::int32_t>& done = done_on_[resource];
  for (std::size_t at = done.size(); at-- > 0;) {
    const std::int32_t other = done[at];
    if (!tasks_[other].is_complete || (own[other / 64] >> (other % 64) & 1) != 0) continue;
    const std::uint64_t* awaited = awaited_.data() + words_ * other;
    bool is_first = true;
    for (std::size_t w = 0; w < words_ && is_first; ++w) is_first = (awaited[w] & ~earlier[w]) == 0;
    if (!is_first) continue;
    const std::uint64_t* more = before_.data() + words_ * other;
    for (std::size_t w = 0; w < words_; ++w) own[w] |= more[w];
    own[other / 64] |= std::uint64_t{1} << (other % 64);
    served_.push_back({number, first_served_[other]});
    first_served_[other] = static_cast<std::int32_t>(served_.size()) - 1;
  }
}

void Relaxation::Walk(bool backward, std::vector<double>* times_s) {
  const Lists& lists = backward ? out_of_ : into_;
  const Says other = backward ? Says::kHead : Says::kTail;
  words_ = (tasks_.size() + 63) / 64;
  before_.assign(words_ * tasks_.size(), 0);
  if (!backward) {
    long_before_.assign(words_ * tasks_.size(), 0);
    awaited_.assign(words_ * tasks_.size(), 0);
    first_served_.assign(tasks_.size(), -1);
    served_.clear();
  }
  times_s->assign(tasks_.size(), 0);
  done_on_.resize(resources_);
  for (std::vector<std::int32_t>& done : done_on_) done.clear();
  for (std::size_t at = 0; at < order_.size(); ++at) {
    const std::int32_t number = order_[backward ? order_.size() - 1 - at : at];
    const Task& task = tasks_[number];
    std::uint64_t* own = before_.data() + words_ * number;
    const bool takes_first = backward ? task.first_after : task.first_before;
    bool is_first = true;
    double time_s = 0;
    for (std::int32_t i = lists.begin[number]; i < lists.begin[number + 1]; ++i) {
      const Edge& edge = edges_[lists.items[i]];
      if (edge.says == other) continue;
      const std::int32_t near = backward ? edge.to : edge.from;
      const double reached_s = (*times_s)[near] + tasks_[near].duration_s + edge.lag_s;
      const std::uint64_t* more = before_.data() + words_ * near;
      if (takes_first && !is_first) {
        time_s = std::min(time_s, reached_s);
        const bool has_near = (own[near / 64] >> (near % 64) & 1) != 0;
        for (std::size_t w = 0; w < words_; ++w) own[w] &= more[w];
        if (has_near) own[near / 64] |= std::uint64_t{1} << (near % 64);
      } else {
        time_s = std::max(time_s, reached_s);
        for (std::size_t w = 0; w < words_; ++w) own[w] |= more[w];
        own[near / 64] |= std::uint64_t{1} << (near % 64);
      }
      if (!backward) {
        // Of what is over when `near` is, all that was over when it began was so before, if it takes time at all.
        std::uint64_t* earlier = long_before_.data() + words_ * number;
        std::uint64_t* awaited = awaited_.data() + words_ * number;
        const bool is_task = tasks_[near].resource != kNoResource;
        const std::uint64_t* past = is_task ? more : long_before_.data() + words_ * near;
        const std::uint64_t* through = awaited_.data() + words_ * near;
        for (std::size_t w = 0; w < words_; ++w) {
          earlier[w] = takes_first && !is_first ? earlier[w] & past[w] : earlier[w] | past[w];
          if (!is_task) awaited[w] |= through[w];
        }
        if (is_task) awaited[near / 64] |= std::uint64_t{1} << (near % 64);
      }
      is_first = false;
    }
    if (backward) {
      for (std::int32_t pair = first_served_[number]; pair >= 0; pair = served_[pair].next) {
        const std::int32_t near = served_[pair].after;
        const std::uint64_t* more = before_.data() + words_ * near;
        time_s = std::max(time_s, (*times_s)[near] + tasks_[near].duration_s);
        for (std::size_t w = 0; w < words_; ++w) own[w] |= more[w];
        own[near / 64] |= std::uint64_t{1} << (near % 64);
      }
    } else if (task.resource != kNoResource) {
      ServeFirst(number);
    }
    if (task.resource != kNoResource) {
      // What the resource has to do before.
      std::vector<std::int32_t>& done = done_on_[task.resource];
      double until_s = 0;
      for (const std::int32_t each : done) {
        if ((own[each / 64] >> (each % 64) & 1) == 0) continue;
        until_s = std::max(until_s, (*times_s)[each]) + tasks_[each].duration_s;
      }
      time_s = std::max(time_s, until_s);
      auto place = done.end();
      while (place != done.begin() && (*times_s)[*(place - 1)] > time_s) --place;
      done.insert(place, number);
    }
    (*times_s)[number] = time_s;
  }
}

// Jackson's preemptive schedule: of the tasks that are there, always the one with the longest tail.
double Relaxation::OneMachine(std::vector<Job>* jobs, double limit_s) {
  std::sort(jobs->begin(), jobs->end(), [](const Job& a, const Job& b) { return a.head_s < b.head_s; });
  const auto by_tail = [](const Job& a, const Job& b) { return a.tail_s < b.tail_s; };
  heap_.clear();
  double bound_s = 0;
  double now_s = 0;
  for (std::size_t next = 0; next < jobs->size() || !heap_.empty();) {
    if (heap_.empty()) now_s = std::max(now_s, (*jobs)[next].head_s);
    while (next < jobs->size() && (*jobs)[next].head_s <= now_s) {
      heap_.push_back((*jobs)[next++]);
      std::push_heap(heap_.begin(), heap_.end(), by_tail);
    }
    std::pop_heap(heap_.begin(), heap_.end(), by_tail);
    Job& job = heap_.back();
    const double until_s = next < jobs->size() ? (*jobs)[next].head_s : std::numeric_limits<double>::infinity();
    if (now_s + job.duration_s <= until_s) {
      now_s += job.duration_s;
      bound_s = std::max(bound_s, now_s + job.tail_s);
      if (bound_s >= limit_s) return bound_s;
      heap_.pop_back();
    } else {
      job.duration_s -= until_s - now_s;
      now_s = until_s;
      std::push_heap(heap_.begin(), heap_.end(), by_tail);
    }
  }
  return bound_s;
}

double Relaxation::Bound(double limit_s) {
  ListEdges(&Edge::to, &into_);
  ListEdges(&Edge::from, &out_of_);
  SetOrder();
  Walk(false, &head_s_);
  double bound_s = 0;
  for (std::size_t task = 0; task < tasks_.size(); ++task) {
    if (tasks_[task].resource != kNoResource) bound_s = std::max(bound_s, head_s_[task] + tasks_[task].duration_s);
  }
  if (bound_s >= limit_s) return bound_s;
  Walk(true, &tail_s_);
  jobs_.resize(resources_);
  for (std::vector<Job>& jobs : jobs_) jobs.clear();
  for (std::size_t task = 0; task < tasks_.size(); ++task) {
    const Task& each = tasks_[task];
    bound_s = std::max(bound_s, head_s_[task] + each.duration_s + tail_s_[task]);
    if (each.resource == kNoResource) continue;
    jobs_[each.resource].push_back({head_s_[task], each.duration_s, tail_s_[task]});
  }
  for (std::size_t resource = 0; resource < jobs_.size() && bound_s < limit_s; ++resource) {
    if (jobs_[resource].size() > 1) bound_s = std::max(bound_s, OneMachine(&jobs_[resource], limit_s));
  }
  return bound_s;
}

}  // namespace soapstone

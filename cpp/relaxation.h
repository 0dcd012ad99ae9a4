// A lower bound of the makespan of a set of tasks whose resources serve first come, first served, whatever the
// rule for ties.
//
// What is known of the tasks may be partial, so besides "after all of these" there is "after the first of
// these". The bound is the largest of: the longest path; and, for each resource, the best that one machine
// could do that may interrupt its tasks, each of which has a head (the least time before it) and a tail (the
// least time after it) [Jackson's preemptive schedule; Carlier and Pinson 1989]. Heads and tails count not
// only paths but also the work that the resource itself has to do before or after a task.
//
// A task of which all that it waits for is known is served before another on its resource if all of that is over
// before something that the other waits for has even begun: it is there first. So the other also waits for it,
// and for what it waits for.
//
// Thread safety: a Relaxation belongs to one thread. It keeps its memory.

#ifndef SOAPSTONE_CPP_RELAXATION_H_
#define SOAPSTONE_CPP_RELAXATION_H_

#include <cstdint>
#include <vector>

namespace soapstone {

class Relaxation {
 public:
  static constexpr std::int32_t kNoResource = -1;

  // Which of the two statements an edge makes: `to` starts no earlier than `from` ends (head), and no later
  // than its own tail before the end, `from` must have ended (tail).
  enum class Says : std::uint8_t { kBoth, kHead, kTail };

  void Clear(std::int32_t resources);

  std::int32_t Add(std::int32_t resource, double duration_s);

  // Says that a task waits for nothing but what Wait() tells or will tell, with Says::kBoth and no lag.
  void SetComplete(std::int32_t task) { tasks_[task].is_complete = true; }

  // A point that takes `duration_s` of nobody's time. With `first_before` it is reached when the first of
  // those before it is over; with `first_after` it is sure to be followed by one of those after it, not all.
  std::int32_t AddPoint(double duration_s, bool first_before, bool first_after);

  // REQUIRES: edges make no cycle.
  void Wait(std::int32_t to, std::int32_t from, double lag_s = 0, Says says = Says::kBoth) {
    edges_.push_back({from, to, lag_s, says});
  }

  // The bound; if that is no less than `limit_s`, any bound that is.
  double Bound(double limit_s);

 private:
  struct Task {
    double duration_s;
    std::int32_t resource;
    bool first_before;
    bool first_after;
    bool is_complete = false;
  };
  struct Edge {
    std::int32_t from;
    std::int32_t to;
    double lag_s;
    Says says;
  };
  // The edges of each task: their numbers.
  struct Lists {
    std::vector<std::int32_t> begin;
    std::vector<std::int32_t> items;
  };
  struct Job {
    double head_s;
    double duration_s;
    double tail_s;
  };

  void ListEdges(std::int32_t Edge::* end, Lists* lists) const;
  void SetOrder();
  void ServeFirst(std::int32_t number);
  // Heads, or tails if the edges are walked from their ends.
  void Walk(bool backward, std::vector<double>* times_s);
  double OneMachine(std::vector<Job>* jobs, double limit_s);

  std::int32_t resources_ = 0;
  std::vector<Task> tasks_;
  std::vector<Edge> edges_;
  Lists into_;
  Lists out_of_;
  std::vector<std::int32_t> order_;
  std::vector<std::int32_t> left_;
  std::vector<double> head_s_;
  std::vector<double> tail_s_;
  std::size_t words_ = 0;
  std::vector<std::uint64_t> before_;                // by task: a bit for each task known to be before (after) it
  // By task, a bit for each task: that is over before something that it waits for begins; that it waits for, if
  // it is complete.
  std::vector<std::uint64_t> long_before_;
  std::vector<std::uint64_t> awaited_;
  struct Served {
    std::int32_t after;  // the task that is served later
    std::int32_t next;   // another such pair with the same first task
  };
  std::vector<Served> served_;
  std::vector<std::int32_t> first_served_;           // by task: the first of the pairs of which it is the first
  std::vector<std::vector<std::int32_t>> done_on_;   // by resource: tasks walked, by their times
  std::vector<std::vector<Job>> jobs_;
  std::vector<Job> heap_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_RELAXATION_H_

// A queue of tasks by (ready time, task order), for times that only go up.
//
// Time is cut into equal buckets; a bucket is sorted when its time comes. With about as many buckets as
// tasks, putting in and taking out cost the same however many wait.
//
// Thread safety: a Calendar belongs to one thread.

#ifndef SOAPSTONE_CPP_CALENDAR_H_
#define SOAPSTONE_CPP_CALENDAR_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "draft.h"

namespace soapstone {

class Calendar {
 public:
  // A task, or several in neighbouring slots that are ready at one moment and follow each other in the task
  // order: nothing can come between them.
  struct Event {
    double ready_s;
    TaskOrder order;
    std::int32_t slot;
    std::int32_t count = 1;

    bool operator<(const Event& other) const {
      return ready_s != other.ready_s ? ready_s < other.ready_s : order < other.order;
    }
  };

  // Empties the queue and sets it up for about `tasks` tasks between `first_s` and `last_s`; times outside
  // are allowed, and slow.
  void Reset(std::size_t tasks, double first_s, double last_s) {
    Clear();
    const std::size_t count = std::clamp<std::size_t>(std::bit_ceil(tasks / 4 + 1), 64, 1 << 17);
    if (first_.size() < count) {
      first_.resize(count);
      is_filled_.resize(count / 64, 0);
    }
    count_ = static_cast<std::int64_t>(count);
    first_s_ = first_s;
    per_s_ = last_s > first_s ? static_cast<double>(count) / (last_s - first_s) : 0;
  }

  void Clear() {
    std::fill(is_filled_.begin(), is_filled_.end(), 0);
    entries_.clear();
    unused_ = kNone;
    last_ = kNone;
    active_.clear();
    next_ = 0;
    current_ = -1;
  }

  void Push(const Event& event) {
    if (last_ != kNone && Continues(entries_[last_].event, event)) {
      ++entries_[last_].event.count;
      return;
    }
    const std::int64_t bucket = BucketOf(event.ready_s);
    if (bucket <= current_) {
      active_.insert(std::upper_bound(active_.begin() + static_cast<std::ptrdiff_t>(next_), active_.end(), event), event);
      return;
    }
    std::uint64_t& word = is_filled_[bucket / 64];
    const std::uint64_t bit = std::uint64_t{1} << (bucket % 64);
    if (unused_ == kNone) {
      last_ = static_cast<std::int32_t>(entries_.size());
      entries_.emplace_back();
    } else {
      last_ = unused_;
      unused_ = entries_[unused_].next;
    }
    entries_[last_] = {event, (word & bit) != 0 ? first_[bucket] : kNone};
    first_[bucket] = last_;
    word |= bit;
  }

  // Takes out the first; false if there is none. Now and then calls soon(event) for those that come next, and
  // later(event) for those that come after them.
  template <typename Soon, typename Later>
  bool Pop(Event* event, const Soon& soon, const Later& later) {
    if (next_ == active_.size()) {
      if (!Advance()) return false;
      for (const Event& each : active_) soon(each);
      auto word = static_cast<std::size_t>(current_ + 1) / 64;
      if (word < is_filled_.size() && is_filled_[word] != 0) {
        std::int32_t entry = first_[64 * word + std::countr_zero(is_filled_[word])];
        for (; entry != kNone; entry = entries_[entry].next) later(entries_[entry].event);
      }
    }
    *event = active_[next_++];
    return true;
  }

  // Calls visit(event) for all that wait, in no order.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (std::size_t i = next_; i < active_.size(); ++i) visit(active_[i]);
    for (std::size_t word = (current_ + 1) / 64; word < is_filled_.size(); ++word) {
      for (std::uint64_t left = is_filled_[word]; left != 0; left &= left - 1) {
        std::int32_t entry = first_[64 * word + std::countr_zero(left)];
        for (; entry != kNone; entry = entries_[entry].next) visit(entries_[entry].event);
      }
    }
  }

 private:
  static constexpr std::int32_t kNone = -1;

  struct Entry {
    Event event;
    std::int32_t next;  // of the same bucket
  };

  // Whether one task more makes an event longer.
  static bool Continues(const Event& event, const Event& more) {
    return event.slot + event.count == more.slot && event.ready_s == more.ready_s && more.count == 1 &&
           event.order + static_cast<TaskOrder>(event.count) == more.order;
  }

  std::int64_t BucketOf(double ready_s) const {
    const double at = (ready_s - first_s_) * per_s_;
    if (!(at > 0)) return 0;
    return at >= static_cast<double>(count_) ? count_ - 1 : static_cast<std::int64_t>(at);
  }

  bool Advance() {
    active_.clear();
    next_ = 0;
    auto word = static_cast<std::size_t>(current_ + 1) / 64;
    while (word < is_filled_.size() && is_filled_[word] == 0) ++word;
    if (word == is_filled_.size()) return false;
    current_ = static_cast<std::int64_t>(64 * word) + std::countr_zero(is_filled_[word]);
    is_filled_[word] &= is_filled_[word] - 1;
    std::int32_t entry = first_[current_];
    while (true) {
      active_.push_back(entries_[entry].event);
      if (entry == last_) last_ = kNone;
      if (entries_[entry].next == kNone) break;
      entry = entries_[entry].next;
    }
    // The memory of these is used again first: it is the nearest.
    entries_[entry].next = unused_;
    unused_ = first_[current_];
    if (active_.size() > 1) std::sort(active_.begin(), active_.end());
    return true;
  }

  std::vector<std::int32_t> first_;        // by bucket: its first entry, where it is filled
  std::vector<std::uint64_t> is_filled_;   // by bucket, in bits
  std::vector<Entry> entries_;
  std::int32_t unused_ = kNone;  // the first of the entries that no bucket has
  std::int32_t last_ = kNone;    // the entry put in last, unless its bucket is the current one, or past
  std::vector<Event> active_;  // the current bucket, sorted; taken out up to next_
  std::size_t next_ = 0;
  std::int64_t current_ = -1;
  std::int64_t count_ = 0;
  double first_s_ = 0;
  double per_s_ = 0;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_CALENDAR_H_

#include "boxtable.h"

#include <algorithm>

namespace soapstone {

std::int32_t BoxTable::Number(std::span<const std::int64_t> bounds) {
  if (2 * (volumes_.size() + 1) > slots_.size()) Grow();
  const std::size_t slot = Slot(bounds);
  if (slots_[slot] != kNone) return slots_[slot];
  std::int64_t volume = 1;
  for (std::size_t i = 0; i < width_; i += 2) volume *= std::max<std::int64_t>(0, bounds[i + 1] - bounds[i]);
  slots_[slot] = static_cast<std::int32_t>(volumes_.size());
  bounds_.insert(bounds_.end(), bounds.begin(), bounds.end());
  volumes_.push_back(volume);
  return slots_[slot];
}

std::int32_t BoxTable::Overlap(std::int32_t a, std::int32_t b) {
  if (a == b) return volumes_[a] > 0 ? a : kNone;
  if (met_.empty()) met_.resize(kMet);
  const auto mixed = static_cast<std::uint32_t>(a) * 0x9e3779b1u ^ static_cast<std::uint32_t>(b) * 0x85ebca6bu;
  Met& met = met_[(mixed >> 16 ^ mixed) % kMet];
  if (met.a != a || met.b != b) met = {a, b, WorkedOutOverlap(a, b)};
  return met.overlap;
}

std::int32_t BoxTable::WorkedOutOverlap(std::int32_t a, std::int32_t b) {
  scratch_.resize(width_);
  const std::int64_t* first = bounds_.data() + a * width_;
  const std::int64_t* second = bounds_.data() + b * width_;
  for (std::size_t i = 0; i < width_; i += 2) {
    scratch_[i] = std::max(first[i], second[i]);
    scratch_[i + 1] = std::min(first[i + 1], second[i + 1]);
    if (scratch_[i + 1] <= scratch_[i]) return kNone;
  }
  return Number(scratch_);
}

bool BoxTable::Overlaps(std::int32_t a, std::int32_t b) const {
  const std::int64_t* first = bounds_.data() + a * width_;
  const std::int64_t* second = bounds_.data() + b * width_;
  for (std::size_t i = 0; i < width_; i += 2) {
    if (std::min(first[i + 1], second[i + 1]) <= std::max(first[i], second[i])) return false;
  }
  return true;
}

bool BoxTable::Less(std::int32_t a, std::int32_t b) const {
  const auto first = Bounds(a);
  const auto second = Bounds(b);
  return std::lexicographical_compare(first.begin(), first.end(), second.begin(), second.end());
}

std::size_t BoxTable::Slot(std::span<const std::int64_t> bounds) const {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (const std::int64_t bound : bounds) {
    hash = (hash ^ static_cast<std::uint64_t>(bound)) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  std::size_t slot = hash & (slots_.size() - 1);
  while (slots_[slot] != kNone && !IsSame(bounds.data(), slots_[slot])) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

void BoxTable::Grow() {
  slots_.assign(std::max<std::size_t>(16, 2 * slots_.size()), kNone);
  for (std::size_t box = 0; box < volumes_.size(); ++box) {
    slots_[Slot(Bounds(static_cast<std::int32_t>(box)))] = static_cast<std::int32_t>(box);
  }
}

}  // namespace soapstone

#include "boxtable.h"

#include <algorithm>

namespace soapstone {

std::int32_t BoxTable::Number(std::span<const std::int64_t> bounds) {
  if (2 * (volumes_.size() + 1) > places_.size()) Grow();
  const std::uint32_t hash = Hash(bounds);
  Place& place = places_[PlaceOf(bounds, hash)];
  if (place.box != kNone) return place.box;
  std::int64_t volume = 1;
  for (std::size_t i = 0; i < width_; i += 2) volume *= std::max<std::int64_t>(0, bounds[i + 1] - bounds[i]);
  place = {static_cast<std::int32_t>(volumes_.size()), hash};
  bounds_.insert(bounds_.end(), bounds.begin(), bounds.end());
  volumes_.push_back(volume);
  return place.box;
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

void BoxTable::OverlapInto(std::int32_t a, std::int32_t b, std::int64_t* bounds) const {
  const std::int64_t* first = bounds_.data() + a * width_;
  const std::int64_t* second = bounds_.data() + b * width_;
  for (std::size_t i = 0; i < width_; i += 2) {
    bounds[i] = std::max(first[i], second[i]);
    bounds[i + 1] = std::min(first[i + 1], second[i + 1]);
  }
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

std::uint32_t BoxTable::Hash(std::span<const std::int64_t> bounds) {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (const std::int64_t bound : bounds) {
    hash = (hash ^ static_cast<std::uint64_t>(bound)) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return static_cast<std::uint32_t>(hash);
}

std::size_t BoxTable::PlaceOf(std::span<const std::int64_t> bounds, std::uint32_t hash) const {
  const std::size_t mask = places_.size() - 1;
  std::size_t at = hash & mask;
  while (places_[at].box != kNone && (places_[at].hash != hash || !IsSame(bounds.data(), places_[at].box))) {
    at = (at + 1) & mask;
  }
  return at;
}

void BoxTable::Grow() {
  std::vector<Place> larger(std::max<std::size_t>(16, 2 * places_.size()));
  const std::size_t mask = larger.size() - 1;
  for (const Place& place : places_) {
    if (place.box == kNone) continue;
    std::size_t at = place.hash & mask;
    while (larger[at].box != kNone) at = (at + 1) & mask;
    larger[at] = place;
  }
  places_.swap(larger);
}

}  // namespace soapstone

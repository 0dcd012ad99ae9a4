#include "buffers.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace soapstone {

std::vector<Peak> Buffers::Peaks(std::span<const double> start_s, std::span<const double> end_s,
                                 const std::vector<std::int64_t>& input_bytes, std::int64_t states_per_weight) const {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> from_s(slots_.size(), kNever);
  std::vector<double> until_s(slots_.size(), -kNever);
  for (const Use& use : made_) {
    for (std::int32_t i = 0; i < use.tasks.count; ++i) {
      from_s[use.slot] = std::min(from_s[use.slot], start_s[use.tasks.first + i]);
    }
  }
  for (const Use& use : needed_) {
    for (std::int32_t i = 0; i < use.tasks.count; ++i) {
      until_s[use.slot] = std::max(until_s[use.slot], end_s[use.tasks.first + i]);
    }
  }
  std::vector<Peak> peaks(input_bytes.size());
  std::vector<std::vector<std::tuple<double, std::int64_t, BufferKind>>> changes(peaks.size());
  for (std::size_t device = 0; device < peaks.size(); ++device) {
    peaks[device].parts.assign(kBufferKinds, 0);
    peaks[device].parts[static_cast<int>(BufferKind::kInput)] = input_bytes[device];
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& [kind, device, size_bytes] = slots_[i];
    if (from_s[i] == kNever) {
      peaks[device].parts[static_cast<int>(kind)] += size_bytes;
    } else if (from_s[i] < until_s[i]) {
      changes[device].emplace_back(from_s[i], size_bytes, kind);
      changes[device].emplace_back(until_s[i], -size_bytes, kind);
    }
  }
  for (std::size_t device = 0; device < peaks.size(); ++device) {
    Peak& peak = peaks[device];
    std::vector<std::int64_t> parts = peak.parts;
    std::int64_t held_bytes = std::accumulate(parts.begin(), parts.end(), std::int64_t{0}) +
                              states_per_weight * parts[static_cast<int>(BufferKind::kWeight)];
    peak.peak_bytes = held_bytes;
    std::sort(changes[device].begin(), changes[device].end());
    for (const auto& [time_s, change_bytes, kind] : changes[device]) {
      parts[static_cast<int>(kind)] += change_bytes;
      held_bytes += change_bytes;
      if (held_bytes <= peak.peak_bytes) continue;
      peak.peak_bytes = held_bytes;
      peak.at_s = time_s;
      peak.parts = parts;
    }
  }
  return peaks;
}

}  // namespace soapstone

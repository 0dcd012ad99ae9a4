// How long a block waits at least for the gradient of what it writes, whatever the placements of its readers.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "partial.h"

namespace soapstone {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// [choice] Round trips are looked at for all pairs of placements of an edge, as long as these are not more, those
// of edges before it included: a bound without them holds too, and the search is to begin within seconds.
constexpr std::size_t kMostPairs = 1'000'000;

}  // namespace

// For each edge and placement of its writer: how long at least from when the first shard has written the
// value until the first gradient of it is there, through the readers in the placement that is best for this.
void Partial::SetRoundTrips() {
  round_trip_s_.resize(edges_.size());
  std::vector<std::size_t> left(problem_->blocks.size());
  std::vector<std::int32_t> order;
  for (std::size_t block = 0; block < left.size(); ++block) {
    left[block] = out_of_[block].size();
    if (left[block] == 0) order.push_back(static_cast<std::int32_t>(block));
  }
  std::vector<std::int32_t> all(symmetry_->relabellings().size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
  std::size_t looked_at = 0;
  for (std::size_t at = 0; at < order.size(); ++at) {
    for (const std::int32_t number : into_[order[at]]) {
      const Edge& edge = edges_[number];
      if (--left[edge.writer] == 0) order.push_back(edge.writer);
      std::vector<double>& trips_s = round_trip_s_[number];
      const std::vector<Placement>& from = domains_[edge.writer];
      trips_s.assign(from.size(), 0);
      if (!edge.returns || !edge.is_always_read || !problem_->blocks[edge.writer].needs_backward) continue;
      const std::size_t pairs = from.size() * left_[edge.reader].size() / all.size();
      if (looked_at + pairs > kMostPairs) continue;
      looked_at += pairs;
      std::map<std::pair<const Layout*, std::vector<std::int32_t>>, double> known;
      for (std::size_t i = 0; i < from.size(); ++i) {
        if (!symmetry_->IsLeast(all, from[i].devices)) continue;
        double least_s = kNever;
        for (const std::int32_t through : left_[edge.reader]) {
          least_s = std::min(least_s, RoundTrip(edge, static_cast<std::int32_t>(i), through));
        }
        for (const std::vector<std::int32_t>& to : symmetry_->relabellings()) {
          std::vector<std::int32_t> devices;
          for (const std::int32_t device : from[i].devices) devices.push_back(to[device]);
          known[{from[i].layout, std::move(devices)}] = least_s;
        }
      }
      for (std::size_t i = 0; i < from.size(); ++i) trips_s[i] = known[{from[i].layout, from[i].devices}];
    }
  }
}

// The same through one placement of the reader.
double Partial::RoundTrip(const Edge& edge, std::int32_t from_choice, std::int32_t through_choice) {
  const Placement& from = domains_[edge.writer][from_choice];
  const Placement& through = domains_[edge.reader][through_choice];
  const Layout& layout = *through.layout;
  const Written& written = WrittenOf(*from.layout, edge.value);
  const BoxTable& table = tables_->values[edge.value];
  const std::int64_t item_bytes = problem_->values[edge.value].item_bytes;
  double longest_s = 0;
  for (const Port& port : layout.read) {
    if (port.subject != edge.value || !port.gives_gradient) continue;
    if (std::find(port.boxes.begin(), port.boxes.end(), BoxTable::kNone) != port.boxes.end()) continue;
    // Forward: when each shard is over, if the value was written at 0.
    std::vector<double> end_s(layout.parts, 0);
    for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
      const std::int32_t device = through.devices[shard];
      written.ForEachUnder(table.Bounds(port.boxes[shard]), [&](std::int32_t source, std::int64_t volume) {
        const auto holders = written.shards[source];
        const bool is_local = std::any_of(holders.begin(), holders.end(),
                                          [&](std::int32_t holder) { return from.devices[holder] == device; });
        if (!is_local) end_s[shard] = std::max(end_s[shard], LagSeconds(volume * item_bytes, device));
      });
    }
    std::vector<double> seam_s[2];
    for (std::vector<double>& seam : seam_s) seam.assign(static_cast<std::size_t>(layout.segments) * layout.parts, 0);
    for (const Template::Move& move : seams_[edge.reader][through_choice].moves) {
      for (const Ref& taker : move.takers) {
        double& seam = seam_s[taker.pass][taker.segment * layout.parts + taker.shard];
        seam = std::max(seam, move.duration_s);
      }
    }
    const auto pass = [&](Pass which, std::int32_t segment, bool has_seam) {
      const double first_s = *std::min_element(end_s.begin(), end_s.end());
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        const double seam = seam_s[which][segment * layout.parts + shard];
        if (has_seam && seam > 0) end_s[shard] = std::max(end_s[shard], first_s + seam);
        end_s[shard] += ComputeSeconds(through, which, segment, shard);
      }
    };
    std::vector<std::vector<double>> written_s;  // by segment: the ends of the shards
    for (std::int32_t segment = port.segment; segment < layout.segments; ++segment) {
      pass(kForwardPass, segment, segment > port.segment);
      written_s.push_back(end_s);
    }
    // The way back begins at the end of the block itself, or after any of its own readers.
    double best_s = 0;
    const auto back = [&](std::int32_t segment, double trip_s) {
      const std::vector<double>& ends = written_s[segment - port.segment];
      const double first_s = *std::min_element(ends.begin(), ends.end());
      for (std::int32_t shard = 0; shard < layout.parts; ++shard) {
        end_s[shard] = std::max(ends[shard], first_s + trip_s);
      }
      for (std::int32_t at = segment; at >= port.segment; --at) pass(kBackwardPass, at, at < segment);
      double returned_s = kNever;
      for (std::int32_t sink = 0; sink < from.layout->parts; ++sink) {
        const std::int32_t device = from.devices[sink];
        double ready_s = 0;
        const Alike& alike = layout.alike[port.alike];
        const BoxBounds wanted = BoundsOf(table, written.port.boxes[sink]);
        for (std::int32_t i = 0; i < alike.count(); ++i) {
          const auto overlap = Intersection(wanted, BoundsOf(table, port.boxes[alike[i][0]]));
          if (!overlap) continue;
          const double lag_s = LagSeconds(Volume(*overlap) * item_bytes, device);
          double given_s = kNever;
          for (const std::int32_t shard : alike[i]) {
            given_s = std::min(given_s, end_s[shard] + (through.devices[shard] == device ? 0 : lag_s));
          }
          ready_s = std::max(ready_s, given_s);
        }
        returned_s = std::min(returned_s, ready_s);
      }
      best_s = std::max(best_s, returned_s);
    };
    back(layout.segments - 1, 0);
    for (const std::int32_t next : out_of_[edge.reader]) {
      if (!edges_[next].returns) continue;
      const std::int32_t segment = WrittenOf(layout, edges_[next].value).port.segment;
      if (segment >= port.segment) back(segment, round_trip_s_[next][through_choice]);
    }
    longest_s = std::max(longest_s, best_s);
  }
  return longest_s;
}

}  // namespace soapstone

#include "chain.h"

#include <cmath>
#include <numeric>
#include <utility>

namespace soapstone {

Chain::Chain(const Problem* problem, std::uint64_t seed, EngineOptions options)
    : space_(problem),
      engine_(problem, space_.tables(), options),
      random_(seed),
      deck_(problem->machine.device_count),
      best_(problem->blocks.size()) {
  std::iota(deck_.begin(), deck_.end(), 0);
}

void Chain::Place(std::int32_t block, const Placement& placement) { engine_.Place(block, placement); }

void Chain::PlaceAtRandom() {
  for (std::int32_t block = 0; block < engine_.graph().block_count(); ++block) {
    Draw(block, &drawn_);
    engine_.Place(block, drawn_);
  }
}

void Chain::Draw(std::int32_t block, Placement* placement) {
  placement->layout = space_.Draw(block, &random_);
  placement->copies = 1;
  placement->devices.resize(placement->layout->parts);
  for (std::int32_t i = 0; i < placement->layout->parts; ++i) {
    std::swap(deck_[i], deck_[i + random_.Below(deck_.size() - i)]);
    placement->devices[i] = deck_[i];
  }
}

std::int64_t Chain::Step(std::int64_t proposals, double temperature_s) {
  double current_s = engine_.Makespan();
  std::int64_t accepted = 0;
  for (std::int64_t i = 0; i < proposals; ++i) {
    const std::int32_t block = random_.Below(best_.size());
    Draw(block, &drawn_);
    const double threshold_s = current_s - std::log(random_.Unit()) * temperature_s;
    const double proposed_s = engine_.Propose(block, drawn_, threshold_s);
    if (proposed_s > threshold_s) {
      engine_.Reject();
      continue;
    }
    engine_.Accept();
    ++accepted;
    current_s = proposed_s;
    if (current_s < best_s_) {
      best_s_ = current_s;
      for (std::int32_t b = 0; b < engine_.graph().block_count(); ++b) best_[b] = engine_.graph().placement(b);
    }
  }
  return accepted;
}

}  // namespace soapstone

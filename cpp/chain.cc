#include "chain.h"

#include <cmath>
#include <numeric>
#include <utility>

#include "plain.h"

namespace soapstone {

Chain::Chain(const Problem* problem, std::uint64_t seed, ChainOptions options)
    : problem_(problem),
      options_(options),
      space_(problem),
      engine_(problem, space_.tables(), options.engine),
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

double Chain::PlainStep(std::int32_t block, double threshold_s) {
  std::swap(strategy_[block], drawn_);
  const double proposed_s = PlainMakespan(*problem_, *space_.tables(), strategy_);
  std::swap(strategy_[block], drawn_);
  if (proposed_s <= threshold_s) strategy_[block] = drawn_;
  return proposed_s;
}

std::int64_t Chain::Step(std::int64_t proposals, double temperature_s) {
  double current_s = engine_.Makespan();
  std::int64_t accepted = 0;
  if (options_.is_plain) {
    strategy_.clear();
    for (std::int32_t b = 0; b < engine_.graph().block_count(); ++b) strategy_.push_back(engine_.graph().placement(b));
  }
  for (std::int64_t i = 0; i < proposals; ++i) {
    const std::int32_t block = random_.Below(best_.size());
    Draw(block, &drawn_);
    const double threshold_s = current_s - std::log(random_.Unit()) * temperature_s;
    const double proposed_s =
        options_.is_plain ? PlainStep(block, threshold_s) : engine_.Propose(block, drawn_, threshold_s);
    if (proposed_s > threshold_s) {
      if (!options_.is_plain) engine_.Reject();
      continue;
    }
    if (options_.is_plain) {
      engine_.Place(block, drawn_);
    } else {
      engine_.Accept();
    }
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

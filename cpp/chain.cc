#include "chain.h"

#include <cmath>
#include <numeric>
#include <utility>

#include "engine.h"
#include "paper_delta.h"
#include "plain.h"

namespace soapstone {
namespace {

std::unique_ptr<Simulator> MakeSimulator(const Problem* problem, BoxTables* tables, ChainOptions options) {
  switch (options.method) {
    case Method::kPaperDelta:
      return std::make_unique<PaperDelta>(problem, tables);
    case Method::kPlain:
      return std::make_unique<Plain>(problem, tables);
    case Method::kEngine:
    case Method::kFull:
      break;
  }
  const EngineOptions engine{options.method == Method::kEngine, options.uses_threshold};
  return std::make_unique<Engine>(problem, tables, engine);
}

}  // namespace

Chain::Chain(const Problem* problem, std::uint64_t seed, ChainOptions options)
    : space_(problem),
      simulator_(MakeSimulator(problem, space_.tables(), options)),
      random_(seed),
      deck_(problem->machine.device_count),
      best_(problem->blocks.size()) {
  std::iota(deck_.begin(), deck_.end(), 0);
}

void Chain::Place(std::int32_t block, const Placement& placement) { simulator_->Place(block, placement); }

void Chain::PlaceAtRandom() {
  for (std::size_t block = 0; block < best_.size(); ++block) {
    Draw(static_cast<std::int32_t>(block), &drawn_);
    simulator_->Place(static_cast<std::int32_t>(block), drawn_);
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
  double current_s = simulator_->Makespan();
  std::int64_t accepted = 0;
  for (std::int64_t i = 0; i < proposals; ++i) {
    const std::int32_t block = random_.Below(best_.size());
    Draw(block, &drawn_);
    const double threshold_s = current_s - std::log(random_.Unit()) * temperature_s;
    const double proposed_s = simulator_->Propose(block, drawn_, threshold_s);
    if (proposed_s > threshold_s) {
      simulator_->Reject();
      continue;
    }
    simulator_->Accept();
    ++accepted;
    current_s = proposed_s;
    if (current_s < best_s_) {
      best_s_ = current_s;
      for (std::size_t b = 0; b < best_.size(); ++b) best_[b] = simulator_->placement(static_cast<std::int32_t>(b));
    }
  }
  return accepted;
}

}  // namespace soapstone

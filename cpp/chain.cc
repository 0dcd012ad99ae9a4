#include "chain.h"

#include <cmath>
#include <limits>
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
      moves_(problem, &space_, options.moves),
      random_(seed),
      best_(problem->blocks.size()) {}

void Chain::Place(std::int32_t block, const Placement& placement) {
  simulator_->Place(block, placement);
  best_s_ = Simulator::kNever;
  best_excess_bytes_ = std::numeric_limits<std::int64_t>::max();
}

void Chain::PlaceAtRandom() {
  Placement drawn;
  for (std::size_t block = 0; block < best_.size(); ++block) {
    moves_.DrawPlacement(static_cast<std::int32_t>(block), &random_, &drawn);
    Place(static_cast<std::int32_t>(block), drawn);
  }
}

void Chain::Limit(Footprint::Limits limits) {
  footprint_.emplace(moves_.problem(), space_.tables(), std::move(limits));
  if (!footprint_->is_limited()) footprint_.reset();
}

std::int64_t Chain::excess_bytes() { return footprint_ ? footprint_->Excess(*simulator_, {}) : 0; }

std::int64_t Chain::Step(std::int64_t proposals, double temperature_s) {
  double current_s = simulator_->Makespan();
  std::int64_t excess_bytes = this->excess_bytes();
  KeepBest(current_s, excess_bytes);
  std::int64_t accepted = 0;
  for (std::int64_t i = 0; i < proposals; ++i) {
    ++proposals_;
    const std::vector<Change>& changes = moves_.Draw(*simulator_, &random_);
    double threshold_s = current_s - std::log(random_.Unit()) * temperature_s;
    std::int64_t proposed_bytes = 0;
    if (excess_bytes > 0) {
      // Memory comes before time.
      proposed_bytes = footprint_->Excess(*simulator_, changes);
      if (proposed_bytes > excess_bytes) continue;
      if (proposed_bytes < excess_bytes) threshold_s = Simulator::kNever;
    }
    const double proposed_s = simulator_->Propose(changes, threshold_s);
    if (proposed_s > threshold_s) {
      simulator_->Reject();
      continue;
    }
    if (footprint_ && excess_bytes == 0 && footprint_->Excess(*simulator_, changes) > 0) {
      simulator_->Reject();
      continue;
    }
    simulator_->Accept();
    ++accepted;
    current_s = proposed_s;
    excess_bytes = proposed_bytes;
    KeepBest(current_s, excess_bytes);
  }
  return accepted;
}

std::int64_t Chain::Quieten(std::int64_t proposals, double limit_s) {
  double makespan_s = simulator_->Makespan();
  double link_s = simulator_->LinkSeconds();
  const std::int64_t excess_bytes = this->excess_bytes();
  std::int64_t accepted = 0;
  for (std::int64_t i = 0; i < proposals; ++i) {
    ++proposals_;
    const std::vector<Change>& changes = moves_.Draw(*simulator_, &random_);
    const double proposed_s = simulator_->Propose(changes, limit_s);
    const bool is_quieter = proposed_s <= limit_s && simulator_->LinkSeconds() < link_s;
    if (!is_quieter || (footprint_ && footprint_->Excess(*simulator_, changes) > excess_bytes)) {
      simulator_->Reject();
      continue;
    }
    simulator_->Accept();
    ++accepted;
    makespan_s = proposed_s;
    link_s = simulator_->LinkSeconds();
  }
  Keep(makespan_s, excess_bytes);
  return accepted;
}

// Takes note of a strategy, if it is the best so far.
void Chain::KeepBest(double makespan_s, std::int64_t excess_bytes) {
  if (std::pair(excess_bytes, makespan_s) < std::pair(best_excess_bytes_, best_s_)) Keep(makespan_s, excess_bytes);
}

void Chain::Keep(double makespan_s, std::int64_t excess_bytes) {
  best_s_ = makespan_s;
  best_excess_bytes_ = excess_bytes;
  best_at_ = proposals_;
  for (std::size_t b = 0; b < best_.size(); ++b) best_[b] = simulator_->placement(static_cast<std::int32_t>(b));
}

}  // namespace soapstone

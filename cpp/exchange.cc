#include "exchange.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

namespace soapstone {
namespace {

// One transfer before patterns are looked for.
struct Transfer {
  std::int32_t from;
  std::int32_t to;
  BoxBounds box;
  std::vector<std::pair<std::int32_t, std::int32_t>> sources;
  std::vector<std::int32_t> sinks;
};

// The commonest exchange by far, a gradient summed among equal holders, without looking at all pairs:
// every box is the same, every source has one device, and the sinks are on just these devices.
bool IsPlainAllReduce(const std::vector<Source>& sources, const std::vector<Sink>& sinks) {
  if (sources.size() < 2 || sinks.size() < 2) return false;
  const BoxBounds& box = *sources[0].box;
  std::vector<std::int32_t> givers;
  for (const Source& source : sources) {
    if (source.devices.size() != 1 || *source.box != box) return false;
    givers.push_back(source.devices[0]);
  }
  std::sort(givers.begin(), givers.end());
  givers.erase(std::unique(givers.begin(), givers.end()), givers.end());
  if (givers.size() != sinks.size()) return false;
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    if (sinks[i].device != givers[i] || *sinks[i].box != box) return false;
  }
  for (std::size_t i = 1; i < sources.size(); ++i) {
    if (sources[i].summand != sources[0].summand) return true;
  }
  return false;
}

Exchange PlainAllReduce(const std::vector<Source>& sources, const std::vector<Sink>& sinks) {
  Exchange found;
  Move move;
  move.pattern = Pattern::kAllReduce;
  move.elements = Volume(*sources[0].box);
  for (std::size_t k = 0; k < sinks.size(); ++k) {
    move.devices.push_back(sinks[k].device);
    move.sinks.push_back(static_cast<std::int32_t>(k));
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::int32_t device = sources[i].devices[0];
    move.sources.emplace_back(static_cast<std::int32_t>(i), device);
    const auto at = std::lower_bound(move.devices.begin(), move.devices.end(), device);
    found.local.emplace_back(static_cast<std::int32_t>(i),
                             static_cast<std::int32_t>(at - move.devices.begin()));
  }
  found.moves.push_back(std::move(move));
  return found;
}

Pattern Recognised(const std::vector<const Transfer*>& group, std::size_t device_count, bool adds) {
  const std::size_t n = device_count;
  if (n < 2 || group.size() != n * (n - 1)) return Pattern::kTransfer;
  std::set<std::pair<std::int32_t, std::int32_t>> pairs;
  std::set<BoxBounds> distinct;
  std::map<std::int32_t, const BoxBounds*> by_sender;
  std::map<std::int32_t, const BoxBounds*> by_receiver;
  bool per_sender = true;
  bool per_receiver = true;
  const std::int64_t volume = Volume(group[0]->box);
  for (const Transfer* transfer : group) {
    if (!pairs.emplace(transfer->from, transfer->to).second) return Pattern::kTransfer;
    if (Volume(transfer->box) != volume) return Pattern::kTransfer;
    distinct.insert(transfer->box);
    per_sender = per_sender && *by_sender.emplace(transfer->from, &transfer->box).first->second == transfer->box;
    per_receiver =
        per_receiver && *by_receiver.emplace(transfer->to, &transfer->box).first->second == transfer->box;
  }
  if (adds) {
    if (distinct.size() == 1) return Pattern::kAllReduce;
    return per_receiver && distinct.size() == n ? Pattern::kReduceScatter : Pattern::kTransfer;
  }
  if (per_sender && distinct.size() == n) return Pattern::kAllGather;
  return distinct.size() == n * (n - 1) ? Pattern::kAllToAll : Pattern::kTransfer;
}

// Whether different summands share elements, so that what arrives is added.
bool Adds(const std::vector<Source>& sources, const std::vector<std::pair<std::int32_t, std::int32_t>>& given) {
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Source& a = sources[given[i].first];
    for (std::size_t j = 0; j < i; ++j) {
      const Source& b = sources[given[j].first];
      if (a.summand != b.summand && Intersection(*a.box, *b.box)) return true;
    }
  }
  return false;
}

std::vector<Move> WithCollectives(std::vector<Transfer>& transfers, const std::vector<Source>& sources,
                                  std::int32_t device_count) {
  // Transfers of one micro-batch (that of their first source) are put together, and of no other.
  std::int32_t lanes = 1;
  for (const Source& source : sources) lanes = std::max(lanes, source.lane + 1);
  const auto at = [&](const Transfer& transfer, std::int32_t device) {
    return sources[transfer.sources[0].first].lane * device_count + device;
  };
  std::vector<std::int32_t> leader(static_cast<std::size_t>(device_count) * lanes);
  std::iota(leader.begin(), leader.end(), 0);
  const auto find = [&leader](std::int32_t device) {
    while (leader[device] != device) device = leader[device];
    return device;
  };
  for (const Transfer& transfer : transfers) {
    const std::int32_t a = find(at(transfer, transfer.from));
    const std::int32_t b = find(at(transfer, transfer.to));
    leader[std::max(a, b)] = std::min(a, b);
  }
  std::vector<std::int32_t> order;  // leaders, as they first appear
  std::map<std::int32_t, std::vector<const Transfer*>> groups;
  for (const Transfer& transfer : transfers) {
    std::vector<const Transfer*>& group = groups[find(at(transfer, transfer.from))];
    if (group.empty()) order.push_back(find(at(transfer, transfer.from)));
    group.push_back(&transfer);
  }
  std::vector<Move> moves;
  for (const std::int32_t first : order) {
    const std::vector<const Transfer*>& group = groups[first];
    std::set<std::int32_t> devices;
    std::set<std::pair<std::int32_t, std::int32_t>> given;
    std::set<std::int32_t> taken;
    for (const Transfer* transfer : group) {
      devices.insert({transfer->from, transfer->to});
      given.insert(transfer->sources.begin(), transfer->sources.end());
      taken.insert(transfer->sinks.begin(), transfer->sinks.end());
    }
    Pattern pattern = Pattern::kTransfer;
    if (group.size() == devices.size() * (devices.size() - 1)) {
      const std::vector<std::pair<std::int32_t, std::int32_t>> list(given.begin(), given.end());
      pattern = Recognised(group, devices.size(), Adds(sources, list));
    }
    if (pattern != Pattern::kTransfer) {
      Move move;
      move.pattern = pattern;
      move.devices.assign(devices.begin(), devices.end());
      move.elements = Volume(group[0]->box);
      move.sources.assign(given.begin(), given.end());
      move.sinks.assign(taken.begin(), taken.end());
      moves.push_back(std::move(move));
      continue;
    }
    for (const Transfer* transfer : group) {
      Move move;
      move.devices = {transfer->from, transfer->to};
      move.elements = Volume(transfer->box);
      move.sources = transfer->sources;
      move.sinks = transfer->sinks;
      moves.push_back(std::move(move));
    }
  }
  return moves;
}

}  // namespace

std::int32_t Nearest(const MachineData& machine, std::span<const std::int32_t> holders, std::int32_t device,
                     std::size_t turn) {
  if (holders.size() == 1) return holders[0];
  const auto bandwidth = [&](std::int32_t holder) { return machine.bandwidth[holder * machine.device_count + device]; };
  double widest = 0;
  for (const std::int32_t holder : holders) widest = std::max(widest, bandwidth(holder));
  thread_local std::vector<std::int32_t> best;  // its memory is kept: this is asked for every part of an exchange
  best.clear();
  for (const std::int32_t holder : holders) {
    if (bandwidth(holder) == widest) best.push_back(holder);
  }
  const auto nth = best.begin() + static_cast<std::ptrdiff_t>(turn % best.size());
  std::nth_element(best.begin(), nth, best.end());
  return *nth;
}

bool IsOneSum(const Exchange& exchange, std::size_t source_count) {
  if (exchange.moves.size() != 1 || exchange.moves[0].pattern != Pattern::kAllReduce) return false;
  std::set<std::int32_t> given;
  for (const auto& [source, device] : exchange.moves[0].sources) given.insert(source);
  return given.size() == source_count;
}

Exchange MakeExchange(const MachineData& machine, const std::vector<Source>& sources,
                      const std::vector<Sink>& sinks) {
  if (IsPlainAllReduce(sources, sinks)) return PlainAllReduce(sources, sinks);
  Exchange found;
  std::vector<Transfer> parts;
  std::size_t turn = 0;
  for (std::size_t k = 0; k < sinks.size(); ++k) {
    if (k > 0 && sinks[k].device != sinks[k - 1].device) ++turn;
    const std::size_t first_of_sink = parts.size();
    for (std::size_t i = 0; i < sources.size(); ++i) {
      auto overlap = Intersection(*sources[i].box, *sinks[k].box);
      if (!overlap) continue;
      const auto source = static_cast<std::int32_t>(i);
      const auto sink = static_cast<std::int32_t>(k);
      const std::span<const std::int32_t> holders = sources[i].devices;
      if (std::find(holders.begin(), holders.end(), sinks[k].device) != holders.end()) {
        found.local.emplace_back(source, sink);
        continue;
      }
      const std::int32_t giver = Nearest(machine, holders, sinks[k].device, turn);
      // What one device gives of one box to this sink is added up before it is sent.
      std::size_t at = first_of_sink;
      while (at < parts.size() && (parts[at].from != giver || parts[at].box != *overlap)) ++at;
      if (at == parts.size()) parts.push_back({giver, sinks[k].device, std::move(*overlap), {}, {sink}});
      parts[at].sources.emplace_back(source, giver);
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Transfer& a, const Transfer& b) {
    return std::tie(a.from, a.to, a.box, a.sources) < std::tie(b.from, b.to, b.box, b.sources);
  });
  // Sinks that want the same sum of the same box share it.
  std::vector<Transfer> transfers;
  for (Transfer& part : parts) {
    if (!transfers.empty() && transfers.back().from == part.from && transfers.back().to == part.to &&
        transfers.back().box == part.box && transfers.back().sources == part.sources) {
      transfers.back().sinks.push_back(part.sinks[0]);
    } else {
      transfers.push_back(std::move(part));
    }
  }
  found.moves = WithCollectives(transfers, sources, machine.device_count);
  return found;
}

}  // namespace soapstone

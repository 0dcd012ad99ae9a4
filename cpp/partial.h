// Lower bounds for strategies of which only some blocks are placed.
//
// What placed blocks compute is known. A value or a weight all of whose blocks are placed has its exchange
// as in the task graph; of one with blocks yet to be placed, only who waits for whom and for how long at
// least. An unplaced block is passed in the time of the quickest shard it could have; and a placed one whose
// reader is not waits for its gradient at least the best round trip there is through any placement of the
// readers that follow. All of this goes into a Relaxation.
//
// A bound is the same for all relabellings of the devices that symmetry.h admits: it knows no task order, and
// where a box could come from several copies it assumes no more than that it comes from one of them.
//
// Thread safety: a Partial belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_PARTIAL_H_
#define SOAPSTONE_CPP_PARTIAL_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "draft.h"
#include "exchange.h"
#include "layout.h"
#include "placement.h"
#include "problem.h"
#include "relaxation.h"
#include "space.h"
#include "symmetry.h"

namespace soapstone {

// A box by its number.
inline BoxBounds BoundsOf(const BoxTable& table, std::int32_t box) {
  return {table.Bounds(box).begin(), table.Bounds(box).end()};
}

// Where some shards run.
inline std::vector<std::int32_t> DevicesOf(const Placement& placement, std::span<const std::int32_t> shards) {
  std::vector<std::int32_t> devices;
  for (const std::int32_t shard : shards) devices.push_back(placement.devices[shard]);
  return devices;
}

// What a layout writes of a value.
//
// REQUIRES: it does.
inline const Written& WrittenOf(const Layout& layout, std::int32_t value) {
  return *std::find_if(layout.written.begin(), layout.written.end(),
                       [value](const Written& each) { return each.port.subject == value; });
}

class Partial {
 public:
  static constexpr std::int32_t kUnplaced = -1;

  // REQUIRES: problem, space and symmetry outlive it.
  Partial(const Problem* problem, Space* space, const Symmetry* symmetry, DeviceLists lists);

  // Every placement of a block: each layout, on every list of devices there may be.
  const std::vector<Placement>& domain(std::int32_t block) const { return domains_[block]; }

  // A bound for all strategies that agree with `chosen`: by block, the number of a placement, or kUnplaced.
  // If it is no less than `limit_s`, any bound that is.
  double Bound(std::span<const std::int32_t> chosen, double limit_s);

  // Whether one block reads what the other writes, or both use a weight.
  bool AreNear(std::int32_t a, std::int32_t b) const { return is_near_[a * domains_.size() + b] != 0; }

  // What a partial strategy comes down to: two with the same key that place the same blocks have the same task
  // graphs under any placement of the others. Of blocks that nothing yet unplaced depends on, it says only what
  // each device computes, sends and waits for, and not which shard it is.
  //
  const std::string& Key(std::span<const std::int32_t> chosen);

  // From now on bounds need only hold for strategies all of whose placements are among these (by block, their
  // numbers). Returns whether that may make a difference.
  //
  // REQUIRES: with a placement, its relabellings are among them.
  bool Restrict(std::vector<std::vector<std::int32_t>> left);

 private:
  // A task of a placed block, by place in the list of the blocks it is about; or an update.
  struct Ref {
    static constexpr std::int16_t kUpdate = -1;

    std::int16_t part;
    std::int16_t pass;
    std::int16_t segment;
    std::int16_t shard;
  };
  // What an exchange adds to the tasks of its blocks.
  struct Template {
    struct Move {
      std::vector<std::int32_t> links;  // all of them are busy with it
      double duration_s;
      std::vector<Ref> givers;
      std::vector<Ref> takers;
    };
    struct Lag {
      double lag_s;
      Ref taker;
      std::vector<Ref> givers;  // the first of them is waited for
    };
    struct Update {
      std::int32_t device;
      double duration_s;
    };
    std::vector<Move> moves;
    std::vector<Lag> lags;
    std::vector<Update> updates;
    bool is_exact[2] = {true, true};  // by pass: whether it says all that its takers wait for
    std::int32_t number = -1;  // the same for templates that say the same
  };
  // A value as one of the blocks that read it sees it.
  struct Edge {
    std::int32_t value = -1;
    std::int32_t writer = -1;
    std::int32_t reader = -1;
    bool covers = false;   // the reader reads all of it
    bool returns = false;  // its gradient comes back to every shard of the writer
    bool is_always_read = true;  // by every shard, under every layout
  };
  struct KeyHash {
    std::size_t operator()(const std::vector<std::int32_t>& key) const;
  };
  struct BlockPart {
    std::int32_t block;
    const Placement* placement;
  };

  void ListEdges();
  void ListNear();
  void ListDomains(Space* space, DeviceLists lists);
  void SetQuickest();
  void SetRoundTrips();
  double RoundTrip(const Edge& edge, std::int32_t from, std::int32_t through);
  double ComputeSeconds(const Placement& placement, Pass pass, std::int32_t segment, std::int32_t shard) const;

  const Template& ValueTemplate(std::int32_t value, std::span<const std::int32_t> chosen);
  const Template& WeightTemplate(std::int32_t weight, std::span<const std::int32_t> chosen);
  std::int32_t NumberOf(const Template& made, const std::vector<BlockPart>& parts, bool is_decided);
  std::int32_t NumberOf(const BlockPart& part, const Template& seams);
  void AddSeam(const BlockPart& part, const SeamData& seam, bool backward, Template* made);
  void MakeValue(std::int32_t value, const std::vector<BlockPart>& parts, bool is_decided, Template* made);
  void MakeWeight(std::int32_t weight, const std::vector<BlockPart>& parts, bool is_decided, Template* made);
  template <typename Gives, typename Takes>
  void AddExchange(const std::vector<Source>& sources, const std::vector<Sink>& sinks, std::int64_t item_bytes,
                   bool is_decided, Pass pass, const Gives& gives, const Takes& takes, Template* made);
  double LagSeconds(std::int64_t size_bytes, std::int32_t to) const;

  void Relax(std::span<const std::int32_t> chosen);
  void Place(std::span<const std::int32_t> chosen);
  void AddBlock(std::int32_t block, const Placement& placement);
  void Apply(const Template& made, std::span<const std::int32_t> blocks);
  void AddUnplaced(std::span<const std::int32_t> chosen);
  void AddEdge(const Edge& edge, std::size_t number, std::span<const std::int32_t> chosen);
  void SetComplete();

  const Problem* problem_;
  BoxTables* tables_;
  const Symmetry* symmetry_;
  std::vector<std::vector<Placement>> domains_;  // by block
  std::vector<std::vector<std::int32_t>> left_;  // by block: placements that bounds must hold for
  std::vector<std::uint8_t> is_near_;  // by pair of blocks
  std::vector<Edge> edges_;
  std::vector<std::int32_t> writer_;                // by value
  std::vector<std::vector<std::int32_t>> readers_;  // by value: blocks
  std::vector<std::vector<std::int32_t>> users_;    // by weight: blocks
  std::vector<std::vector<std::int32_t>> into_;     // by block: edges
  std::vector<std::vector<std::int32_t>> out_of_;
  std::vector<double> widest_;   // by device: the best bandwidth to it
  std::vector<double> nearest_;  // by device: the least latency to it
  std::vector<double> least_work_s_;      // by block, summed over shards
  std::vector<double> least_update_s_;    // by weight
  std::vector<double> quickest_s_[2];     // by pass, by block: from its operands to its values
  std::vector<std::vector<double>> round_trip_s_;  // by edge, by placement of the writer

  std::unordered_map<std::vector<std::int32_t>, Template, KeyHash> templates_;
  std::vector<std::vector<Template>> seams_;  // by block, by placement; made with the domains
  std::vector<std::vector<std::int32_t>> kinds_;  // by block, by placement: the same where devices compute the same
  std::unordered_map<std::string, std::int32_t> numbers_;  // of what templates and placements say
  std::string said_;
  std::string whole_key_;
  std::vector<std::uint8_t> is_open_;

  // The relaxation under way.
  Relaxation relaxation_;
  std::vector<const Placement*> placed_;
  std::vector<std::int32_t> first_;       // by block: its first task, or the point of an unplaced one's passes
  std::vector<std::uint8_t> is_known_[2];  // by pass, by block: whether all that it waits for is
  std::vector<std::int32_t> update_;      // by update of the template being applied
  double work_s_ = 0;
  std::vector<std::int32_t> key_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PARTIAL_H_

// The layouts that a block may have on a machine, made when they are first asked for.
//
// The twin of src/soapstone/strategy/space.py.
//
// Thread safety: a Space belongs to one thread; the Problem is shared.

#ifndef SOAPSTONE_CPP_SPACE_H_
#define SOAPSTONE_CPP_SPACE_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "layout.h"
#include "problem.h"
#include "random.h"

namespace soapstone {

// Which devices the shards of a block may be on: any that are distinct, in any order; or only those that follow
// each other by number, in that order, as FlexFlow's own code has them.
enum class DeviceLists { kAny, kRanges };

class Space {
 public:
  // REQUIRES: problem outlives the space.
  explicit Space(const Problem* problem);
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  BoxTables* tables() { return &tables_; }

  // The layout of a block under the degrees of its leader; null if the block cannot be split so.
  //
  // REQUIRES: one degree for each dim of the leader, each a divisor of its size.
  const Layout* Find(std::int32_t block, const std::vector<std::int32_t>& degrees);

  // A layout with at most as many parts as there are devices, all being equally likely.
  const Layout* Draw(std::int32_t block, Random* random);

  // A layout with so many parts; null if there is none.
  const Layout* DrawParts(std::int32_t block, std::int32_t parts, Random* random);

  // How many there are; all of them are made.
  std::size_t Count(std::int32_t block);

  // The degrees of what Draw() draws from, known to be legal or not yet tried.
  const std::vector<std::vector<std::int32_t>>& degrees(std::int32_t block);

 private:
  struct Choice {
    bool is_listed = false;
    std::vector<std::vector<std::int32_t>> degrees;
    std::vector<std::int32_t> parts;
    std::vector<const Layout*> layouts;  // null where not yet tried
  };
  struct Hash {
    std::size_t operator()(const std::vector<std::int32_t>& degrees) const;
  };

  void List(std::int32_t block);
  // One of the listed; null if it is not legal after all, and then it is forgotten.
  const Layout* Try(std::int32_t block, std::size_t at);

  const Problem* problem_;
  BoxTables tables_;
  std::vector<std::unordered_map<std::vector<std::int32_t>, std::unique_ptr<const Layout>, Hash>> known_;
  std::vector<Choice> choices_;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_SPACE_H_

// Boxes of one value or weight, each known by a number.
//
// Thread safety: a table belongs to one thread.

#ifndef SOAPSTONE_CPP_BOXTABLE_H_
#define SOAPSTONE_CPP_BOXTABLE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace soapstone {

class BoxTable {
 public:
  static constexpr std::int32_t kNone = -1;

  // REQUIRES: every box has `rank` axes.
  explicit BoxTable(std::size_t rank) : width_(2 * rank) {}

  // The number of a box, given lo and hi of each axis.
  std::int32_t Number(std::span<const std::int64_t> bounds);

  // The number of the elements that two boxes share, or kNone. Exchanges ask for the same again and again, so
  // what was found is kept for a while.
  std::int32_t Overlap(std::int32_t a, std::int32_t b);

  // The bounds of what two boxes share.
  //
  // REQUIRES: they do share some elements; there is room for the bounds.
  void OverlapInto(std::int32_t a, std::int32_t b, std::int64_t* bounds) const;

  bool Overlaps(std::int32_t a, std::int32_t b) const;

  std::span<const std::int64_t> Bounds(std::int32_t box) const {
    return {bounds_.data() + static_cast<std::size_t>(box) * width_, width_};
  }
  std::int64_t Volume(std::int32_t box) const { return volumes_[box]; }
  std::size_t width() const { return width_; }
  std::size_t size() const { return volumes_.size(); }

  // Whether a box comes before another: lexicographically by their bounds.
  bool Less(std::int32_t a, std::int32_t b) const;

 private:
  static constexpr std::size_t kMet = 4096;

  // Two boxes that were met, and what they share.
  struct Met {
    std::int32_t a = kNone;
    std::int32_t b = kNone;
    std::int32_t overlap = kNone;
  };

  // Where a box is known, or could be put. With its hash beside it, few boxes are looked at in vain.
  struct Place {
    std::int32_t box = kNone;
    std::uint32_t hash = 0;
  };

  static std::uint32_t Hash(std::span<const std::int64_t> bounds);
  std::size_t PlaceOf(std::span<const std::int64_t> bounds, std::uint32_t hash) const;
  void Grow();
  std::int32_t WorkedOutOverlap(std::int32_t a, std::int32_t b);

  // A loop: for so few numbers a call of memcmp takes longer.
  bool IsSame(const std::int64_t* bounds, std::int32_t box) const {
    const std::int64_t* own = bounds_.data() + static_cast<std::size_t>(box) * width_;
    for (std::size_t i = 0; i < width_; ++i) {
      if (bounds[i] != own[i]) return false;
    }
    return true;
  }

  std::size_t width_;
  std::vector<std::int64_t> bounds_;
  std::vector<std::int64_t> volumes_;
  std::vector<Place> places_;  // open addressing
  std::vector<std::int64_t> scratch_;
  std::vector<Met> met_;  // by hash of the two
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_BOXTABLE_H_

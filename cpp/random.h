// Random numbers that are the same everywhere: xoshiro256++ by Blackman and Vigna, seeded by splitmix64.

#ifndef SOAPSTONE_CPP_RANDOM_H_
#define SOAPSTONE_CPP_RANDOM_H_

#include <bit>
#include <cstdint>

namespace soapstone {

class Random {
 public:
  explicit Random(std::uint64_t seed) {
    for (std::uint64_t& word : state_) {
      seed += 0x9e3779b97f4a7c15;
      std::uint64_t mixed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
      mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
      word = mixed ^ (mixed >> 31);
    }
  }

  std::uint64_t Next() {
    const std::uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
    const std::uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // Uniform in [0, count). The bias is below count / 2^32.
  //
  // REQUIRES: 0 < count < 2^32.
  std::int32_t Below(std::size_t count) { return static_cast<std::int32_t>(((Next() >> 32) * count) >> 32); }

  // Uniform in (0, 1].
  double Unit() { return static_cast<double>((Next() >> 11) + 1) * 0x1.0p-53; }

 private:
  std::uint64_t state_[4];
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_RANDOM_H_

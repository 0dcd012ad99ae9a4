// The meaning of an operator on small tensors over a finite field, for fingerprints.
//
// Elements are integers modulo the prime 2^61 - 1, in which sums, products and quotients are exact: two
// polynomials that differ almost never agree on random elements. What is no field operation (exp, a
// comparison) is a hash of its arguments; the larger and the smaller of two follow the order of the
// representatives between -p/2 and p/2. Which elements meet is said by a table of positions, so nothing here
// knows an operator.
//
// Thread safety: a Program is immutable.

#ifndef SOAPSTONE_CPP_SUBST_PROGRAM_H_
#define SOAPSTONE_CPP_SUBST_PROGRAM_H_

#include <cstdint>
#include <span>
#include <vector>

namespace soapstone {

using Element = std::uint64_t;

inline constexpr Element kPrime = (Element{1} << 61) - 1;

// One step of a scalar expression in postfix order.
struct Step {
  enum Kind : std::int32_t {
    kOperand = 0,  // push operand number `argument`
    kConstant,     // push the field element `argument`
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kNegate,
    kMax,
    kMin,
    kHash,  // pop `argument` & 0xff values, push their hash under the name `argument` >> 8
  };
  std::int32_t kind;
  std::int64_t argument;
};

enum class Combine : std::int32_t { kSum = 0, kMax, kMin, kChain };

// Writes `size` elements. Element e combines points [e * points, (e + 1) * points), each of which evaluates
// `body` on one element of each of `arity` operands, found at `gather[(e * points + point) * arity + operand]`:
// -1 is `outside`, -2 that the point does not count. `finish`, if any, is evaluated on what they combine to
// (operand 0) and on the elements at `finish_gather[e * extra + i]` of operands arity + i (operand 1 + i).
// With kChain the elements read are hashed in order, together with the number `salt[e]`.
//
// REQUIRES: the expressions leave one value and use at most 64 places; the positions fit the operands.
struct Program {
  std::int32_t arity = 0;
  std::int64_t size = 0;
  std::int64_t points = 0;
  Combine combine = Combine::kSum;
  Element outside = 0;
  std::vector<std::int32_t> gather;
  std::vector<Step> body;
  std::int32_t extra = 0;
  std::vector<std::int32_t> finish_gather;
  std::vector<Step> finish;
  std::vector<std::int64_t> salt;

  // Adds the elements of the result to `out`.
  void Run(std::span<const Element* const> operands, std::vector<Element>* out) const;
};

// A well mixed hash of two numbers.
std::uint64_t Mixed(std::uint64_t a, std::uint64_t b);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_SUBST_PROGRAM_H_

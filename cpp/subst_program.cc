#include "subst_program.h"

#include <array>
#include <cstddef>

namespace soapstone {
namespace {

constexpr std::size_t kDepth = 64;

Element Sum(Element a, Element b) {
  const Element sum = a + b;
  return sum >= kPrime ? sum - kPrime : sum;
}

Element Negated(Element a) { return a == 0 ? 0 : kPrime - a; }

Element Product(Element a, Element b) {
  const unsigned __int128 wide = static_cast<unsigned __int128>(a) * b;
  return Sum(static_cast<Element>(wide & kPrime), static_cast<Element>(wide >> 61));
}

// By Fermat's little theorem; the inverse of 0 is 0.
Element Inverse(Element a) {
  Element result = 1;
  for (Element power = kPrime - 2; power != 0; power >>= 1) {
    if (power & 1) result = Product(result, a);
    a = Product(a, a);
  }
  return result;
}

std::int64_t Signed(Element a) {
  return a > kPrime / 2 ? static_cast<std::int64_t>(a) - static_cast<std::int64_t>(kPrime)
                        : static_cast<std::int64_t>(a);
}

Element Larger(Element a, Element b) { return Signed(a) >= Signed(b) ? a : b; }
Element Smaller(Element a, Element b) { return Signed(a) <= Signed(b) ? a : b; }

class Stack {
 public:
  void Push(Element value) { values_[count_++] = value; }
  Element Pop() { return values_[--count_]; }

 private:
  std::array<Element, kDepth> values_;
  std::size_t count_ = 0;
};

Element Hashed(Stack* stack, std::int64_t argument) {
  std::uint64_t hash = static_cast<std::uint64_t>(argument >> 8);
  for (std::int64_t left = argument & 0xff; left > 0; --left) hash = Mixed(hash, stack->Pop());
  return hash % kPrime;
}

Element Evaluated(const std::vector<Step>& steps, std::span<const Element> operands) {
  Stack stack;
  for (const Step& step : steps) {
    switch (step.kind) {
      case Step::kOperand:
        stack.Push(operands[static_cast<std::size_t>(step.argument)]);
        break;
      case Step::kConstant:
        stack.Push(static_cast<Element>(step.argument));
        break;
      case Step::kNegate:
        stack.Push(Negated(stack.Pop()));
        break;
      case Step::kHash:
        stack.Push(Hashed(&stack, step.argument));
        break;
      default: {
        const Element b = stack.Pop();
        const Element a = stack.Pop();
        switch (step.kind) {
          case Step::kAdd:
            stack.Push(Sum(a, b));
            break;
          case Step::kSubtract:
            stack.Push(Sum(a, Negated(b)));
            break;
          case Step::kMultiply:
            stack.Push(Product(a, b));
            break;
          case Step::kDivide:
            stack.Push(Product(a, Inverse(b)));
            break;
          case Step::kMax:
            stack.Push(Larger(a, b));
            break;
          default:
            stack.Push(Smaller(a, b));
        }
      }
    }
  }
  return stack.Pop();
}

Element Combined(Combine combine, Element a, Element b) {
  switch (combine) {
    case Combine::kSum:
      return Sum(a, b);
    case Combine::kMax:
      return Larger(a, b);
    case Combine::kMin:
      return Smaller(a, b);
    case Combine::kChain:
      return Mixed(a, b) % kPrime;
  }
  return 0;
}

}  // namespace

std::uint64_t Mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a ^ 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9 + b;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

void Program::Run(std::span<const Element* const> operands, std::vector<Element>* out) const {
  std::vector<Element> read(static_cast<std::size_t>(arity));
  std::vector<Element> finishing(static_cast<std::size_t>(extra) + 1);
  for (std::int64_t e = 0; e < size; ++e) {
    const bool chains = combine == Combine::kChain;
    Element total = chains ? static_cast<Element>(salt[static_cast<std::size_t>(e)]) : 0;
    bool is_first = !chains;
    for (std::int64_t point = 0; point < points; ++point) {
      const std::int32_t* positions = gather.data() + (e * points + point) * arity;
      bool counts = true;
      for (std::int32_t i = 0; i < arity; ++i) {
        if (positions[i] == -2) counts = false;
        read[static_cast<std::size_t>(i)] = positions[i] < 0 ? outside : operands[static_cast<std::size_t>(i)][positions[i]];
      }
      if (!counts) continue;
      if (chains) {
        for (const Element element : read) total = Combined(combine, total, element);
        continue;
      }
      const Element value = Evaluated(body, read);
      total = is_first ? value : Combined(combine, total, value);
      is_first = false;
    }
    if (!finish.empty()) {
      finishing[0] = total;
      for (std::int32_t i = 0; i < extra; ++i) {
        const std::int32_t position = finish_gather[static_cast<std::size_t>(e * extra + i)];
        finishing[static_cast<std::size_t>(i) + 1] =
            position < 0 ? outside : operands[static_cast<std::size_t>(arity + i)][position];
      }
      total = Evaluated(finish, finishing);
    }
    out->push_back(total);
  }
}

}  // namespace soapstone

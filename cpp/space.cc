#include "space.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace soapstone {
namespace {

// Whether factored axes are cut outermost first, as ops/signature.py wants it.
bool IsLegal(const NodeData& leader, const std::vector<std::int32_t>& degrees) {
  for (const std::vector<std::int32_t>& dims : leader.factored) {
    for (std::size_t i = 0; i + 1 < dims.size(); ++i) {
      if (degrees[dims[i + 1]] > 1 && degrees[dims[i]] != leader.sizes[dims[i]]) return false;
    }
  }
  return true;
}

void Extend(const NodeData& leader, std::size_t dim, std::int32_t left, std::vector<std::int32_t>* degrees,
            std::vector<std::vector<std::int32_t>>* found) {
  if (dim == leader.sizes.size()) {
    if (IsLegal(leader, *degrees)) found->push_back(*degrees);
    return;
  }
  for (std::int32_t degree = 1; degree <= left; ++degree) {
    if (leader.sizes[dim] % degree != 0) continue;
    (*degrees)[dim] = degree;
    Extend(leader, dim + 1, left / degree, degrees, found);
    if (!leader.is_splittable[dim]) break;
  }
  (*degrees)[dim] = 1;
}

}  // namespace

Space::Space(const Problem* problem)
    : problem_(problem), tables_(*problem), known_(problem->blocks.size()), choices_(problem->blocks.size()) {}

std::size_t Space::Hash::operator()(const std::vector<std::int32_t>& degrees) const {
  std::size_t hash = 0x9e3779b97f4a7c15;
  for (const std::int32_t degree : degrees) hash = (hash ^ static_cast<std::size_t>(degree)) * 0xff51afd7ed558ccd;
  return hash;
}

const Layout* Space::Find(std::int32_t block, const std::vector<std::int32_t>& degrees) {
  const auto [found, is_new] = known_[block].try_emplace(degrees);
  if (is_new) {
    auto layout = MakeLayout(*problem_, &tables_, block, degrees);
    if (layout) found->second = std::make_unique<const Layout>(std::move(*layout));
  }
  return found->second.get();
}

void Space::List(std::int32_t block) {
  Choice& choice = choices_[block];
  if (choice.is_listed) return;
  choice.is_listed = true;
  const NodeData& leader = problem_->blocks[block].nodes[0];
  std::vector<std::int32_t> degrees(leader.sizes.size(), 1);
  Extend(leader, 0, problem_->machine.device_count, &degrees, &choice.degrees);
  choice.layouts.assign(choice.degrees.size(), nullptr);
  for (const std::vector<std::int32_t>& each : choice.degrees) {
    choice.parts.push_back(std::accumulate(each.begin(), each.end(), 1, std::multiplies<>()));
  }
}

const Layout* Space::Try(std::int32_t block, std::size_t at) {
  Choice& choice = choices_[block];
  if (choice.layouts[at] == nullptr) choice.layouts[at] = Find(block, choice.degrees[at]);
  if (choice.layouts[at] != nullptr) return choice.layouts[at];
  const auto place = static_cast<std::ptrdiff_t>(at);
  choice.degrees.erase(choice.degrees.begin() + place);
  choice.parts.erase(choice.parts.begin() + place);
  choice.layouts.erase(choice.layouts.begin() + place);
  return nullptr;
}

const Layout* Space::Draw(std::int32_t block, Random* random) {
  List(block);
  Choice& choice = choices_[block];
  while (true) {  // the whole block is always legal
    const Layout* layout = Try(block, random->Below(choice.degrees.size()));
    if (layout != nullptr) return layout;
  }
}

const Layout* Space::DrawParts(std::int32_t block, std::int32_t parts, Random* random) {
  List(block);
  const std::vector<std::int32_t>& listed = choices_[block].parts;
  while (true) {
    const std::ptrdiff_t found = std::count(listed.begin(), listed.end(), parts);
    if (found == 0) return nullptr;
    auto left = static_cast<std::ptrdiff_t>(random->Below(found));
    std::size_t at = 0;
    while (listed[at] != parts || left-- > 0) ++at;
    const Layout* layout = Try(block, at);
    if (layout != nullptr) return layout;
  }
}

std::size_t Space::Count(std::int32_t block) {
  List(block);
  Choice& choice = choices_[block];
  for (std::size_t at = 0; at < choice.degrees.size();) {
    if (Try(block, at) != nullptr) ++at;
  }
  return choice.degrees.size();
}

const std::vector<std::vector<std::int32_t>>& Space::degrees(std::int32_t block) {
  List(block);
  return choices_[block].degrees;
}

}  // namespace soapstone

#include "subst_bank.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "random.h"

namespace soapstone {

std::size_t TermBank::KeyHash::operator()(const std::vector<std::int32_t>& key) const {
  std::uint64_t hash = key.size();
  for (const std::int32_t part : key) hash = Mixed(hash, static_cast<std::uint32_t>(part));
  return hash;
}

std::int32_t TermBank::AddProgram(Program program) {
  programs_.push_back(std::move(program));
  return static_cast<std::int32_t>(programs_.size()) - 1;
}

std::int32_t TermBank::AddOperator(std::vector<std::int32_t> operands, std::vector<std::int32_t> outputs,
                                   std::vector<std::int32_t> programs, bool commutes) {
  const auto op = static_cast<std::int32_t>(operators_.size());
  by_operands_[operands].push_back(op);
  const auto arity = static_cast<std::int32_t>(operands.size());
  if (std::find(arities_.begin(), arities_.end(), arity) == arities_.end()) arities_.push_back(arity);
  operators_.push_back({std::move(operands), std::move(outputs), std::move(programs), commutes});
  return op;
}

std::int32_t TermBank::AddVariable(std::int32_t type, std::int64_t size, bool enumerated) {
  const auto value = static_cast<std::int32_t>(values_.size());
  Random random(seed_ + static_cast<std::uint64_t>(value));
  const auto begin = static_cast<std::int64_t>(elements_.size());
  std::uint64_t hash = static_cast<std::uint64_t>(type);
  for (std::int64_t i = 0; i < size; ++i) {
    // Three in four below zero, so that the largest of a few elements is not always above; one always above.
    const Element magnitude = random.Next() % (kPrime / 2);
    elements_.push_back(random.Below(4) == 0 || i == value % size ? magnitude : kPrime - 1 - magnitude);
    hash = Mixed(hash, elements_.back());
  }
  std::uint64_t mask = 0;
  if (enumerated) {
    mask = std::uint64_t{1} << variables_.size();
    bits_[type].push_back(static_cast<int>(variables_.size()));
    variables_.push_back(value);
  }
  values_.push_back({type, -1, 0, begin, hash, mask});
  return value;
}

std::int32_t TermBank::Apply(std::int32_t op, const std::vector<std::int32_t>& operands) {
  std::vector<std::int32_t> key{op};
  key.insert(key.end(), operands.begin(), operands.end());
  const auto [place, is_new] = known_.try_emplace(std::move(key), static_cast<std::int32_t>(nodes_.size()));
  if (!is_new) return nodes_[place->second].first_value;
  const Operator& definition = operators_[op];
  const auto node = static_cast<std::int32_t>(nodes_.size());
  const auto first = static_cast<std::int32_t>(values_.size());
  nodes_.push_back({op, operands, first});
  std::uint64_t variables = 0;
  for (const std::int32_t operand : operands) variables |= values_[operand].variables;
  std::vector<Element> made;
  for (std::size_t i = 0; i < definition.outputs.size(); ++i) {
    std::vector<const Element*> read;
    for (const std::int32_t operand : operands) read.push_back(elements_.data() + values_[operand].begin);
    made.clear();
    programs_[definition.programs[i]].Run(read, &made);
    std::uint64_t hash = static_cast<std::uint64_t>(definition.outputs[i]);
    for (const Element element : made) hash = Mixed(hash, element);
    const auto begin = static_cast<std::int64_t>(elements_.size());
    elements_.insert(elements_.end(), made.begin(), made.end());
    values_.push_back({definition.outputs[i], node, static_cast<std::int32_t>(i), begin, hash, variables});
  }
  return first;
}

void TermBank::Outputs(const std::vector<std::int32_t>& nodes, std::vector<std::int32_t>* outputs) const {
  outputs->clear();
  for (const std::int32_t node : nodes) {
    const auto count = static_cast<std::int32_t>(operators_[nodes_[node].op].outputs.size());
    for (std::int32_t i = 0; i < count; ++i) outputs->push_back(nodes_[node].first_value + i);
  }
  for (const std::int32_t node : nodes) {
    for (const std::int32_t operand : nodes_[node].operands) {
      const auto place = std::find(outputs->begin(), outputs->end(), operand);
      if (place != outputs->end()) outputs->erase(place);
    }
  }
}

bool TermBank::IsConnected(const std::vector<std::int32_t>& nodes) const {
  if (nodes.size() < 2) return true;
  // Each node reaches the variables it depends on; nodes that share one, or one of which reads the other, do
  // so too, since a read node's variables are among the reader's.
  std::uint64_t reached = values_[nodes_[nodes[0]].first_value].variables;
  std::uint32_t left = ((1u << nodes.size()) - 1) & ~1u;
  for (bool grows = true; grows && left != 0;) {
    grows = false;
    for (std::size_t i = 1; i < nodes.size(); ++i) {
      const std::uint64_t variables = values_[nodes_[nodes[i]].first_value].variables;
      if ((left >> i & 1) && (variables & reached) != 0) {
        reached |= variables;
        left &= ~(1u << i);
        grows = true;
      }
    }
  }
  return left == 0;
}

bool TermBank::UsesFirstVariables(std::uint64_t variables) const {
  for (const auto& [type, bits] : bits_) {
    bool gap = false;
    for (const int bit : bits) {
      const bool is_used = variables >> bit & 1;
      if (is_used && gap) return false;
      gap = gap || !is_used;
    }
  }
  return true;
}

void TermBank::Record(const std::vector<std::int32_t>& nodes) {
  std::uint64_t variables = 0;
  for (const std::int32_t node : nodes) variables |= values_[nodes_[node].first_value].variables;
  if (!UsesFirstVariables(variables) || !IsConnected(nodes)) return;
  std::vector<std::int32_t> outputs;
  Outputs(nodes, &outputs);
  if (outputs.empty() || static_cast<int>(outputs.size()) > most_outputs_) return;
  ++graph_count_;
  Found graph{};
  for (const std::int32_t output : outputs) graph.hash += Mixed(1, values_[output].fingerprint);
  graph.node_count = static_cast<std::int32_t>(nodes.size());
  std::copy(nodes.begin(), nodes.end(), graph.nodes);
  found_.push_back(graph);
}

void TermBank::Try(std::int32_t op, const std::vector<std::int32_t>& operands, std::vector<std::int32_t>* nodes,
                   std::vector<std::int32_t>* available, int most_nodes) {
  if (operators_[op].commutes && operands[0] > operands[1]) return;
  if (static_cast<int>(nodes->size()) + 1 == most_nodes) {
    // The last node: what will not be recorded need not be built.
    std::uint64_t variables = 0;
    for (const std::int32_t operand : operands) variables |= values_[operand].variables;
    for (const std::int32_t node : *nodes) variables |= values_[nodes_[node].first_value].variables;
    if (!UsesFirstVariables(variables)) return;
  }
  const std::int32_t first = Apply(op, operands);
  const std::int32_t node = values_[first].node;
  if (!nodes->empty() && node <= nodes->back()) return;
  nodes->push_back(node);
  Record(*nodes);
  if (static_cast<int>(nodes->size()) < most_nodes) {
    const std::size_t before = available->size();
    for (std::size_t i = 0; i < operators_[op].outputs.size(); ++i) {
      available->push_back(first + static_cast<std::int32_t>(i));
    }
    Extend(nodes, available, most_nodes);
    available->resize(before);
  }
  nodes->pop_back();
}

void TermBank::Extend(std::vector<std::int32_t>* nodes, std::vector<std::int32_t>* available, int most_nodes) {
  const std::vector<std::int32_t> values = *available;
  for (const std::int32_t arity : arities_) {
    std::vector<std::size_t> choice(static_cast<std::size_t>(arity), 0);
    std::vector<std::int32_t> operands(choice.size()), types(choice.size());
    for (;;) {
      for (std::size_t i = 0; i < choice.size(); ++i) {
        operands[i] = values[choice[i]];
        types[i] = values_[operands[i]].type;
      }
      if (const auto ops = by_operands_.find(types); ops != by_operands_.end()) {
        for (const std::int32_t op : ops->second) Try(op, operands, nodes, available, most_nodes);
      }
      std::size_t at = 0;
      while (at < choice.size() && ++choice[at] == values.size()) choice[at++] = 0;
      if (at == choice.size()) break;
    }
  }
}

std::vector<TermBank::Member> TermBank::EqualGraphs(int most_nodes, int most_outputs) {
  most_outputs_ = most_outputs;
  found_.clear();
  graph_count_ = 0;
  // Graphs without a node: one variable, or two of them.
  struct Bare {
    std::uint64_t hash;
    std::int32_t outputs[2];
  };
  std::vector<Bare> bare;
  for (std::size_t i = 0; i < variables_.size(); ++i) {
    const std::uint64_t hash = Mixed(1, values_[variables_[i]].fingerprint);
    bare.push_back({hash, {variables_[i], -1}});
    for (std::size_t j = i + 1; j < variables_.size() && most_outputs > 1; ++j) {
      bare.push_back({hash + Mixed(1, values_[variables_[j]].fingerprint), {variables_[i], variables_[j]}});
    }
  }
  std::vector<std::int32_t> nodes, available = variables_;
  if (most_nodes > 0) Extend(&nodes, &available, most_nodes);

  // Classes, by hash: how often each occurs, then the members of those that occur twice.
  std::vector<std::size_t> order(found_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
    if (found_[a].hash != found_[b].hash) return found_[a].hash < found_[b].hash;
    if (found_[a].node_count != found_[b].node_count) return found_[a].node_count < found_[b].node_count;
    return a < b;
  });
  std::unordered_map<std::uint64_t, const Bare*> bare_by_hash;
  for (const Bare& graph : bare) bare_by_hash.emplace(graph.hash, &graph);
  std::vector<Member> members;
  std::int32_t group = 0;
  std::vector<std::int32_t> outputs;
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin;
    while (end < order.size() && found_[order[end]].hash == found_[order[begin]].hash) ++end;
    const auto trivial = bare_by_hash.find(found_[order[begin]].hash);
    const bool has_trivial = trivial != bare_by_hash.end();
    if (end - begin > 1 || has_trivial) {
      if (has_trivial) {
        members.push_back({group, 0, {trivial->second->outputs[0], trivial->second->outputs[1], -1, -1}});
      }
      for (std::size_t i = begin; i < end; ++i) {
        const Found& graph = found_[order[i]];
        Outputs({graph.nodes, graph.nodes + graph.node_count}, &outputs);
        Member member{group, graph.node_count, {-1, -1, -1, -1}};
        std::sort(outputs.begin(), outputs.end(), [this](std::int32_t a, std::int32_t b) {
          return values_[a].fingerprint < values_[b].fingerprint;
        });
        std::copy(outputs.begin(), outputs.end(), member.outputs);
        members.push_back(member);
      }
      ++group;
    }
    begin = end;
  }
  // The outputs of the trivial ones in the same order too.
  for (Member& member : members) {
    if (member.node_count == 0 && member.outputs[1] >= 0 &&
        values_[member.outputs[0]].fingerprint > values_[member.outputs[1]].fingerprint) {
      std::swap(member.outputs[0], member.outputs[1]);
    }
  }
  found_.clear();
  return members;
}

}  // namespace soapstone

// All small graphs over a set of operators, and which of them compute the same.
//
// A value is a variable or an output of a node; a node is an operator applied to values, and exists once
// however often it is asked for. Values have types, which are opaque numbers here: an operator takes values of
// certain types, so what does not fit is never built. A value's fingerprint is a hash of its type and its
// elements. A graph is a set of nodes whose operands are variables or outputs of its nodes; what its nodes
// leave unconsumed are its outputs. Two graphs are equal when their outputs are, as multisets of fingerprints.
// Unity 4, "substitution generation".
//
// Thread safety: a TermBank belongs to one thread.

#ifndef SOAPSTONE_CPP_SUBST_BANK_H_
#define SOAPSTONE_CPP_SUBST_BANK_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "subst_program.h"

namespace soapstone {

class TermBank {
 public:
  explicit TermBank(std::uint64_t seed) : seed_(seed) {}

  std::int32_t AddProgram(Program program);

  // An operator that takes values of the types `operands` and leaves one of each of the types `outputs`, by
  // the programs named beside them. An operator that `commutes` (two operands) is built in one order only.
  //
  // REQUIRES: one program for each output.
  std::int32_t AddOperator(std::vector<std::int32_t> operands, std::vector<std::int32_t> outputs,
                           std::vector<std::int32_t> programs, bool commutes);

  // A variable with `size` random elements. Variables of one type are interchangeable; `enumerated` ones are
  // those that graphs are made of, the others exist for questions.
  std::int32_t AddVariable(std::int32_t type, std::int64_t size, bool enumerated);

  // The first output of a node; the others follow it.
  //
  // REQUIRES: the operands have the types that the operator takes.
  std::int32_t Apply(std::int32_t op, const std::vector<std::int32_t>& operands);

  std::uint64_t Fingerprint(std::int32_t value) const { return values_[value].fingerprint; }
  std::int32_t Type(std::int32_t value) const { return values_[value].type; }

  // The node of a value (-1 for a variable) and which of its outputs the value is.
  std::int32_t NodeOf(std::int32_t value) const { return values_[value].node; }
  std::int32_t OutputOf(std::int32_t value) const { return values_[value].output; }
  std::int32_t OperatorOf(std::int32_t node) const { return nodes_[node].op; }
  const std::vector<std::int32_t>& OperandsOf(std::int32_t node) const { return nodes_[node].operands; }

  std::size_t node_count() const { return nodes_.size(); }
  std::size_t value_count() const { return values_.size(); }
  std::int64_t graph_count() const { return graph_count_; }

  // One graph: the class of equal graphs it is in, and its outputs (values), -1 where there are fewer.
  struct Member {
    std::int32_t group;
    std::int32_t node_count;
    std::int32_t outputs[4];
  };

  // All connected graphs of at most `most_nodes` nodes and `most_outputs` outputs that equal some other one,
  // those of one class together and small ones first. Graphs without a node are outputs that are variables.
  //
  // REQUIRES: most_nodes <= 6, 1 <= most_outputs <= 4, at most 64 variables.
  std::vector<Member> EqualGraphs(int most_nodes, int most_outputs);

 private:
  struct Operator {
    std::vector<std::int32_t> operands, outputs, programs;
    bool commutes;
  };
  struct Node {
    std::int32_t op;
    std::vector<std::int32_t> operands;
    std::int32_t first_value;
  };
  struct Value {
    std::int32_t type, node, output;
    std::int64_t begin;
    std::uint64_t fingerprint;
    std::uint64_t variables;  // those it depends on
  };
  struct Found {
    std::uint64_t hash;
    std::int32_t nodes[6];
    std::int32_t node_count;
  };
  struct KeyHash {
    std::size_t operator()(const std::vector<std::int32_t>& key) const;
  };

  void Extend(std::vector<std::int32_t>* nodes, std::vector<std::int32_t>* available, int most_nodes);
  void Try(std::int32_t op, const std::vector<std::int32_t>& operands, std::vector<std::int32_t>* nodes,
           std::vector<std::int32_t>* available, int most_nodes);
  void Record(const std::vector<std::int32_t>& nodes);
  void Outputs(const std::vector<std::int32_t>& nodes, std::vector<std::int32_t>* outputs) const;
  bool IsConnected(const std::vector<std::int32_t>& nodes) const;
  bool UsesFirstVariables(std::uint64_t variables) const;

  std::uint64_t seed_;
  std::vector<Program> programs_;
  std::vector<Operator> operators_;
  std::unordered_map<std::vector<std::int32_t>, std::vector<std::int32_t>, KeyHash> by_operands_;
  std::vector<std::int32_t> arities_;
  std::vector<Node> nodes_;
  std::vector<Value> values_;
  std::vector<Element> elements_;
  std::unordered_map<std::vector<std::int32_t>, std::int32_t, KeyHash> known_;
  std::vector<std::int32_t> variables_;              // those that are enumerated
  std::unordered_map<std::int32_t, std::vector<int>> bits_;  // of the enumerated variables of each type
  std::vector<Found> found_;
  std::int64_t graph_count_ = 0;
  int most_outputs_ = 1;
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_SUBST_BANK_H_

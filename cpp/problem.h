// A planning problem as flat data: what is computed, what moves between the parts, and on what machine.
//
// It knows no operator: a node is a set of dims with sizes, and affine maps from them to the axes of the
// tensors it reads and writes. Python derives all of this from operators (src/soapstone/tasks/flat.py).
//
// Thread safety: filled by one thread, then read by any number.

#ifndef SOAPSTONE_CPP_PROBLEM_H_
#define SOAPSTONE_CPP_PROBLEM_H_

#include <cstdint>
#include <vector>

namespace soapstone {

// The axis of a tensor as a function of a node's dims: (offset + sum of stride * dim) / divisor.
struct Axis {
  std::int64_t offset = 0;
  std::int64_t divisor = 1;
  std::vector<std::int32_t> dims;
  std::vector<std::int64_t> strides;
};

// How a node reads or writes a tensor. `value` is the number of the value if it moves between blocks,
// `weight` that of the weight; both are -1 for what every device has at hand. An operand that the block
// itself writes names the node and the output that do.
struct Access {
  std::int32_t value = -1;
  std::int32_t weight = -1;
  std::int32_t inner_node = -1;
  std::int32_t inner_output = -1;
  bool is_present = true;
  bool is_finishing = false;  // read only by the first shard along the summed dims
  bool is_gathered = false;   // read only where indices point
  bool wants_gradient = false;
  bool is_kept = false;  // whether the backward pass needs it; of an output: of any node
  std::int64_t item_bytes = 0;
  std::vector<std::int64_t> shape;
  std::vector<Axis> axes;
};

// Measured times of an operator: shapes that were measured, and a plane through them for all others. Shapes are
// written as what a shard reads of each operand and then writes of each output: the number of axes and their
// lengths, or -1 for an operand that it does not read. Sorted, for binary search. No shape takes less than the
// least of its flops or its bytes.
struct TimeCurve {
  double base_s = 0;
  double s_per_flop = 0;
  double s_per_byte = 0;
  double least_s_per_flop = 0;
  double least_s_per_byte = 0;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<double> seconds;
};

// One operator of a block.
struct NodeData {
  std::vector<std::int64_t> sizes;      // of its dims
  std::vector<std::uint8_t> is_splittable;  // per dim
  std::vector<std::uint8_t> is_summed;  // per dim: no output shows it
  std::vector<std::uint8_t> is_shared;  // per dim: statistics are taken over it
  std::vector<std::uint8_t> is_gathered;  // per dim: indices point into it
  bool synchronises = false;            // whether statistics over split dims are exchanged
  std::vector<std::vector<std::int32_t>> factored;  // dims of each factored axis, outermost first
  std::int32_t carried = -1;            // the operand through which it follows; -1 for the leader
  double flops = 0;                     // of the whole node, forward
  std::vector<double> flops_per_s;      // by kind of device
  std::vector<std::int32_t> forward_curve;   // by kind of device: of Problem::curves, or -1 for none
  std::vector<std::int32_t> backward_curve;  // the same; both are empty where nothing was measured
  std::vector<Access> operands;
  std::vector<Access> outputs;
  bool has_backward = false;      // whether its backward pass computes anything
  bool writes_gradient = false;   // whether some output carries a gradient
  bool is_free_forward = false;   // a view: takes no time
  bool is_free_backward = false;
};

struct BlockData {
  std::vector<NodeData> nodes;
  bool needs_backward = false;
  bool passes_sums = false;      // whether followers take partial sums as they would take the sum
  std::int32_t sample_dim = -1;  // the leader's dim that counts samples, if it may be split
};

struct ValueData {
  std::int32_t rank = 0;
  std::int64_t item_bytes = 4;
  bool is_differentiable = false;
  std::int32_t number = 0;  // place in the graph, for the task order
};

struct WeightData {
  std::int32_t rank = 0;
  std::int64_t item_bytes = 4;
  std::int32_t number = 0;
  std::int32_t shelf = 0;  // gradients of one shelf may share a bucket (tasks/buckets.py); numbered from 0
};

// What does not depend on the model.
struct MachineData {
  std::int32_t device_count = 0;
  std::int32_t link_count = 0;
  std::vector<std::int32_t> kind;        // by device
  std::vector<std::int32_t> link;        // [a * device_count + b]: the narrowest link of the route
  std::vector<double> bandwidth;         // the same, bytes per second
  std::vector<double> latency;           // the same, seconds
  std::vector<double> launch_s;          // by kind
  std::vector<double> message_s;         // the same: what a message takes of the device that it comes to
  std::vector<double> memory_bytes_per_s;
  double update_bytes_per_byte = 5;
  bool sums_by_one_device = false;       // instead of by a ring or a tree
};

struct Problem {
  MachineData machine;
  std::vector<BlockData> blocks;
  std::vector<ValueData> values;
  std::vector<WeightData> weights;
  std::vector<TimeCurve> curves = {};
  bool has_buckets = false;  // whether gradients of one shelf that the same devices hold are summed together
};

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_PROBLEM_H_

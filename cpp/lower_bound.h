// A lower bound of the makespan of every strategy of a problem of any size, however loose.
//
//   compute  all work, done without loss on all devices at once: every operator is computed at least once as a
//            whole, and every weight that is trained is updated at least once
//   path     the longest way forward through the model and back, each operator passed in the time of the
//            smallest shard that the devices allow
//
// It holds for all strategies whose blocks have at most as many shards as there are devices.
//
// Thread safety: a pure function.

#ifndef SOAPSTONE_CPP_LOWER_BOUND_H_
#define SOAPSTONE_CPP_LOWER_BOUND_H_

#include "problem.h"

namespace soapstone {

struct LowerBound {
  double compute_s = 0;
  double path_s = 0;
};

LowerBound MakeLowerBound(const Problem& problem);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_LOWER_BOUND_H_

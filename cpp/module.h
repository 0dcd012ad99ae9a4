// The parts of the Python module soapstone._core.

#ifndef SOAPSTONE_CPP_MODULE_H_
#define SOAPSTONE_CPP_MODULE_H_

#include <nanobind/nanobind.h>

namespace soapstone {

// Adds the planning problem, its task graph and the simulator.
void BindTasks(nanobind::module_& module);

// Adds the exact search and lower bounds.
void BindExact(nanobind::module_& module);

// Adds the enumeration of equal graphs.
void BindSubst(nanobind::module_& module);

// Adds words that processes share.
void BindWords(nanobind::module_& module);

}  // namespace soapstone

#endif  // SOAPSTONE_CPP_MODULE_H_

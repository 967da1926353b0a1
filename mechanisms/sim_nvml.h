// SPDX-License-Identifier: Apache-2.0
//
// The simulated NVML: what the processes that share the simulated cards have of them. As on an H200, memory is
// charged to the process that made it for as long as that holds it, and then to one that imported it; a context is its
// process's. Memory that is held by descriptors alone is charged to nobody.
#ifndef RESIDENCY_MECHANISMS_SIM_NVML_H_
#define RESIDENCY_MECHANISMS_SIM_NVML_H_

#include "mechanisms/nvml.h"

namespace residency {

// Its functions answer kNvmlUninitialized before OpenSimDriver, and kNvmlNotSupported where the faults say attr:NVML=0.
Nvml SimNvml();

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_NVML_H_

// SPDX-License-Identifier: Apache-2.0
//
// Fills the driver table from libcuda.so.1, which is opened at run time so that every binary starts on a
// machine without a GPU.
#ifndef RESIDENCY_MECHANISMS_CUDA_DRIVER_H_
#define RESIDENCY_MECHANISMS_CUDA_DRIVER_H_

#include "absl/status/statusor.h"
#include "mechanisms/driver.h"

namespace residency {

// The table of the installed driver. The library stays loaded for the life of the process (unloading
// libcuda is not supported by it). Does not call cuInit. Any thread.
// UNAVAILABLE/NO_DRIVER where libcuda.so.1 cannot be opened, or lacks a function: the message names the
// loader's error or the symbol, and `--driver=sim`.
absl::StatusOr<Driver> LoadCudaDriver();

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_CUDA_DRIVER_H_

// SPDX-License-Identifier: Apache-2.0
//
// Which process has how much of a GPU's memory, which only NVML says. Like driver.h a table of functions, filled from
// libnvidia-ml.so.1 or by the simulated cards (sim_nvml.h). The declarations are ours: nvml.h comes with a package of
// its own, and these few have not changed since driver 510. Their meaning is NVIDIA's documentation of the functions
// of these names. What is shown may rest on them, no decision: they are not there everywhere.
//
// Threads: any, as NVML's own.
#ifndef RESIDENCY_MECHANISMS_NVML_H_
#define RESIDENCY_MECHANISMS_NVML_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace residency {

// nvmlReturn_t, as far as it is told apart here.
enum NvmlResult : int {
  kNvmlSuccess = 0,
  kNvmlUninitialized = 1,
  kNvmlInvalidArgument = 2,
  kNvmlNotSupported = 3,
  kNvmlNotFound = 6,
  kNvmlInsufficientSize = 7,
  kNvmlUnknown = 999,
};

// nvmlDevice_t
using NvmlDevice = struct NvmlDeviceHandle*;

// nvmlProcessInfo_t of the functions' third version.
struct NvmlProcessInfo {
  unsigned int pid;
  unsigned long long used_bytes;  // kNvmlNotAvailable: not told, as on WSL
  unsigned int gpu_instance;      // of MIG
  unsigned int compute_instance;
};

// NVML_VALUE_NOT_AVAILABLE
inline constexpr unsigned long long kNvmlNotAvailable = ~0ULL;

struct Nvml {
  NvmlResult (*nvmlInit)() = nullptr;
  const char* (*nvmlErrorString)(NvmlResult result) = nullptr;
  NvmlResult (*nvmlDeviceGetHandleByUUID)(const char* uuid, NvmlDevice* device) = nullptr;
  // `count` is the room in `processes`, then how many there are.
  NvmlResult (*nvmlDeviceGetComputeRunningProcesses)(NvmlDevice device, unsigned int* count,
                                                     NvmlProcessInfo* processes) = nullptr;
  NvmlResult (*nvmlDeviceGetGraphicsRunningProcesses)(NvmlDevice device, unsigned int* count,
                                                      NvmlProcessInfo* processes) = nullptr;
};

// The table of the installed library, initialized; that takes a GPU machine some 20 ms. The library stays loaded.
// UNAVAILABLE/NO_NVML where it does not open, lacks a function, or does not initialize: the message names which.
absl::StatusOr<Nvml> LoadNvml();

struct ProcessMemory {
  int64_t pid = 0;
  uint64_t bytes = 0;
};

// What each process has of the GPU's memory, its context included, by rising pid. Memory that several share is its
// maker's for as long as that holds it, and then an importer's. `self` is a process that is known to have a context
// there: a list without it is one of another pid namespace, or of nobody.
// UNAVAILABLE/NO_NVML where NVML does not tell, for any process, or lists none that is `self`: why.
absl::StatusOr<std::vector<ProcessMemory>> MeasureProcesses(const Nvml& nvml, const std::string& uuid, int64_t self);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_NVML_H_

// SPDX-License-Identifier: Apache-2.0
//
// The one seam below us: the functions of the CUDA driver API that this project calls, as a table.
// cuda_driver fills it from libcuda.so.1, sim_driver from memfd-like pages. Code above calls through the
// table and cannot tell which one it has. The signatures are cuda.h's own, so the meaning of each entry
// is NVIDIA's documentation of the function of that name; sim_driver.h says how far the simulated one
// follows it.
//
// Threads: as CUDA's. Every function may be called from any thread; those that act on a context act on
// the calling thread's current one.
#ifndef RESIDENCY_MECHANISMS_DRIVER_H_
#define RESIDENCY_MECHANISMS_DRIVER_H_

#include <cuda.h>

#include <string>

namespace residency {

// The name of each entry is the name in the documentation. Where cuda.h maps it to a versioned symbol
// (cuMemGetInfo to cuMemGetInfo_v2) the macro expansion gives that symbol to dlsym.
// clang-format off
#define RESIDENCY_DRIVER_CALLS(X) \
  X(cuInit)                             \
  X(cuDriverGetVersion)                 \
  X(cuGetErrorName)                     \
  X(cuGetErrorString)                   \
  X(cuDeviceGetCount)                   \
  X(cuDeviceGet)                        \
  X(cuDeviceGetName)                    \
  X(cuDeviceGetUuid)                    \
  X(cuDeviceTotalMem)                   \
  X(cuDeviceGetAttribute)               \
  X(cuDevicePrimaryCtxRetain)           \
  X(cuDevicePrimaryCtxRelease)          \
  X(cuCtxSetCurrent)                    \
  X(cuCtxGetCurrent)                    \
  X(cuCtxSynchronize)                   \
  X(cuMemGetInfo)                       \
  X(cuMemGetAllocationGranularity)      \
  X(cuMemAddressReserve)                \
  X(cuMemAddressFree)                   \
  X(cuMemCreate)                        \
  X(cuMemRelease)                       \
  X(cuMemMap)                           \
  X(cuMemUnmap)                         \
  X(cuMemSetAccess)                     \
  X(cuMemGetAccess)                     \
  X(cuMemExportToShareableHandle)       \
  X(cuMemImportFromShareableHandle)     \
  X(cuMemRetainAllocationHandle)        \
  X(cuMemAlloc)                         \
  X(cuMemFree)                          \
  X(cuMemHostRegister)                  \
  X(cuMemHostUnregister)                \
  X(cuMemcpyHtoDAsync)                  \
  X(cuMemcpyDtoHAsync)                  \
  X(cuMemsetD8Async)                    \
  X(cuStreamCreate)                     \
  X(cuStreamDestroy)                    \
  X(cuStreamSynchronize)                \
  X(cuStreamQuery)                      \
  X(cuStreamWaitEvent)                  \
  X(cuStreamIsCapturing)                \
  X(cuEventCreate)                      \
  X(cuEventDestroy)                     \
  X(cuEventRecord)                      \
  X(cuEventQuery)                       \
  X(cuEventSynchronize)                 \
  X(cuEventElapsedTime)                 \
  X(cuModuleLoadData)                   \
  X(cuModuleUnload)                     \
  X(cuModuleGetFunction)                \
  X(cuLaunchKernel)
// clang-format on

struct Driver {
#define RESIDENCY_DRIVER_ENTRY(name) decltype(&::name) name = nullptr;
  RESIDENCY_DRIVER_CALLS(RESIDENCY_DRIVER_ENTRY)
#undef RESIDENCY_DRIVER_ENTRY
};

enum class DriverKind { kCuda, kSim };

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DRIVER_H_

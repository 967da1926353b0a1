// SPDX-License-Identifier: Apache-2.0
//
// A simulated CUDA driver with real semantics: device memory is pages of files, device addresses are
// addresses of this process, so what is not mapped faults and what is shared is shared. Simulated cards
// live in a directory; every process that opens the same directory uses the same cards.
//
// What it promises, each a test of the conformance suite (tests/conformance_test.cc):
//  - reserved but unmapped addresses fault; one allocation may be mapped at many addresses; a mapping is
//    of a whole allocation at offset 0; unmapping or changing part of a mapping is INVALID_VALUE, while
//    one call unmaps all mappings of a range, holes or not, and changes those up to the first hole;
//  - a new allocation reads as zeros; it lives until the last handle, mapping and exported descriptor in
//    any process is gone, killed processes and descriptors in flight included, and only then counts as
//    free; a handle that was imported cannot be exported again;
//  - writes through a read-only mapping are refused (a copy: INVALID_VALUE; a kernel: ILLEGAL_ADDRESS,
//    sticky for the context of the process that launched it);
//  - streams run on threads of their own, each in order; events work across streams;
//  - an error of the sticky kind (ILLEGAL_ADDRESS, LAUNCH_FAILED, UNKNOWN) is answered by every later
//    call on that context, until the primary context is released and retained anew. Calls that need no
//    context (devices, addresses, handles, mappings) go on working, as on the real driver.
// What it does not have: caches, more than one context per device and process, peers, graphs. A copy from
// or to memory that is not registered returns when it is done. A host address that a copy cannot read
// makes the context unusable instead of the process, and a handle that was released is INVALID_VALUE (the
// real driver crashes). Registered pages of a file that was cut read as zeros (a card goes on reading what they held),
// and registering a private mapping of a file for reading is INVALID_VALUE (the real driver never returns).
//
// A table is process-wide: the functions of CUDA carry no "this", so there is one simulated driver per
// process, configured before its cuInit. It is not usable in a child of fork() that did not exec, as CUDA
// is not.
#ifndef RESIDENCY_MECHANISMS_SIM_DRIVER_H_
#define RESIDENCY_MECHANISMS_SIM_DRIVER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/driver.h"

namespace residency {

struct SimOptions {
  // Where the cards live. Made (mode 0770) when absent; the first process to open it writes the cards'
  // description there, later ones read it and ignore devices, device_bytes.
  std::string directory;
  uint32_t devices = 1;
  uint64_t device_bytes = uint64_t{16} << 30;
  // Speed of copies between host and device, per direction, device and process; 0: as fast as memory.
  uint64_t link_bytes_per_second = 0;
  // Device memory charged to each process that has a context on a card.
  uint64_t context_bytes = 0;
  // Faults, as sim_faults.h says; empty: none.
  std::string faults;

  bool operator==(const SimOptions&) const = default;
};

// The table of the simulated driver. Call once in a process (a second call is FAILED_PRECONDITION unless
// the options are equal). INVALID_ARGUMENT/BAD_FAULTS names the part of the fault text that is wrong; an
// error of the file system is passed on and names the directory.
absl::StatusOr<Driver> OpenSimDriver(const SimOptions& options);

// What a simulated kernel can do with device memory: a pointer for [address, address + bytes) when all of
// it is mapped with the needed access, else nullptr, in which case the kernel returns
// CUDA_ERROR_ILLEGAL_ADDRESS. The pointer is good until the kernel returns: unmapping waits for it.
class SimMemory {
 public:
  virtual ~SimMemory() = default;
  virtual const void* Read(CUdeviceptr address, uint64_t bytes) const = 0;
  virtual void* Write(CUdeviceptr address, uint64_t bytes) const = 0;
};

// A host function that stands for the kernel `name` of any module. `params` is cuLaunchKernel's
// kernelParams, copied at the launch: `param_bytes` are the sizes of the parameters in order. It runs on
// the stream's thread; an error that it returns makes the context unusable. The digest kernel is there
// from the start; tests add theirs. Register before cuModuleGetFunction; the first of a name stays.
using SimKernel = std::function<CUresult(const SimMemory& memory, void** params)>;
void RegisterSimKernel(const std::string& name, std::vector<uint32_t> param_bytes, SimKernel kernel);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_DRIVER_H_

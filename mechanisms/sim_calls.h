// SPDX-License-Identifier: Apache-2.0
//
// What the functions of the simulated driver's table have in common: the one instance that a process has,
// and the way into every call. Used by sim_*_calls.cc and sim_driver.cc only.
#ifndef RESIDENCY_MECHANISMS_SIM_CALLS_H_
#define RESIDENCY_MECHANISMS_SIM_CALLS_H_

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "mechanisms/driver.h"
#include "mechanisms/sim_address_space.h"
#include "mechanisms/sim_cards.h"
#include "mechanisms/sim_context.h"
#include "mechanisms/sim_driver.h"
#include "mechanisms/sim_faults.h"
#include "mechanisms/sim_host_registry.h"

namespace residency {

// The handles of device memory in this process. A handle counts its references, as
// cuMemRetainAllocationHandle and cuMemRelease do; the memory itself also lives in its mappings. Any thread.
class SimHandles {
 public:
  // Gives `allocation` its handle, with one reference.
  uint64_t Add(const std::shared_ptr<SimAllocation>& allocation);
  // One more reference to the handle of `allocation`, which may have been released while it was mapped.
  uint64_t Retain(const std::shared_ptr<SimAllocation>& allocation);
  // False for a handle that is none.
  bool Release(uint64_t handle);
  // The memory, or nullptr for a handle that is none.
  std::shared_ptr<SimAllocation> Find(uint64_t handle);

 private:
  struct Entry {
    std::shared_ptr<SimAllocation> allocation;
    uint64_t references = 0;
  };

  std::mutex mutex_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Entry> entries_;
};

// The simulated driver of this process.
struct SimProcess {
  SimProcess(const SimOptions& options, std::unique_ptr<FaultPlan> faults, std::unique_ptr<SimCards> cards);

  const SimOptions options;
  const std::chrono::steady_clock::time_point opened_at = std::chrono::steady_clock::now();
  const std::unique_ptr<FaultPlan> faults;
  const std::unique_ptr<SimCards> cards;
  SimAddressSpace space;
  SimHandles handles;
  SimHostRegistry hosts;
  std::vector<std::unique_ptr<SimContext>> contexts;  // one per card
  std::atomic<bool> initialized{false};
};

// The instance, or nullptr before OpenSimDriver. It is never destroyed: stream threads use it until the
// process ends.
SimProcess* TheSimProcess();

// The calling thread's current context; the setting survives the context's end, as CUDA's does.
SimContext*& CurrentSimContext();

// What a call needs before it does anything.
enum class SimNeeds {
  kNothing,
  kInit,     // cuInit
  kContext,  // cuInit and a current context that is not poisoned
};

// Asks the faults about a call of `name` and checks `needs`. Blocks for the delay that the faults state.
CUresult EnterSimCall(std::string_view name, SimNeeds needs);

// The way into every call: `body` runs, with the instance and the current context (nullptr where the call
// does not need one), unless the faults or `needs` answer first.
template <typename Body>
CUresult SimCall(std::string_view name, SimNeeds needs, Body body) {
  if (const CUresult result = EnterSimCall(name, needs); result != CUDA_SUCCESS) return result;
  return body(*TheSimProcess(), CurrentSimContext());
}

// Each fills its part of the table.
void FillSimDeviceCalls(Driver& driver);
void FillSimMemoryCalls(Driver& driver);
void FillSimStreamCalls(Driver& driver);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_CALLS_H_

// SPDX-License-Identifier: Apache-2.0
//
// The primary context of a simulated card in this process: its health, streams, events, modules and the
// memory that cuMemAlloc gave it. One object per card for the life of the process; between the last
// Release and the next Retain it is not active and holds nothing. Any thread.
#ifndef RESIDENCY_MECHANISMS_SIM_CONTEXT_H_
#define RESIDENCY_MECHANISMS_SIM_CONTEXT_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "mechanisms/sim_address_space.h"
#include "mechanisms/sim_cards.h"
#include "mechanisms/sim_host_registry.h"
#include "mechanisms/sim_kernels.h"
#include "mechanisms/sim_stream.h"
#include "mechanisms/sim_transfer.h"
#include "mechanisms/unique_fd.h"

namespace residency {

struct SimEvent {
  bool timing = true;
  std::shared_ptr<SimMarker> marker;  // of the latest record; none before the first
};

class SimContext {
 public:
  // What is given outlives the context.
  SimContext(SimCard& card, SimAddressSpace& space, SimHostRegistry& hosts, uint64_t context_bytes,
             uint64_t link_bytes_per_second);

  SimCard& card() { return card_; }
  SimHealth& health() { return health_; }

  // Retain is OUT_OF_MEMORY when the card has no room for the context.
  CUresult Retain();
  CUresult Release();
  bool active() const { return active_.load(); }

  CUresult CreateStream(unsigned int flags, CUstream* stream);
  CUresult DestroyStream(CUstream stream);
  // The stream, or nullptr for a handle that is none. CUDA's default stream has handle 0.
  std::shared_ptr<SimStream> FindStream(CUstream stream);
  // Enqueue in CUDA's order: the default stream waits for the blocking ones, and they for it.
  void Do(SimStream& stream, SimStream::Work work);
  std::shared_ptr<SimMarker> Mark(SimStream& stream);
  void WaitFor(SimStream& stream, std::shared_ptr<SimMarker> marker);
  // One at the end of each stream.
  std::vector<std::shared_ptr<SimMarker>> MarkAll();

  CUevent CreateEvent(bool timing);
  CUresult DestroyEvent(CUevent event);
  CUresult SetMarker(CUevent event, std::shared_ptr<SimMarker> marker);
  // A copy of the event; INVALID_HANDLE where there is none.
  CUresult FindEvent(CUevent event, SimEvent* found);

  CUmodule LoadModule();
  CUresult UnloadModule(CUmodule module);
  bool HasModule(CUmodule module);

  // cuMemAlloc and cuMemFree.
  CUresult AllocatePlain(uint64_t bytes, CUdeviceptr* address);
  CUresult FreePlain(CUdeviceptr address);

  SimLink& to_device() { return to_device_; }
  SimLink& to_host() { return to_host_; }

 private:
  // Both are called with mutex_ held.
  std::shared_ptr<SimStream> DefaultStream();
  void KeepLegacyOrder(SimStream& stream);
  uintptr_t NextHandle() { return next_handle_ += 16; }

  SimCard& card_;
  SimAddressSpace& space_;
  SimHostRegistry& hosts_;
  const uint64_t context_bytes_;
  SimLink to_device_;
  SimLink to_host_;
  SimHealth health_;
  std::atomic<bool> active_{false};

  std::mutex mutex_;
  uint64_t retained_ = 0;
  UniqueFd charge_;
  // Handles are never used twice, so one that was destroyed stays recognisable. The first are reserved by
  // CUDA: 1 and 2 name default streams.
  uintptr_t next_handle_ = 4096;
  std::shared_ptr<SimStream> default_stream_;
  std::map<uintptr_t, std::shared_ptr<SimStream>> streams_;
  std::map<uintptr_t, SimEvent> events_;
  std::set<uintptr_t> modules_;
  std::set<CUdeviceptr> plain_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_CONTEXT_H_

// SPDX-License-Identifier: Apache-2.0
//
// Device addresses of the simulated driver: which are reserved, and what memory is mapped under them.
// They are addresses of this process, reserved without access, so that a stray access faults as on a
// card; a mapping is a shared mapping of the memory's file. Any thread; no call but Unmap and a SetAccess
// that takes rights away waits for anything.
#ifndef RESIDENCY_MECHANISMS_SIM_ADDRESS_SPACE_H_
#define RESIDENCY_MECHANISMS_SIM_ADDRESS_SPACE_H_

#include <cuda.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "mechanisms/sim_cards.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// One piece of device memory. Handles, mappings and copies on their way share it: it lives until the last
// of them lets go, which is the rule of CUDA that this stands for.
struct SimAllocation {
  // `card` has it noted that this process holds the memory of `file`.
  SimAllocation(SimCard& card, uint64_t bytes, UniqueFd file)
      : card(card), card_index(card.index()), bytes(bytes), file(std::move(file)) {}
  ~SimAllocation() { card.Leave(file.get()); }
  SimAllocation(const SimAllocation&) = delete;
  SimAllocation& operator=(const SimAllocation&) = delete;

  SimCard& card;
  uint64_t id = 0;  // value of its handle
  int card_index = 0;
  uint64_t bytes = 0;
  UniqueFd file;
  bool exportable = false;
};

// What lies under the beginning of a range of addresses.
struct SimPiece {
  std::shared_ptr<SimAllocation> allocation;
  uint64_t offset_bytes = 0;  // of the address in the allocation
  uint64_t bytes = 0;         // of the range that lie in this mapping
};

class SimAddressSpace {
 public:
  // Rights are CUmemAccess_flags: none 0, read 1, read and write 3.
  static constexpr int kRead = CU_MEM_ACCESS_FLAGS_PROT_READ;
  static constexpr int kReadWrite = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

  // A range that a running kernel uses; see Pin.
  struct InUse {
    uint64_t begin;
    uint64_t end;
    bool torn = false;  // was unmapped, or lost a right, while in use
  };
  using Pinned = std::list<InUse>::iterator;

  // `hint` 0: anywhere; else there when it is free, elsewhere when it is not.
  CUresult Reserve(uint64_t bytes, uint64_t alignment, CUdeviceptr hint, CUdeviceptr* address);
  CUresult Free(CUdeviceptr address, uint64_t bytes);
  CUresult Map(CUdeviceptr address, uint64_t bytes, std::shared_ptr<SimAllocation> allocation);
  // Neither takes a range that cuts a mapping. Unmap drops all mappings of the range, however many there
  // are; it waits until running kernels have let go of the range, and those kernels then end in
  // ILLEGAL_ADDRESS, which a card would give them at once. SetAccess reaches from `address`, where something
  // has to be mapped, as far as the first hole. Both as measured on the real driver.
  CUresult Unmap(CUdeviceptr address, uint64_t bytes);
  CUresult SetAccess(CUdeviceptr address, uint64_t bytes, int card_index, int rights);
  // The rights of the mapping under `address`, or nothing.
  std::optional<int> Access(CUdeviceptr address, int card_index);
  // The memory mapped under `address` by Map, or nullptr.
  std::shared_ptr<SimAllocation> AllocationAt(CUdeviceptr address);

  // Reserves and maps read-write in one, for cuMemAlloc, and the reverse, which takes `address` only where
  // MapAnywhere gave it.
  CUresult MapAnywhere(std::shared_ptr<SimAllocation> allocation, CUdeviceptr* address);
  CUresult UnmapAnywhere(CUdeviceptr address);

  // What lies under `address`, at most `bytes` of it, when card `card_index` has `rights` there.
  std::optional<SimPiece> Locate(CUdeviceptr address, uint64_t bytes, int card_index, int rights);
  // True when card `card_index` has `rights` to every byte of the range.
  bool Covers(CUdeviceptr address, uint64_t bytes, int card_index, int rights);

  // Covers, and keeps the pages under the range until Unpin, which says whether they stayed.
  std::optional<Pinned> Pin(CUdeviceptr address, uint64_t bytes, int card_index, int rights);
  bool Unpin(Pinned range);

 private:
  struct Mapping {
    uint64_t bytes = 0;
    int rights = 0;
    bool anywhere = false;
    std::shared_ptr<SimAllocation> allocation;
  };
  using Mappings = std::map<uint64_t, Mapping>;

  // All of these are called with mutex_ held.
  Mappings::iterator Containing(uint64_t address);
  bool CoversLocked(uint64_t address, uint64_t bytes, int card_index, int rights);
  bool Cuts(uint64_t address, uint64_t bytes);
  bool IsReserved(uint64_t address, uint64_t bytes);
  void WaitForKernels(std::unique_lock<std::mutex>& lock, uint64_t address, uint64_t bytes);
  CUresult UnmapLocked(std::unique_lock<std::mutex>& lock, uint64_t address, uint64_t bytes);
  CUresult MapLocked(uint64_t address, Mapping mapping);
  CUresult FreeLocked(uint64_t address, uint64_t bytes);

  std::mutex mutex_;
  std::condition_variable unpinned_;
  std::map<uint64_t, uint64_t> reservations_;  // bytes by first address
  Mappings mappings_;                          // by first address
  std::list<InUse> in_use_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_ADDRESS_SPACE_H_

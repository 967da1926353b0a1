// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "mechanisms/sim_cards.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

constexpr uint64_t kHighestAddress = uint64_t{1} << 47;

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

int Protection(int rights) {
  if (rights == SimAddressSpace::kReadWrite) return PROT_READ | PROT_WRITE;
  return rights == SimAddressSpace::kRead ? PROT_READ : PROT_NONE;
}

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// `bytes` addresses without access, the first a multiple of `alignment`; 0 where there is no room.
uint64_t ReserveAligned(uint64_t bytes, uint64_t alignment) {
  void* wide = ::mmap(nullptr, bytes + alignment, PROT_NONE, kReserveFlags, -1, 0);
  if (wide == MAP_FAILED) return 0;
  const uint64_t begin = reinterpret_cast<uint64_t>(wide);
  const uint64_t aligned = AlignUp(begin, alignment);
  if (aligned != begin) ::munmap(wide, aligned - begin);
  const uint64_t rest = begin + alignment - aligned;
  if (rest != 0) ::munmap(Pointer(aligned + bytes), rest);
  return aligned;
}

}  // namespace

CUresult SimAddressSpace::Reserve(uint64_t bytes, uint64_t alignment, CUdeviceptr hint, CUdeviceptr* address) {
  if (bytes == 0 || bytes % kSimGranuleBytes != 0 || (alignment & (alignment - 1)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  alignment = std::max<uint64_t>(alignment, kSimGranuleBytes);
  if (bytes >= kHighestAddress || alignment >= kHighestAddress) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t begin = 0;
  if (hint != 0 && hint % alignment == 0) {
    void* there = ::mmap(Pointer(hint), bytes, PROT_NONE, kReserveFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (there != MAP_FAILED) begin = reinterpret_cast<uint64_t>(there);
  }
  if (begin == 0) begin = ReserveAligned(bytes, alignment);
  if (begin == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mutex_);
  reservations_[begin] = bytes;
  *address = begin;
  return CUDA_SUCCESS;
}

CUresult SimAddressSpace::Free(CUdeviceptr address, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return FreeLocked(address, bytes);
}

CUresult SimAddressSpace::FreeLocked(uint64_t address, uint64_t bytes) {
  const auto reservation = reservations_.find(address);
  if (reservation == reservations_.end() || reservation->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(Pointer(address), bytes);
  reservations_.erase(reservation);
  return CUDA_SUCCESS;
}

CUresult SimAddressSpace::Map(CUdeviceptr address, uint64_t bytes, std::shared_ptr<SimAllocation> allocation) {
  std::lock_guard lock(mutex_);
  return MapLocked(address, {.bytes = bytes, .allocation = std::move(allocation)});
}

CUresult SimAddressSpace::MapLocked(uint64_t address, Mapping mapping) {
  const uint64_t bytes = mapping.bytes;
  if (address % kSimGranuleBytes != 0 || !IsReserved(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (Containing(address) != mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (::mmap(Pointer(address), bytes, Protection(mapping.rights), MAP_SHARED | MAP_FIXED,
             mapping.allocation->file.get(), 0) == MAP_FAILED) {
    return CUDA_ERROR_MAP_FAILED;
  }
  // A forked child has no use of device memory, as with CUDA, and must not keep it alive.
  ::madvise(Pointer(address), bytes, MADV_DONTFORK);
  mappings_[address] = std::move(mapping);
  return CUDA_SUCCESS;
}

CUresult SimAddressSpace::Unmap(CUdeviceptr address, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  const auto first = mappings_.find(address);
  if (first != mappings_.end() && first->second.anywhere) return CUDA_ERROR_INVALID_VALUE;
  return UnmapLocked(lock, address, bytes);
}

CUresult SimAddressSpace::UnmapLocked(std::unique_lock<std::mutex>& lock, uint64_t address, uint64_t bytes) {
  if (!IsReserved(address, bytes) || Cuts(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  WaitForKernels(lock, address, bytes);
  // Another thread may have been there meanwhile.
  if (!IsReserved(address, bytes) || Cuts(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto entry = mappings_.lower_bound(address);
  while (entry != mappings_.end() && entry->first < address + bytes) {
    if (::mmap(Pointer(entry->first), entry->second.bytes, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0) == MAP_FAILED) {
      return CUDA_ERROR_UNMAP_FAILED;
    }
    entry = mappings_.erase(entry);
  }
  return CUDA_SUCCESS;
}

CUresult SimAddressSpace::SetAccess(CUdeviceptr address, uint64_t bytes, int card_index, int rights) {
  std::unique_lock lock(mutex_);
  if (!IsReserved(address, bytes) || Cuts(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto takes_right = [&] {
    return std::any_of(mappings_.lower_bound(address), mappings_.lower_bound(address + bytes),
                       [&](const auto& entry) { return (entry.second.rights & ~rights) != 0; });
  };
  if (takes_right()) WaitForKernels(lock, address, bytes);
  if (!IsReserved(address, bytes) || Cuts(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto entry = mappings_.find(address);
  if (entry == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  for (uint64_t next = address; entry != mappings_.end() && entry->first == next && next < address + bytes; ++entry) {
    Mapping& mapping = entry->second;
    // There are no peers: a card reaches its own memory only.
    if (mapping.allocation->card_index != card_index) return CUDA_ERROR_INVALID_DEVICE;
    if (::mprotect(Pointer(next), mapping.bytes, Protection(rights)) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    mapping.rights = rights;
    next += mapping.bytes;
  }
  return CUDA_SUCCESS;
}

std::optional<int> SimAddressSpace::Access(CUdeviceptr address, int card_index) {
  std::lock_guard lock(mutex_);
  const auto mapping = Containing(address);
  if (mapping == mappings_.end()) return std::nullopt;
  return mapping->second.allocation->card_index == card_index ? mapping->second.rights : 0;
}

std::shared_ptr<SimAllocation> SimAddressSpace::AllocationAt(CUdeviceptr address) {
  std::lock_guard lock(mutex_);
  const auto mapping = Containing(address);
  return mapping == mappings_.end() || mapping->second.anywhere ? nullptr : mapping->second.allocation;
}

CUresult SimAddressSpace::MapAnywhere(std::shared_ptr<SimAllocation> allocation, CUdeviceptr* address) {
  const uint64_t bytes = allocation->bytes;
  // One granule more than is mapped, so that running over the end meets a hole and not a neighbour.
  if (CUresult result = Reserve(bytes + kSimGranuleBytes, 0, 0, address); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(mutex_);
  const CUresult result = MapLocked(
      *address, {.bytes = bytes, .rights = kReadWrite, .anywhere = true, .allocation = std::move(allocation)});
  if (result != CUDA_SUCCESS) FreeLocked(*address, bytes + kSimGranuleBytes);
  return result;
}

CUresult SimAddressSpace::UnmapAnywhere(CUdeviceptr address) {
  std::unique_lock lock(mutex_);
  const auto mapping = mappings_.find(address);
  if (mapping == mappings_.end() || !mapping->second.anywhere) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t bytes = mapping->second.bytes;
  if (CUresult result = UnmapLocked(lock, address, bytes); result != CUDA_SUCCESS) return result;
  return FreeLocked(address, bytes + kSimGranuleBytes);
}

std::optional<SimPiece> SimAddressSpace::Locate(CUdeviceptr address, uint64_t bytes, int card_index, int rights) {
  std::lock_guard lock(mutex_);
  const auto mapping = Containing(address);
  if (mapping == mappings_.end() || mapping->second.allocation->card_index != card_index ||
      (mapping->second.rights & rights) != rights) {
    return std::nullopt;
  }
  const uint64_t offset = address - mapping->first;
  return SimPiece{mapping->second.allocation, offset, std::min(bytes, mapping->second.bytes - offset)};
}

bool SimAddressSpace::Covers(CUdeviceptr address, uint64_t bytes, int card_index, int rights) {
  std::lock_guard lock(mutex_);
  return CoversLocked(address, bytes, card_index, rights);
}

bool SimAddressSpace::CoversLocked(uint64_t address, uint64_t bytes, int card_index, int rights) {
  if (bytes > kHighestAddress || address > kHighestAddress) return false;
  const uint64_t end = address + bytes;
  for (auto mapping = Containing(address); address < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first > address) return false;
    if (mapping->second.allocation->card_index != card_index || (mapping->second.rights & rights) != rights)
      return false;
    address = mapping->first + mapping->second.bytes;
  }
  return true;
}

std::optional<SimAddressSpace::Pinned> SimAddressSpace::Pin(CUdeviceptr address, uint64_t bytes, int card_index,
                                                            int rights) {
  std::lock_guard lock(mutex_);
  if (!CoversLocked(address, bytes, card_index, rights)) return std::nullopt;
  return in_use_.insert(in_use_.end(), InUse{address, address + bytes});
}

bool SimAddressSpace::Unpin(Pinned range) {
  std::lock_guard lock(mutex_);
  const bool stayed = !range->torn;
  in_use_.erase(range);
  unpinned_.notify_all();
  return stayed;
}

SimAddressSpace::Mappings::iterator SimAddressSpace::Containing(uint64_t address) {
  auto mapping = mappings_.upper_bound(address);
  if (mapping == mappings_.begin()) return mappings_.end();
  --mapping;
  return address - mapping->first < mapping->second.bytes ? mapping : mappings_.end();
}

bool SimAddressSpace::Cuts(uint64_t address, uint64_t bytes) {
  const auto cut_at = [&](uint64_t edge) {
    const auto mapping = Containing(edge);
    return mapping != mappings_.end() && mapping->first != edge;
  };
  return cut_at(address) || cut_at(address + bytes);
}

bool SimAddressSpace::IsReserved(uint64_t address, uint64_t bytes) {
  auto reservation = reservations_.upper_bound(address);
  if (bytes == 0 || reservation == reservations_.begin()) return false;
  --reservation;
  const uint64_t offset = address - reservation->first;
  return offset < reservation->second && bytes <= reservation->second - offset;
}

void SimAddressSpace::WaitForKernels(std::unique_lock<std::mutex>& lock, uint64_t address, uint64_t bytes) {
  const auto overlaps = [&](const InUse& range) { return range.begin < address + bytes && address < range.end; };
  for (InUse& range : in_use_) {
    if (overlaps(range)) range.torn = true;
  }
  unpinned_.wait(lock, [&] { return std::none_of(in_use_.begin(), in_use_.end(), overlaps); });
}

}  // namespace residency

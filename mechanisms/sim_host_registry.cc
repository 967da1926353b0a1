// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_host_registry.h"

#include <sys/mman.h>

#include <cerrno>
#include <iterator>

#include "mechanisms/sim_host_mapping.h"
#include "mechanisms/units.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace residency {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t PageBegin(uint64_t address) { return address & ~(kPageBytes - 1); }

// Brings a file's pages into memory, as locking them does; false where one of them is beyond the file's end. Kernels
// before 5.14 don't know how, and then it is left.
bool ReadPages(uint64_t begin, uint64_t bytes) {
  return ::madvise(reinterpret_cast<void*>(begin), bytes, MADV_POPULATE_READ) == 0 || errno == EINVAL;
}

}  // namespace

CUresult SimHostRegistry::Register(const void* begin, uint64_t bytes, bool read_only, int card_index) {
  const uint64_t address = reinterpret_cast<uint64_t>(begin);
  if (address == 0 || bytes == 0 || address + bytes < address) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t first_page = PageBegin(address);
  const uint64_t end_page = AlignUp(address + bytes, kPageBytes);
  // Writes nothing back (the memory is the caller's business) but says whether all of the range is mapped.
  if (::msync(reinterpret_cast<void*>(first_page), end_page - first_page, MS_ASYNC) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const SimHostMemory memory = SimHostMemoryAt(first_page, end_page);
  if (memory == (read_only ? SimHostMemory::kPrivateFile : SimHostMemory::kSharedFile)) return CUDA_ERROR_INVALID_VALUE;
  const bool file = memory == SimHostMemory::kSharedFile || memory == SimHostMemory::kTmpfs;
  if (file && !ReadPages(first_page, end_page - first_page)) return CUDA_ERROR_INVALID_VALUE;

  std::lock_guard lock(mutex_);
  // Pages are what is locked, so two registrations may not share one.
  const auto next = registrations_.lower_bound(address);
  if (next != registrations_.end() && PageBegin(next->first) < end_page) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  if (next != registrations_.begin()) {
    const auto previous = std::prev(next);
    if (AlignUp(previous->first + previous->second.bytes, kPageBytes) > first_page) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
  }
  if (pin_limit_bytes_ && (bytes > *pin_limit_bytes_ || registered_bytes_ > *pin_limit_bytes_ - bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  registrations_[address] = {bytes, read_only, file, card_index};
  registered_bytes_ += bytes;
  return CUDA_SUCCESS;
}

CUresult SimHostRegistry::Unregister(const void* begin) {
  std::lock_guard lock(mutex_);
  const auto found = registrations_.find(reinterpret_cast<uint64_t>(begin));
  if (found == registrations_.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  registered_bytes_ -= found->second.bytes;
  registrations_.erase(found);
  return CUDA_SUCCESS;
}

void SimHostRegistry::DropAll(int card_index) {
  std::lock_guard lock(mutex_);
  for (auto entry = registrations_.begin(); entry != registrations_.end();) {
    if (entry->second.card_index == card_index) {
      registered_bytes_ -= entry->second.bytes;
      entry = registrations_.erase(entry);
    } else {
      ++entry;
    }
  }
}

SimHostRegistry::Range SimHostRegistry::Classify(const void* begin, uint64_t bytes, bool for_writing) const {
  const uint64_t address = reinterpret_cast<uint64_t>(begin);
  std::lock_guard lock(mutex_);
  auto entry = registrations_.upper_bound(address);
  if (entry != registrations_.begin()) {
    const auto& [first, registration] = *std::prev(entry);
    if (address - first < registration.bytes) {
      const bool inside = bytes <= registration.bytes - (address - first);
      if (!inside || (for_writing && registration.read_only)) return Range::kMixed;
      return registration.file ? Range::kRegisteredFile : Range::kRegistered;
    }
  }
  return entry != registrations_.end() && entry->first - address < bytes ? Range::kMixed : Range::kPageable;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
//
// The table's functions for device memory, addresses and registered host memory.
#include <fcntl.h>

#include <algorithm>

#include "mechanisms/sim_calls.h"
#include "mechanisms/units.h"

namespace residency {

uint64_t SimHandles::Add(const std::shared_ptr<SimAllocation>& allocation) {
  std::lock_guard lock(mutex_);
  allocation->id = next_id_++;
  entries_[allocation->id] = {allocation, 1};
  return allocation->id;
}

uint64_t SimHandles::Retain(const std::shared_ptr<SimAllocation>& allocation) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[allocation->id];
  entry.allocation = allocation;
  ++entry.references;
  return allocation->id;
}

bool SimHandles::Release(uint64_t handle) {
  std::shared_ptr<SimAllocation> last;  // Its descriptor is closed after the lock is let go.
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return false;
  if (--found->second.references == 0) {
    last = std::move(found->second.allocation);
    entries_.erase(found);
  }
  return true;
}

std::shared_ptr<SimAllocation> SimHandles::Find(uint64_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(handle);
  return found == entries_.end() ? nullptr : found->second.allocation;
}

namespace {

constexpr auto kInit = SimNeeds::kInit;
constexpr auto kContext = SimNeeds::kContext;

bool HasAttribute(SimProcess& process, std::string_view name) {
  return process.faults->Attribute(name).value_or(1) != 0;
}

UniqueFd Duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

// Answers CUDA_SUCCESS for a kind of memory that the cards have: pinned, on a device, exportable or not.
CUresult CheckProperties(SimProcess& process, const CUmemAllocationProp* properties) {
  if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!HasAttribute(process, "VMM")) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int device = properties->location.id;
  if (device < 0 || static_cast<size_t>(device) >= process.cards->size()) return CUDA_ERROR_INVALID_DEVICE;
  if (properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE) return CUDA_SUCCESS;
  if (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return HasAttribute(process, "POSIX_FD") ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return SimCall("cuMemGetInfo", kContext, [&](SimProcess&, SimContext* context) {
    if (free_bytes == nullptr || total_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const absl::StatusOr<uint64_t> counted_bytes = context->card().FreeBytes();
    if (!counted_bytes.ok()) return CUDA_ERROR_OPERATING_SYSTEM;
    *free_bytes = *counted_bytes;
    *total_bytes = context->card().total_bytes();
    return CUDA_SUCCESS;
  });
}

CUresult MemGetAllocationGranularity(size_t* granule_bytes, const CUmemAllocationProp* properties,
                                     CUmemAllocationGranularity_flags) {
  return SimCall("cuMemGetAllocationGranularity", kInit, [&](SimProcess& process, SimContext*) {
    if (granule_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = CheckProperties(process, properties);
    if (result == CUDA_SUCCESS) *granule_bytes = kSimGranuleBytes;
    return result;
  });
}

CUresult MemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint,
                           unsigned long long flags) {
  return SimCall("cuMemAddressReserve", kInit, [&](SimProcess& process, SimContext*) {
    if (address == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return process.space.Reserve(bytes, alignment, hint, address);
  });
}

CUresult MemAddressFree(CUdeviceptr address, size_t bytes) {
  return SimCall("cuMemAddressFree", kInit,
                 [&](SimProcess& process, SimContext*) { return process.space.Free(address, bytes); });
}

CUresult MemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                   unsigned long long flags) {
  return SimCall("cuMemCreate", kInit, [&](SimProcess& process, SimContext*) {
    if (handle == nullptr || flags != 0 || bytes == 0 || bytes % kSimGranuleBytes != 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult result = CheckProperties(process, properties); result != CUDA_SUCCESS) return result;
    SimCard& card = process.cards->card(properties->location.id);
    absl::StatusOr<UniqueFd> file = card.Take(SimCard::Kind::kMemory, bytes);
    if (!file.ok()) {
      return absl::IsResourceExhausted(file.status()) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    }
    auto allocation = std::make_shared<SimAllocation>(card, bytes, *std::move(file));
    allocation->exportable = properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    *handle = process.handles.Add(allocation);
    return CUDA_SUCCESS;
  });
}

CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  return SimCall("cuMemRelease", kInit, [&](SimProcess& process, SimContext*) {
    return process.handles.Release(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult MemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                unsigned long long flags) {
  return SimCall("cuMemMap", kInit, [&](SimProcess& process, SimContext*) {
    std::shared_ptr<SimAllocation> allocation = process.handles.Find(handle);
    if (allocation == nullptr || flags != 0 || bytes == 0 || bytes % kSimGranuleBytes != 0 ||
        offset % kSimGranuleBytes != 0 || offset >= allocation->bytes || bytes > allocation->bytes - offset) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    // The real driver knows the notion of a part, and refuses it.
    if (offset != 0 || bytes != allocation->bytes) return CUDA_ERROR_NOT_SUPPORTED;
    return process.space.Map(address, bytes, std::move(allocation));
  });
}

CUresult MemUnmap(CUdeviceptr address, size_t bytes) {
  return SimCall("cuMemUnmap", kInit,
                 [&](SimProcess& process, SimContext*) { return process.space.Unmap(address, bytes); });
}

CUresult MemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* wanted, size_t count) {
  return SimCall("cuMemSetAccess", kInit, [&](SimProcess& process, SimContext*) {
    if (wanted == nullptr || count != 1 || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const int device = wanted->location.id;
    if (device < 0 || static_cast<size_t>(device) >= process.cards->size()) return CUDA_ERROR_INVALID_DEVICE;
    const int rights = wanted->flags;
    if (rights != CU_MEM_ACCESS_FLAGS_PROT_NONE && rights != SimAddressSpace::kRead &&
        rights != SimAddressSpace::kReadWrite) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return process.space.SetAccess(address, bytes, device, rights);
  });
}

CUresult MemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  return SimCall("cuMemGetAccess", kInit, [&](SimProcess& process, SimContext*) {
    if (flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const std::optional<int> rights = process.space.Access(address, location->id);
    if (!rights) return CUDA_ERROR_INVALID_VALUE;
    *flags = static_cast<unsigned long long>(*rights);
    return CUDA_SUCCESS;
  });
}

CUresult MemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                    CUmemAllocationHandleType type, unsigned long long flags) {
  return SimCall("cuMemExportToShareableHandle", kInit, [&](SimProcess& process, SimContext*) {
    const std::shared_ptr<SimAllocation> allocation = process.handles.Find(handle);
    if (shareable == nullptr || flags != 0 || allocation == nullptr || !allocation->exportable ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    UniqueFd fd = Duplicate(allocation->file.get());
    if (!fd.valid()) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int*>(shareable) = fd.release();
    return CUDA_SUCCESS;
  });
}

CUresult MemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                      CUmemAllocationHandleType type) {
  return SimCall("cuMemImportFromShareableHandle", kInit, [&](SimProcess& process, SimContext*) {
    if (handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    // The descriptor is passed by value in the pointer, as CUDA documents.
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    const std::optional<SimLabel> label = process.cards->LabelOf(fd);
    if (!label) return CUDA_ERROR_INVALID_VALUE;
    UniqueFd file = Duplicate(fd);
    if (!file.valid()) return CUDA_ERROR_OPERATING_SYSTEM;
    SimCard& card = process.cards->card(label->card_index);
    card.Join(file.get());
    auto allocation = std::make_shared<SimAllocation>(card, label->bytes, std::move(file));
    *handle = process.handles.Add(allocation);
    return CUDA_SUCCESS;
  });
}

CUresult MemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  return SimCall("cuMemRetainAllocationHandle", kInit, [&](SimProcess& process, SimContext*) {
    const std::shared_ptr<SimAllocation> allocation =
        process.space.AllocationAt(reinterpret_cast<CUdeviceptr>(address));
    if (handle == nullptr || allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *handle = process.handles.Retain(allocation);
    return CUDA_SUCCESS;
  });
}

CUresult MemAlloc(CUdeviceptr* address, size_t bytes) {
  return SimCall("cuMemAlloc", kContext, [&](SimProcess&, SimContext* context) {
    return address == nullptr ? CUDA_ERROR_INVALID_VALUE : context->AllocatePlain(bytes, address);
  });
}

CUresult MemFree(CUdeviceptr address) {
  return SimCall("cuMemFree", kContext, [&](SimProcess&, SimContext* context) {
    return address == 0 ? CUDA_SUCCESS : context->FreePlain(address);
  });
}

CUresult MemHostRegister(void* begin, size_t bytes, unsigned int flags) {
  return SimCall("cuMemHostRegister", kContext, [&](SimProcess& process, SimContext* context) {
    constexpr unsigned int kKnownFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                         CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
    if ((flags & ~kKnownFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
    const bool read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
    if (!HasAttribute(process, "HOST_REGISTER") || (read_only && !HasAttribute(process, "READONLY_PIN"))) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    return process.hosts.Register(begin, bytes, read_only, context->card().index());
  });
}

CUresult MemHostUnregister(void* begin) {
  return SimCall("cuMemHostUnregister", kContext,
                 [&](SimProcess& process, SimContext*) { return process.hosts.Unregister(begin); });
}

}  // namespace

void FillSimMemoryCalls(Driver& driver) {
  driver.cuMemGetInfo = MemGetInfo;
  driver.cuMemGetAllocationGranularity = MemGetAllocationGranularity;
  driver.cuMemAddressReserve = MemAddressReserve;
  driver.cuMemAddressFree = MemAddressFree;
  driver.cuMemCreate = MemCreate;
  driver.cuMemRelease = MemRelease;
  driver.cuMemMap = MemMap;
  driver.cuMemUnmap = MemUnmap;
  driver.cuMemSetAccess = MemSetAccess;
  driver.cuMemGetAccess = MemGetAccess;
  driver.cuMemExportToShareableHandle = MemExportToShareableHandle;
  driver.cuMemImportFromShareableHandle = MemImportFromShareableHandle;
  driver.cuMemRetainAllocationHandle = MemRetainAllocationHandle;
  driver.cuMemAlloc = MemAlloc;
  driver.cuMemFree = MemFree;
  driver.cuMemHostRegister = MemHostRegister;
  driver.cuMemHostUnregister = MemHostUnregister;
}

}  // namespace residency

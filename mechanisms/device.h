// SPDX-License-Identifier: Apache-2.0
//
// One GPU: the dozen verbs of the driver that the project uses, as absl::Status, with an owner for every
// handle. A Device is the primary context of its GPU in this process, so memory it maps can be used by
// any library in the process that uses the runtime API.
//
// Threads: any. Each call makes the context current on the calling thread first (a thread-local compare
// in the driver). Calls that change one address range must not race; whoever owns the range sees to that.
// Owners must be destroyed before their Device.
//
// Errors: every failing call becomes a Status that names the call and CUDA's name for the error.
// OUT_OF_MEMORY is RESOURCE_EXHAUSTED/GPU_MEMORY, NO_DEVICE and NOT_INITIALIZED are UNAVAILABLE/NO_DEVICE,
// NOT_SUPPORTED is FAILED_PRECONDITION/NOT_SUPPORTED, the sticky ones (ILLEGAL_ADDRESS, LAUNCH_FAILED,
// UNKNOWN and their like), after which the context is useless, are UNAVAILABLE/DEVICE_LOST, anything else is
// INTERNAL/DRIVER. A sticky error is remembered, whichever call met it first: see Lost.
#ifndef RESIDENCY_MECHANISMS_DEVICE_H_
#define RESIDENCY_MECHANISMS_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/driver.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// The one place that turns a CUresult into a Status. OK for CUDA_SUCCESS.
absl::Status DriverStatus(const Driver& driver, CUresult result, std::string_view call);

enum class Access { kReadOnly, kReadWrite };

class Device;

// Owns a handle that the driver gave out for a device: moved, never copied, given back when it goes.
// `bytes` is the size of what the handle stands for, 0 where it has none.
template <typename Handle, void (*Close)(const Device&, Handle, uint64_t bytes)>
class Owned {
 public:
  Owned() = default;
  Owned(const Device& device, Handle handle, uint64_t bytes = 0) : device_(&device), handle_(handle), bytes_(bytes) {}
  Owned(Owned&& other) noexcept { *this = std::move(other); }
  Owned& operator=(Owned&& other) noexcept {
    if (this == &other) return *this;
    reset();
    device_ = std::exchange(other.device_, nullptr);
    handle_ = std::exchange(other.handle_, Handle{});
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~Owned() { reset(); }

  bool valid() const { return device_ != nullptr; }
  Handle get() const { return handle_; }
  uint64_t bytes() const { return bytes_; }
  void reset() {
    if (const Device* device = std::exchange(device_, nullptr); device != nullptr) Close(*device, handle_, bytes_);
  }

 private:
  const Device* device_ = nullptr;
  Handle handle_{};
  uint64_t bytes_ = 0;
};

void CloseCellMemory(const Device& device, CUmemGenericAllocationHandle handle, uint64_t bytes);
void CloseAddressRange(const Device& device, CUdeviceptr address, uint64_t bytes);
void CloseHostRegistration(const Device& device, void* address, uint64_t bytes);
void CloseDeviceBuffer(const Device& device, CUdeviceptr address, uint64_t bytes);
void CloseStream(const Device& device, CUstream stream, uint64_t bytes);
void CloseEvent(const Device& device, CUevent event, uint64_t bytes);

// One physical allocation (a cell, once it is in use as one). Memory that is still mapped when it goes
// lives until it is unmapped.
using CellMemory = Owned<CUmemGenericAllocationHandle, CloseCellMemory>;
// A range of device addresses. Nothing may be mapped in it when it goes.
using AddressRange = Owned<CUdeviceptr, CloseAddressRange>;
// The page-locking of a host range; not the memory itself.
using HostRegistration = Owned<void*, CloseHostRegistration>;
// Plain device memory (cuMemAlloc), for small things that are not cells.
using DeviceBuffer = Owned<CUdeviceptr, CloseDeviceBuffer>;
using Stream = Owned<CUstream, CloseStream>;
using StreamEvent = Owned<CUevent, CloseEvent>;

struct DeviceInfo {
  int ordinal = 0;   // in this process's order; never a key
  std::string uuid;  // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", the key
  std::string name;
  std::string pci_id;          // as /sys/bus/pci/devices spells it; empty where the driver does not say
  uint64_t total_bytes = 0;    // cuDeviceTotalMem
  uint64_t granule_bytes = 0;  // of cuMemCreate
  int driver_version = 0;      // as cuDriverGetVersion: 1000 * major + 10 * minor
  bool read_only_pin = false;  // it page-locks memory that may only be read
};

struct MemoryInfo {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

class Device {
 public:
  // How many GPUs the driver shows this process; calls cuInit.
  static absl::StatusOr<int> Count(const Driver& driver);
  // Opens the GPU with this ordinal and keeps its primary context. `driver` must outlive it.
  static absl::StatusOr<std::unique_ptr<Device>> Open(const Driver& driver, int ordinal);
  // Opens the GPU with this UUID. NOT_FOUND/NO_SUCH_DEVICE names the UUID and those there are.
  static absl::StatusOr<std::unique_ptr<Device>> OpenByUuid(const Driver& driver, std::string_view uuid);

  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  const DeviceInfo& info() const { return info_; }

  // DriverStatus for a call on this device's context; an error of the sticky kind is remembered. For every result, also
  // of a call that nobody waits for.
  absl::Status Check(CUresult result, const char* call) const;
  // OK, or UNAVAILABLE/DEVICE_LOST that names the call which met the first sticky error: from then on nothing that this
  // device says or does is worth anything. Any thread; makes no driver call.
  absl::Status Lost() const;

  // Makes the context current on the calling thread.
  absl::Status MakeCurrent() const;
  absl::StatusOr<MemoryInfo> Memory() const;

  // Tries, on one granule, every step that an activation and an attach need: reserve, create, map, set
  // access, copy, export, unmap, release. FAILED_PRECONDITION/NO_VMM, or NO_EXPORT where all but the
  // export works; the message names the step and CUDA's code. GPU_MEMORY where the card is full, DEVICE_LOST.
  absl::Status Probe() const;

  // Physical memory: bytes a multiple of the granule, exportable as a descriptor, zeroed.
  absl::StatusOr<CellMemory> Create(uint64_t bytes) const;
  // A descriptor that keeps the memory alive by itself and can be imported any number of times. Costs up
  // to 0.65 ms, so a cell is exported once. Memory that was imported cannot be exported.
  absl::StatusOr<UniqueFd> Export(const CellMemory& memory) const;
  // The memory behind an exported descriptor (borrowed); `bytes` is what its exporter said.
  absl::StatusOr<CellMemory> Import(int fd, uint64_t bytes) const;

  absl::StatusOr<AddressRange> Reserve(uint64_t bytes) const;
  // Maps all of `memory` at `address`, a granule boundary of a reserved range; not accessible until
  // SetAccess.
  absl::Status Map(CUdeviceptr address, const CellMemory& memory) const;
  // For a range that whole mappings fill.
  absl::Status SetAccess(CUdeviceptr address, uint64_t bytes, Access access) const;
  absl::Status Unmap(CUdeviceptr address, uint64_t bytes) const;
  // Asks the driver which handle lies at `address`, 0 where none does; 0.14 us. Any thread, also while another one
  // maps and unmaps.
  absl::StatusOr<CUmemGenericAllocationHandle> HandleAt(CUdeviceptr address) const;
  // Whether memory is mapped at `address`; false also where the driver would not say.
  bool IsBacked(CUdeviceptr address) const { return HandleAt(address).value_or(0) != 0; }

  // Page-locks. RESOURCE_EXHAUSTED/PIN_LIMIT where the system refuses to lock more, or at all. kReadOnly is for memory
  // that this process may not write to; pages of a file on a disk are locked no other way.
  absl::StatusOr<HostRegistration> RegisterHost(const void* address, uint64_t bytes,
                                                Access access = Access::kReadWrite) const;
  absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes) const;
  absl::StatusOr<Stream> CreateStream() const;      // non-blocking towards the default stream
  absl::StatusOr<StreamEvent> CreateEvent() const;  // with timing

  absl::Status CopyToDevice(CUdeviceptr destination, const void* source, uint64_t bytes, const Stream& on) const;
  absl::Status CopyToHost(void* destination, CUdeviceptr source, uint64_t bytes, const Stream& on) const;
  absl::Status Zero(CUdeviceptr destination, uint64_t bytes, const Stream& on) const;
  absl::Status Record(const StreamEvent& event, const Stream& on) const;
  absl::Status Wait(const Stream& stream, const StreamEvent& for_event) const;  // on the device, not the host
  absl::Status Synchronize(const Stream& stream) const;
  absl::Status Synchronize(const StreamEvent& event) const;
  absl::StatusOr<absl::Duration> Elapsed(const StreamEvent& from, const StreamEvent& to) const;

  // Bytes that RegisterHost has page-locked and nobody has given back. Any thread.
  uint64_t registered_host_bytes() const { return registered_host_bytes_.load(std::memory_order_relaxed); }
  // Bytes of all CopyToHost so far: weights are never among them.
  uint64_t copied_to_host_bytes() const { return copied_to_host_bytes_.load(std::memory_order_relaxed); }

 private:
  Device(const Driver& driver, CUdevice device, CUcontext context, DeviceInfo info)
      : driver_(driver), device_(device), context_(context), info_(std::move(info)) {}

  const Driver& driver_;
  CUdevice device_;
  CUcontext context_;
  DeviceInfo info_;
  friend void CloseHostRegistration(const Device& device, void* address, uint64_t bytes);
  mutable std::atomic<uint64_t> registered_host_bytes_{0};
  mutable std::atomic<uint64_t> copied_to_host_bytes_{0};
  // The first sticky error. The name is claimed first, so that both are of one call.
  mutable std::atomic<const char*> lost_call_{nullptr};
  mutable std::atomic<CUresult> lost_result_{CUDA_SUCCESS};
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DEVICE_H_

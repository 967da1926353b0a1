// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/device.h"

#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// The errors after which CUDA answers every later call on the context with the same error.
bool IsSticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

CUmemAllocationProp CellProperties(CUdevice device,
                                   CUmemAllocationHandleType handle_type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = handle_type;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// NVML's and nvidia-smi's spelling.
std::string FormatUuid(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

// GPUs are function 0 of their PCI device.
std::string PciId(const Driver& driver, CUdevice device) {
  std::array<int, 3> place{};
  const CUdevice_attribute attributes[] = {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
                                           CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID};
  for (size_t i = 0; i < place.size(); ++i) {
    if (driver.cuDeviceGetAttribute(&place[i], attributes[i], device) != CUDA_SUCCESS) return "";
  }
  return absl::StrFormat("%04x:%02x:%02x.0", place[0], place[1], place[2]);
}

}  // namespace

absl::Status DriverStatus(const Driver& driver, CUresult result, std::string_view call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  const std::string message = absl::StrCat(std::string(call), ": ", name, " (", static_cast<int>(result), ")");
  if (IsSticky(result)) return Refuse(absl::StatusCode::kUnavailable, "DEVICE_LOST", message);
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return Refuse(absl::StatusCode::kResourceExhausted, "GPU_MEMORY", message);
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      return Refuse(absl::StatusCode::kUnavailable, "NO_DEVICE", message);
    case CUDA_ERROR_NOT_SUPPORTED:
      return Refuse(absl::StatusCode::kFailedPrecondition, "NOT_SUPPORTED", message);
    default:
      return Refuse(absl::StatusCode::kInternal, "DRIVER", message);
  }
}

// Nobody can do anything about a failure of these, but that the device is lost is remembered.
void CloseCellMemory(const Device& device, CUmemGenericAllocationHandle handle, uint64_t) {
  (void)device.Check(device.driver().cuMemRelease(handle), "cuMemRelease");
}

void CloseAddressRange(const Device& device, CUdeviceptr address, uint64_t bytes) {
  (void)device.Check(device.driver().cuMemAddressFree(address, bytes), "cuMemAddressFree");
}

void CloseHostRegistration(const Device& device, void* address, uint64_t bytes) {
  device.registered_host_bytes_ -= bytes;
  if (!device.MakeCurrent().ok()) return;
  (void)device.Check(device.driver().cuMemHostUnregister(address), "cuMemHostUnregister");
}

void CloseDeviceBuffer(const Device& device, CUdeviceptr address, uint64_t) {
  if (device.MakeCurrent().ok()) (void)device.Check(device.driver().cuMemFree(address), "cuMemFree");
}

void CloseStream(const Device& device, CUstream stream, uint64_t) {
  if (device.MakeCurrent().ok()) (void)device.Check(device.driver().cuStreamDestroy(stream), "cuStreamDestroy");
}

void CloseEvent(const Device& device, CUevent event, uint64_t) {
  if (device.MakeCurrent().ok()) (void)device.Check(device.driver().cuEventDestroy(event), "cuEventDestroy");
}

absl::StatusOr<int> Device::Count(const Driver& driver) {
  if (auto status = DriverStatus(driver, driver.cuInit(0), "cuInit"); !status.ok()) return status;
  int count = 0;
  if (auto status = DriverStatus(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount"); !status.ok()) {
    return status;
  }
  return count;
}

namespace {

absl::StatusOr<DeviceInfo> ReadInfo(const Driver& driver, CUdevice device, int ordinal) {
  DeviceInfo info;
  info.ordinal = ordinal;
  std::array<char, 256> name{};
  CUuuid uuid{};
  size_t total_bytes = 0;
  const std::pair<CUresult, const char*> calls[] = {
      {driver.cuDeviceGetName(name.data(), name.size() - 1, device), "cuDeviceGetName"},
      {driver.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid"},
      {driver.cuDeviceTotalMem(&total_bytes, device), "cuDeviceTotalMem"},
      {driver.cuDriverGetVersion(&info.driver_version), "cuDriverGetVersion"},
  };
  for (const auto& [result, call] : calls) {
    if (auto status = DriverStatus(driver, result, call); !status.ok()) return status;
  }
  info.name = name.data();
  info.pci_id = PciId(driver, device);
  info.uuid = FormatUuid(uuid);
  info.total_bytes = total_bytes;
  // A device without virtual memory management still counts and shows its memory; Probe says what fails.
  const CUmemAllocationProp properties = CellProperties(device);
  size_t granule_bytes = 0;
  const CUresult result =
      driver.cuMemGetAllocationGranularity(&granule_bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  info.granule_bytes = result == CUDA_SUCCESS ? granule_bytes : 2 << 20;
  int read_only_pin = 0;
  const CUresult answered =
      driver.cuDeviceGetAttribute(&read_only_pin, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, device);
  info.read_only_pin = answered == CUDA_SUCCESS && read_only_pin != 0;
  return info;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> Device::Open(const Driver& driver, int ordinal) {
  if (auto count = Count(driver); !count.ok()) return count.status();
  CUdevice device = 0;
  if (auto status = DriverStatus(driver, driver.cuDeviceGet(&device, ordinal), "cuDeviceGet"); !status.ok()) {
    return status;
  }
  auto info = ReadInfo(driver, device, ordinal);
  if (!info.ok()) return info.status();
  CUcontext context = nullptr;
  const CUresult result = driver.cuDevicePrimaryCtxRetain(&context, device);
  if (auto status = DriverStatus(driver, result, "cuDevicePrimaryCtxRetain"); !status.ok()) return status;
  return std::unique_ptr<Device>(new Device(driver, device, context, *std::move(info)));
}

absl::StatusOr<std::unique_ptr<Device>> Device::OpenByUuid(const Driver& driver, std::string_view uuid) {
  auto count = Count(driver);
  if (!count.ok()) return count.status();
  std::vector<std::string> seen;
  for (int ordinal = 0; ordinal < *count; ++ordinal) {
    CUdevice device = 0;
    if (auto status = DriverStatus(driver, driver.cuDeviceGet(&device, ordinal), "cuDeviceGet"); !status.ok()) {
      return status;
    }
    auto info = ReadInfo(driver, device, ordinal);
    if (!info.ok()) return info.status();
    if (info->uuid == uuid) return Open(driver, ordinal);
    seen.push_back(info->uuid);
  }
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_DEVICE",
                absl::StrCat("no GPU ", std::string(uuid), " in this process; there are: ", absl::StrJoin(seen, ", ")));
}

Device::~Device() { (void)driver_.cuDevicePrimaryCtxRelease(device_); }

absl::Status Device::Check(CUresult result, const char* call) const {
  if (IsSticky(result)) {
    const char* nobody = nullptr;
    if (lost_call_.compare_exchange_strong(nobody, call)) lost_result_ = result;
  }
  return DriverStatus(driver_, result, call);
}

absl::Status Device::Lost() const {
  const CUresult result = lost_result_;
  return result == CUDA_SUCCESS ? absl::OkStatus() : DriverStatus(driver_, result, lost_call_.load());
}

absl::Status Device::MakeCurrent() const {
  CUcontext current = nullptr;
  if (driver_.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context_) return absl::OkStatus();
  return Check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent");
}

absl::StatusOr<MemoryInfo> Device::Memory() const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (auto status = Check(driver_.cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo"); !status.ok()) {
    return status;
  }
  return MemoryInfo{free_bytes, total_bytes};
}

absl::Status Device::Probe() const {
  const uint64_t bytes = info_.granule_bytes;
  auto no_vmm = [](const absl::Status& status) {
    // Neither says anything about what the GPU can do.
    if (ReasonOf(status) == "DEVICE_LOST" || ReasonOf(status) == "GPU_MEMORY") return status;
    return Refuse(absl::StatusCode::kFailedPrecondition, "NO_VMM",
                  absl::StrCat("this GPU does not do virtual memory management: ", status.message()));
  };
  auto no_export = [](const absl::Status& status) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "NO_EXPORT",
                  absl::StrCat("this GPU's memory cannot be shared with other processes: ", status.message()));
  };
  auto range = Reserve(bytes);
  if (!range.ok()) return no_vmm(range.status());
  auto memory = Create(bytes);
  if (!memory.ok()) {
    // A GPU without export may refuse such memory when it is asked for.
    const CUmemAllocationProp own = CellProperties(device_, CU_MEM_HANDLE_TYPE_NONE);
    CUmemGenericAllocationHandle handle = 0;
    if (ReasonOf(memory.status()) != "NOT_SUPPORTED" ||
        !Check(driver_.cuMemCreate(&handle, bytes, &own, 0), "cuMemCreate").ok()) {
      return no_vmm(memory.status());
    }
    (void)Check(driver_.cuMemRelease(handle), "cuMemRelease");
    return no_export(memory.status());
  }
  if (auto status = Map(range->get(), *memory); !status.ok()) return no_vmm(status);
  absl::Status status = SetAccess(range->get(), bytes, Access::kReadWrite);
  if (status.ok()) {
    auto stream = CreateStream();
    const uint64_t word = 0x5265736964656e63;
    uint64_t back = 0;
    status = stream.status();
    if (status.ok()) status = CopyToDevice(range->get(), &word, sizeof(word), *stream);
    if (status.ok()) status = CopyToHost(&back, range->get(), sizeof(back), *stream);
    if (status.ok()) status = Synchronize(*stream);
    if (status.ok() && back != word) status = absl::InternalError("a copy read back other bytes than were written");
  }
  const absl::Status unmapped = Unmap(range->get(), bytes);
  if (!status.ok()) return no_vmm(status);
  if (!unmapped.ok()) return no_vmm(unmapped);
  if (auto fd = Export(*memory); !fd.ok()) {
    return ReasonOf(fd.status()) == "DEVICE_LOST" ? fd.status() : no_export(fd.status());
  }
  return absl::OkStatus();
}

absl::StatusOr<CellMemory> Device::Create(uint64_t bytes) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  const CUmemAllocationProp properties = CellProperties(device_);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver_.cuMemCreate(&handle, bytes, &properties, 0);
  if (auto status = Check(result, "cuMemCreate"); !status.ok()) return status;
  return CellMemory(*this, handle, bytes);
}

absl::StatusOr<UniqueFd> Device::Export(const CellMemory& memory) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  int fd = -1;
  const CUresult result =
      driver_.cuMemExportToShareableHandle(&fd, memory.get(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (auto status = Check(result, "cuMemExportToShareableHandle"); !status.ok()) return status;
  return UniqueFd(fd);
}

absl::StatusOr<CellMemory> Device::Import(int fd, uint64_t bytes) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver_.cuMemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (auto status = Check(result, "cuMemImportFromShareableHandle"); !status.ok()) return status;
  return CellMemory(*this, handle, bytes);
}

absl::StatusOr<AddressRange> Device::Reserve(uint64_t bytes) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUdeviceptr address = 0;
  const CUresult result = driver_.cuMemAddressReserve(&address, bytes, 0, 0, 0);
  if (auto status = Check(result, "cuMemAddressReserve"); !status.ok()) return status;
  return AddressRange(*this, address, bytes);
}

absl::Status Device::Map(CUdeviceptr address, const CellMemory& memory) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuMemMap(address, memory.bytes(), 0, memory.get(), 0), "cuMemMap");
}

absl::Status Device::SetAccess(CUdeviceptr address, uint64_t bytes, Access access) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUmemAccessDesc description{};
  description.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  description.location.id = device_;
  description.flags = access == Access::kReadOnly ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return Check(driver_.cuMemSetAccess(address, bytes, &description, 1), "cuMemSetAccess");
}

absl::Status Device::Unmap(CUdeviceptr address, uint64_t bytes) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuMemUnmap(address, bytes), "cuMemUnmap");
}

absl::StatusOr<CUmemGenericAllocationHandle> Device::HandleAt(CUdeviceptr address) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver_.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address));
  // How the driver says that nothing is mapped there; any other error is no answer.
  if (result == CUDA_ERROR_INVALID_VALUE) return CUmemGenericAllocationHandle{0};
  if (auto status = Check(result, "cuMemRetainAllocationHandle"); !status.ok()) return status;
  // Only the answer was wanted, not the reference that comes with it.
  (void)Check(driver_.cuMemRelease(handle), "cuMemRelease");
  return handle;
}

absl::StatusOr<HostRegistration> Device::RegisterHost(const void* address, uint64_t bytes, Access access) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  const unsigned int read_only = access == Access::kReadOnly ? CU_MEMHOSTREGISTER_READ_ONLY : 0;
  void* const begin = const_cast<void*>(address);
  const CUresult result = driver_.cuMemHostRegister(begin, bytes, CU_MEMHOSTREGISTER_PORTABLE | read_only);
  // It is host memory that ran out here, or a limit of the system on locking it, which containers have and which the
  // driver tells in several ways; nobody should read "GPU" in this.
  if (result == CUDA_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_NOT_PERMITTED ||
      result == CUDA_ERROR_OPERATING_SYSTEM) {
    return Refuse(absl::StatusCode::kResourceExhausted, Refusal{.reason = "PIN_LIMIT", .needed_bytes = bytes},
                  absl::StrCat("cuMemHostRegister refused to page-lock ", bytes, " bytes of host memory"));
  }
  if (auto status = Check(result, "cuMemHostRegister"); !status.ok()) return status;
  registered_host_bytes_ += bytes;
  return HostRegistration(*this, begin, bytes);
}

absl::StatusOr<DeviceBuffer> Device::Allocate(uint64_t bytes) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUdeviceptr address = 0;
  if (auto status = Check(driver_.cuMemAlloc(&address, bytes), "cuMemAlloc"); !status.ok()) return status;
  return DeviceBuffer(*this, address, bytes);
}

absl::StatusOr<Stream> Device::CreateStream() const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUstream stream = nullptr;
  const CUresult result = driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (auto status = Check(result, "cuStreamCreate"); !status.ok()) return status;
  return Stream(*this, stream);
}

absl::StatusOr<StreamEvent> Device::CreateEvent() const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  CUevent event = nullptr;
  const CUresult result = driver_.cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC);
  if (auto status = Check(result, "cuEventCreate"); !status.ok()) return status;
  return StreamEvent(*this, event);
}

absl::Status Device::CopyToDevice(CUdeviceptr destination, const void* source, uint64_t bytes, const Stream& on) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuMemcpyHtoDAsync(destination, source, bytes, on.get()), "cuMemcpyHtoDAsync");
}

absl::Status Device::CopyToHost(void* destination, CUdeviceptr source, uint64_t bytes, const Stream& on) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  copied_to_host_bytes_ += bytes;
  return Check(driver_.cuMemcpyDtoHAsync(destination, source, bytes, on.get()), "cuMemcpyDtoHAsync");
}

absl::Status Device::Zero(CUdeviceptr destination, uint64_t bytes, const Stream& on) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuMemsetD8Async(destination, 0, bytes, on.get()), "cuMemsetD8Async");
}

absl::Status Device::Record(const StreamEvent& event, const Stream& on) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuEventRecord(event.get(), on.get()), "cuEventRecord");
}

absl::Status Device::Wait(const Stream& stream, const StreamEvent& for_event) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuStreamWaitEvent(stream.get(), for_event.get(), 0), "cuStreamWaitEvent");
}

absl::Status Device::Synchronize(const Stream& stream) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
}

absl::Status Device::Synchronize(const StreamEvent& event) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  return Check(driver_.cuEventSynchronize(event.get()), "cuEventSynchronize");
}

absl::StatusOr<absl::Duration> Device::Elapsed(const StreamEvent& from, const StreamEvent& to) const {
  if (auto status = MakeCurrent(); !status.ok()) return status;
  float milliseconds = 0;
  const CUresult result = driver_.cuEventElapsedTime(&milliseconds, from.get(), to.get());
  if (auto status = Check(result, "cuEventElapsedTime"); !status.ok()) return status;
  return absl::Milliseconds(static_cast<double>(milliseconds));
}

}  // namespace residency

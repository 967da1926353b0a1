// SPDX-License-Identifier: Apache-2.0
//
// What only the simulated driver has: options, faults and pacing; how it stands wrong programs and many
// threads is in sim_driver_misuse.cc. What it shares with the real one is in conformance_test.
#include "mechanisms/sim_driver.h"

#include <catch2/catch.hpp>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"
#include "tests/sim_child.h"

namespace residency {
namespace {

std::string UuidOf(const Driver& cu, CUdevice device) {
  CUuuid uuid;
  return cu.cuDeviceGetUuid(&uuid, device) == CUDA_SUCCESS ? std::string(uuid.bytes, sizeof(uuid.bytes)) : "none";
}

}  // namespace

TEST_CASE("a driver is opened once, and again with equal options only") {
  SimFolder folder;
  CHECK(InChild([&] {
          std::string notes;
          SimOptions options = Options(folder);
          EXPECT(OpenSimDriver(options).ok());
          EXPECT(OpenSimDriver(options).ok());
          options.devices = 2;
          EXPECT(absl::IsFailedPrecondition(OpenSimDriver(options).status()));
          return notes;
        }) == "");
}

TEST_CASE("a wrong fault text and a wrong directory are named, and do not spoil a later opening") {
  SimFolder folder;
  CHECK(InChild([&] {
          std::string notes;
          EXPECT(ReasonOf(OpenSimDriver(Options(folder, "cuMemCreate=NO_SUCH")).status()) == "BAD_FAULTS");
          SimOptions nowhere = Options(folder);
          nowhere.directory = folder.cards() + "/not/there";
          const absl::Status status = OpenSimDriver(nowhere).status();
          EXPECT(absl::IsNotFound(status));
          EXPECT(std::string(status.message()).find(nowhere.directory) != std::string::npos);
          EXPECT(OpenSimDriver(Options(folder)).ok());
          return notes;
        }) == "");
}

TEST_CASE("calls before cuInit and without a context say so") {
  SimFolder folder;
  CHECK(InChild([&] {
          std::string notes;
          const Driver cu = *OpenSimDriver(Options(folder));
          int count = 0;
          const char* name = nullptr;
          CUstream stream;
          CUcontext context;
          EXPECT(cu.cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
          EXPECT(cu.cuGetErrorName(CUDA_ERROR_NO_DEVICE, &name) == CUDA_SUCCESS);
          EXPECT(std::string(name) == "CUDA_ERROR_NO_DEVICE");
          EXPECT(cu.cuInit(0) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamCreate(&stream, 0) == CUDA_ERROR_INVALID_CONTEXT);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamCreate(&stream, 0) == CUDA_ERROR_INVALID_CONTEXT);
          EXPECT(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamCreate(&stream, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamCreate(&stream, 0) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
          EXPECT(cu.cuDevicePrimaryCtxRelease(0) == CUDA_ERROR_INVALID_CONTEXT);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 1) == CUDA_ERROR_INVALID_DEVICE);
          return notes;
        }) == "");
}

TEST_CASE("every process sees the same cards, and the first one describes them") {
  SimFolder folder;
  SimOptions options = Options(folder);
  options.devices = 2;
  const auto uuids = [](const Driver& cu) { return UuidOf(cu, 0) + UuidOf(cu, 1); };
  const std::string first = WithSim(options, uuids);
  CHECK(first.size() == 32);
  CHECK(first.substr(0, 16) != first.substr(16));
  options.devices = 7;
  options.device_bytes = 3 * kGiB;
  CHECK(WithSim(options, uuids) == first);
  CHECK(WithSim(options, [](const Driver& cu) {
          std::string notes;
          int count = 0;
          size_t bytes = 0;
          char name[64];
          EXPECT(cu.cuDeviceGetCount(&count) == CUDA_SUCCESS && count == 2);
          EXPECT(cu.cuDeviceTotalMem(&bytes, 1) == CUDA_SUCCESS && bytes == kGiB);
          EXPECT(cu.cuDeviceGetName(name, sizeof(name), 0) == CUDA_SUCCESS);
          EXPECT(std::string(name) == "Simulated GPU");
          return notes;
        }) == "");
}

TEST_CASE("two cards have memory of their own and do not reach each other's") {
  SimFolder folder;
  SimOptions options = Options(folder);
  options.devices = 2;
  CHECK(WithSim(options, [](const Driver& cu) {
          std::string notes;
          const CUmemAllocationProp second = MemoryOf(1);
          CUmemGenericAllocationHandle handle;
          CUdeviceptr address;
          CUcontext context;
          const uint64_t word = 1;
          EXPECT(cu.cuMemCreate(&handle, kCell, &second, 0) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB);
          EXPECT(cu.cuMemAddressReserve(&address, kCell, 0, 0, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemMap(address, kCell, 0, handle, 0) == CUDA_SUCCESS);
          EXPECT(SetAccess(cu, address, 0) == CUDA_ERROR_INVALID_DEVICE);
          EXPECT(SetAccess(cu, address, 1) == CUDA_SUCCESS);
          EXPECT(cu.cuMemcpyHtoDAsync(address, &word, 8, nullptr) == CUDA_ERROR_INVALID_VALUE);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 1) == CUDA_SUCCESS);
          EXPECT(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
          EXPECT(cu.cuMemcpyHtoDAsync(address, &word, 8, nullptr) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB - kCell);
          return notes;
        }) == "");
}

TEST_CASE("a context is charged while it lasts, and refused where it does not fit") {
  SimFolder folder;
  SimOptions options = Options(folder);
  options.context_bytes = 100 * kMiB;
  CHECK(WithSim(options, [](const Driver& cu) {
          std::string notes;
          CUcontext context;
          EXPECT(FreeBytes(cu) == kGiB - 100 * kMiB);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB - 100 * kMiB);
          return notes;
        }) == "");
  options.context_bytes = 0;
  CHECK(WithSim(options, [](const Driver& cu) {
          std::string notes;
          EXPECT(FreeBytes(cu) == kGiB);
          return notes;
        }) == "");
  options.context_bytes = 2 * kGiB;
  CHECK(InChild([&] {
          std::string notes;
          const Driver cu = *OpenSimDriver(options);
          CUcontext context;
          EXPECT(cu.cuInit(0) == CUDA_SUCCESS);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_ERROR_OUT_OF_MEMORY);
          return notes;
        }) == "");
}

TEST_CASE("the k-th call fails and the others do not") {
  SimFolder folder;
  CHECK(WithSim(Options(folder, "cuMemCreate@2=OUT_OF_MEMORY"), [](const Driver& cu) {
          std::string notes;
          const CUmemAllocationProp properties = MemoryOf(0);
          CUmemGenericAllocationHandle handle;
          EXPECT(cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY);
          EXPECT(cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB - 2 * kCell);
          return notes;
        }) == "");
}

TEST_CASE("a delayed call takes its time and then works") {
  SimFolder folder;
  CHECK(WithSim(Options(folder, "cuMemUnmap=+150ms"), [](const Driver& cu) {
          std::string notes;
          const CUdeviceptr address = MappedCell(cu);
          const Clock::time_point start = Clock::now();
          EXPECT(cu.cuMemUnmap(address, kCell) == CUDA_SUCCESS);
          EXPECT(SecondsSince(start) >= 0.15);
          return notes;
        }) == "");
}

TEST_CASE("a card that is missing at first appears later") {
  SimFolder folder;
  CHECK(InChild([&] {
          std::string notes;
          const Clock::time_point start = Clock::now();
          const Driver cu = *OpenSimDriver(Options(folder, "cuInit<200ms=NO_DEVICE"));
          EXPECT(cu.cuInit(0) == CUDA_ERROR_NO_DEVICE);
          while (cu.cuInit(0) == CUDA_ERROR_NO_DEVICE && SecondsSince(start) < 10) std::this_thread::yield();
          EXPECT(cu.cuInit(0) == CUDA_SUCCESS);
          EXPECT(SecondsSince(start) >= 0.2);
          return notes;
        }) == "");
}

TEST_CASE("a card says what its attributes say, and does as it says") {
  SimFolder folder;
  const auto attribute = [](const Driver& cu, CUdevice_attribute which) {
    int value = -1;
    return cu.cuDeviceGetAttribute(&value, which, 0) == CUDA_SUCCESS ? value : -1;
  };
  CHECK(WithSim(Options(folder), [&](const Driver& cu) {
          std::string notes;
          EXPECT(attribute(cu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 1);
          EXPECT(attribute(cu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 1);
          EXPECT(attribute(cu, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) == 1);
          EXPECT(attribute(cu, CU_DEVICE_ATTRIBUTE_MAX) == -1);
          return notes;
        }) == "");
  CHECK(WithSim(Options(folder, "attr:VMM=0"), [&](const Driver& cu) {
          std::string notes;
          const CUmemAllocationProp properties = MemoryOf(0);
          CUmemGenericAllocationHandle handle;
          EXPECT(attribute(cu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0);
          EXPECT(cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_ERROR_NOT_SUPPORTED);
          return notes;
        }) == "");
  CHECK(WithSim(Options(folder, "attr:POSIX_FD=0,attr:READONLY_PIN=0"), [&](const Driver& cu) {
          std::string notes;
          const CUmemAllocationProp properties = MemoryOf(0);
          CUmemGenericAllocationHandle handle;
          char* host = HostBytes(kMiB);
          EXPECT(attribute(cu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 0);
          EXPECT(cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_ERROR_NOT_SUPPORTED);
          EXPECT(cu.cuMemHostRegister(host, kMiB, CU_MEMHOSTREGISTER_READ_ONLY) == CUDA_ERROR_NOT_SUPPORTED);
          EXPECT(cu.cuMemHostRegister(host, kMiB, 0) == CUDA_SUCCESS);
          return notes;
        }) == "");
}

TEST_CASE("no more is registered than the pin limit allows") {
  SimFolder folder;
  CHECK(WithSim(Options(folder, "pin_limit=3MiB"), [](const Driver& cu) {
          std::string notes;
          char* host = HostBytes(4 * kMiB);
          EXPECT(cu.cuMemHostRegister(host, 4 * kMiB, 0) == CUDA_ERROR_OUT_OF_MEMORY);
          EXPECT(cu.cuMemHostRegister(host, 2 * kMiB, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemHostRegister(host + 2 * kMiB, 2 * kMiB, 0) == CUDA_ERROR_OUT_OF_MEMORY);
          EXPECT(cu.cuMemHostRegister(host + 2 * kMiB, kMiB, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemHostUnregister(host) == CUDA_SUCCESS);
          EXPECT(cu.cuMemHostRegister(host, 2 * kMiB, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemHostRegister(reinterpret_cast<void*>(4096), 4096, 0) == CUDA_ERROR_INVALID_VALUE);
          return notes;
        }) == "");
}

TEST_CASE("copies are no faster than the link, together, and do not hold up the caller") {
  SimFolder folder;
  SimOptions options = Options(folder);
  options.link_bytes_per_second = 32 * kMiB;
  CHECK(WithSim(options, [](const Driver& cu) {
          std::string notes;
          const CUdeviceptr address = MappedCell(cu);
          char* host = HostBytes(kCell);
          CUstream streams[2];
          CUevent begin, end;
          float milliseconds = 0;
          EXPECT(cu.cuMemHostRegister(host, kCell, 0) == CUDA_SUCCESS);
          for (CUstream& stream : streams) EXPECT(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
          EXPECT(cu.cuEventCreate(&begin, 0) == CUDA_SUCCESS && cu.cuEventCreate(&end, 0) == CUDA_SUCCESS);
          const Clock::time_point start = Clock::now();
          EXPECT(cu.cuEventRecord(begin, streams[0]) == CUDA_SUCCESS);
          for (CUstream stream : streams) EXPECT(cu.cuMemcpyHtoDAsync(address, host, kCell, stream) == CUDA_SUCCESS);
          EXPECT(cu.cuEventRecord(end, streams[0]) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamQuery(streams[0]) == CUDA_ERROR_NOT_READY);
          EXPECT(cu.cuEventQuery(end) == CUDA_ERROR_NOT_READY);
          EXPECT(cu.cuEventElapsedTime(&milliseconds, begin, end) == CUDA_ERROR_NOT_READY);
          for (CUstream stream : streams) EXPECT(cu.cuStreamSynchronize(stream) == CUDA_SUCCESS);
          // Twice 4 MiB at 32 MiB/s.
          EXPECT(SecondsSince(start) >= 0.249);
          EXPECT(cu.cuEventElapsedTime(&milliseconds, begin, end) == CUDA_SUCCESS);
          EXPECT(milliseconds >= 124);
          return notes;
        }) == "");
}

TEST_CASE("an injected error of the sticky kind ends the context until it is made anew") {
  SimFolder folder;
  CHECK(WithSim(Options(folder, "cuMemcpyHtoDAsync@2=ILLEGAL_ADDRESS"), [](const Driver& cu) {
          std::string notes;
          const CUdeviceptr address = MappedCell(cu);
          const uint64_t word = 1;
          size_t free_bytes, total_bytes;
          CUevent event;
          CUcontext context;
          EXPECT(cu.cuMemcpyHtoDAsync(address, &word, 8, nullptr) == CUDA_SUCCESS);
          EXPECT(cu.cuMemcpyHtoDAsync(address, &word, 8, nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
          EXPECT(cu.cuMemcpyHtoDAsync(address, &word, 8, nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
          EXPECT(cu.cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_ERROR_ILLEGAL_ADDRESS);
          EXPECT(cu.cuEventCreate(&event, 0) == CUDA_ERROR_ILLEGAL_ADDRESS);
          EXPECT(cu.cuInit(0) == CUDA_SUCCESS);
          EXPECT(cu.cuMemUnmap(address, kCell) == CUDA_SUCCESS);
          EXPECT(cu.cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB);
          return notes;
        }) == "");
}

TEST_CASE("the end of a context takes its plain memory, registrations and streams along") {
  SimFolder folder;
  CHECK(WithSim(Options(folder, "pin_limit=1MiB"), [](const Driver& cu) {
          std::string notes;
          CUdeviceptr plain;
          CUstream stream;
          CUcontext context;
          char* host = HostBytes(kMiB);
          EXPECT(cu.cuMemAlloc(&plain, 5) == CUDA_SUCCESS);
          EXPECT(cu.cuMemHostRegister(host, kMiB, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamCreate(&stream, 0) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB - 2 * kMiB);
          EXPECT(cu.cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
          EXPECT(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
          EXPECT(FreeBytes(cu) == kGiB);
          EXPECT(cu.cuMemHostRegister(host, kMiB, 0) == CUDA_SUCCESS);
          EXPECT(cu.cuStreamSynchronize(stream) == CUDA_ERROR_INVALID_HANDLE);
          return notes;
        }) == "");
}

TEST_CASE("fresh plain memory is not zero, so that nobody counts on it") {
  SimFolder folder;
  CHECK(WithSim(Options(folder), [](const Driver& cu) {
          std::string notes;
          CUdeviceptr plain;
          uint64_t word = 0;
          EXPECT(cu.cuMemAlloc(&plain, 8) == CUDA_SUCCESS);
          EXPECT(cu.cuMemcpyDtoHAsync(&word, plain, 8, nullptr) == CUDA_SUCCESS);
          EXPECT(word != 0);
          return notes;
        }) == "");
}

}  // namespace residency

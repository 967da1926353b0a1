// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/device.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <vector>

#include "mechanisms/refusal.h"
#include "mechanisms/units.h"
#include "tests/test_driver.h"

namespace residency {
namespace {

TEST_CASE("Each kind of driver error becomes a status of its own that names call and error") {
  const Driver& driver = TestDriver();
  const auto of = [&](CUresult result) { return DriverStatus(driver, result, "cuCall"); };
  CHECK(of(CUDA_SUCCESS).ok());
  CHECK(of(CUDA_ERROR_OUT_OF_MEMORY).code() == absl::StatusCode::kResourceExhausted);
  CHECK(ReasonOf(of(CUDA_ERROR_OUT_OF_MEMORY)) == "GPU_MEMORY");
  CHECK(ReasonOf(of(CUDA_ERROR_NO_DEVICE)) == "NO_DEVICE");
  CHECK(ReasonOf(of(CUDA_ERROR_NOT_SUPPORTED)) == "NOT_SUPPORTED");
  for (CUresult sticky : {CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_UNKNOWN}) {
    CHECK(ReasonOf(of(sticky)) == "DEVICE_LOST");
  }
  CHECK(ReasonOf(of(CUDA_ERROR_INVALID_VALUE)) == "DRIVER");
  CHECK(std::string(of(CUDA_ERROR_INVALID_VALUE).message()) == "cuCall: CUDA_ERROR_INVALID_VALUE (1)");
}

TEST_CASE("A device is found again by its UUID, and an unknown one is refused by name") {
  const auto device = OpenTestDevice();
  CHECK(device->info().uuid.size() == std::string("GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx").size());
  CHECK(device->info().granule_bytes == 2 * kMiB);
  const auto again = Device::OpenByUuid(TestDriver(), device->info().uuid);
  REQUIRE(again.ok());
  CHECK((*again)->info().ordinal == device->info().ordinal);
  const auto missing = Device::OpenByUuid(TestDriver(), "GPU-00000000-0000-0000-0000-000000000000");
  CHECK(ReasonOf(missing.status()) == "NO_SUCH_DEVICE");
  CHECK(std::string(missing.status().message()).find(device->info().uuid) != std::string::npos);
}

TEST_CASE("The probe passes, and says which step fails where one does") {
  CHECK(OpenTestDevice()->Probe().ok());
  Driver crippled = TestDriver();
  SECTION("no memory management") {
    crippled.cuMemCreate = [](CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*,
                              unsigned long long) -> CUresult { return CUDA_ERROR_NOT_SUPPORTED; };
    const absl::Status status = OpenTestDevice(crippled)->Probe();
    CHECK(ReasonOf(status) == "NO_VMM");
    CHECK(std::string(status.message()).find("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801)") != std::string::npos);
  }
  SECTION("no memory that could be exported") {
    crippled.cuMemCreate = [](CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                              unsigned long long flags) -> CUresult {
      if (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
      return TestDriver().cuMemCreate(handle, bytes, properties, flags);
    };
    CHECK(ReasonOf(OpenTestDevice(crippled)->Probe()) == "NO_EXPORT");
  }
  SECTION("no export") {
    crippled.cuMemExportToShareableHandle = [](void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                               unsigned long long) -> CUresult { return CUDA_ERROR_NOT_SUPPORTED; };
    CHECK(ReasonOf(OpenTestDevice(crippled)->Probe()) == "NO_EXPORT");
  }
}

TEST_CASE("A device says where it sits on the PCI bus as the system spells it") {
  const std::string id = OpenTestDevice()->info().pci_id;
  INFO(id);
  CHECK(id.size() == std::string("0000:00:00.0").size());
  CHECK(id.find_first_not_of("0123456789abcdef:.") == std::string::npos);
  // The simulated cards are no devices of this machine.
  if (TestDriverName() == "cuda") CHECK(std::filesystem::exists("/sys/bus/pci/devices/" + id + "/vendor"));
}

TEST_CASE("The first sticky error is remembered with its call, also of a call that nobody waits for") {
  Driver poisoned = TestDriver();
  poisoned.cuMemRelease = [](CUmemGenericAllocationHandle handle) -> CUresult {
    (void)TestDriver().cuMemRelease(handle);
    return CUDA_ERROR_LAUNCH_FAILED;
  };
  poisoned.cuMemGetInfo = [](size_t*, size_t*) -> CUresult { return CUDA_ERROR_ILLEGAL_ADDRESS; };
  const auto device = OpenTestDevice(poisoned);
  CHECK_FALSE(device->RegisterHost(nullptr, 0).ok());
  CHECK(device->Lost().ok());
  { auto memory = device->Create(2 * kMiB); }
  CHECK(ReasonOf(device->Lost()) == "DEVICE_LOST");
  CHECK(std::string(device->Lost().message()) == "cuMemRelease: CUDA_ERROR_LAUNCH_FAILED (719)");
  CHECK_FALSE(device->Memory().ok());
  CHECK(std::string(device->Lost().message()) == "cuMemRelease: CUDA_ERROR_LAUNCH_FAILED (719)");
}

TEST_CASE("The free figure falls by what is created and rises when the last owner goes") {
  const auto device = OpenTestDevice();
  const uint64_t before = device->Memory()->free_bytes;
  {
    auto memory = device->Create(64 * kMiB);
    REQUIRE(memory.ok());
    CHECK(before - device->Memory()->free_bytes == 64 * kMiB);
    CellMemory moved = *std::move(memory);
    CHECK(moved.valid());
    CHECK_FALSE(memory->valid());
  }
  CHECK(device->Memory()->free_bytes == before);
}

TEST_CASE("More than there is is refused as GPU memory") {
  const auto device = OpenTestDevice();
  const uint64_t bytes = AlignUp(device->Memory()->total_bytes, 2 * kMiB) + 2 * kMiB;
  const auto memory = device->Create(bytes);
  CHECK(ReasonOf(memory.status()) == "GPU_MEMORY");
}

TEST_CASE("Bytes come back as they went, and what lies where is the driver's word") {
  const auto device = OpenTestDevice();
  const uint64_t bytes = 4 * kMiB;
  auto range = device->Reserve(2 * bytes);
  auto memory = device->Create(bytes);
  auto stream = device->CreateStream();
  REQUIRE((range.ok() && memory.ok() && stream.ok()));
  CHECK_FALSE(device->IsBacked(range->get()));
  REQUIRE(device->Map(range->get(), *memory).ok());
  REQUIRE(device->Map(range->get() + bytes, *memory).ok());  // once more, as an alias
  REQUIRE(device->SetAccess(range->get(), 2 * bytes, Access::kReadWrite).ok());
  CHECK(*device->HandleAt(range->get()) == memory->get());
  CHECK(*device->HandleAt(range->get() + bytes) == memory->get());
  std::vector<unsigned char> out(bytes);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<unsigned char>(i * 31 + i / 4096);
  std::vector<unsigned char> in(bytes);
  REQUIRE(device->CopyToDevice(range->get(), out.data(), bytes, *stream).ok());
  REQUIRE(device->CopyToHost(in.data(), range->get() + bytes, bytes, *stream).ok());
  REQUIRE(device->Synchronize(*stream).ok());
  CHECK(in == out);
  CHECK(device->copied_to_host_bytes() == bytes);
  REQUIRE(device->Unmap(range->get(), 2 * bytes).ok());
  CHECK_FALSE(device->IsBacked(range->get()));
}

TEST_CASE("A stream waits for another one's event, and time between events is not negative") {
  const auto device = OpenTestDevice();
  auto first = device->CreateStream();
  auto second = device->CreateStream();
  auto buffer = device->Allocate(64 * kMiB);
  auto began = device->CreateEvent();
  auto written = device->CreateEvent();
  REQUIRE((first.ok() && second.ok() && buffer.ok() && began.ok() && written.ok()));
  std::vector<unsigned char> ones(buffer->bytes(), 1);
  REQUIRE(device->Record(*began, *first).ok());
  REQUIRE(device->CopyToDevice(buffer->get(), ones.data(), ones.size(), *first).ok());
  REQUIRE(device->Record(*written, *first).ok());
  REQUIRE(device->Wait(*second, *written).ok());
  unsigned char last = 0;
  REQUIRE(device->CopyToHost(&last, buffer->get() + buffer->bytes() - 1, 1, *second).ok());
  REQUIRE(device->Synchronize(*second).ok());
  CHECK(last == 1);
  REQUIRE(device->Synchronize(*written).ok());
  CHECK(*device->Elapsed(*began, *written) >= absl::ZeroDuration());
}

}  // namespace
}  // namespace residency

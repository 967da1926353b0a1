// SPDX-License-Identifier: Apache-2.0
//
// Conformance of addresses, allocations and mappings within one process.
#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/conformance_rig.h"

namespace residency {
namespace {

constexpr uint64_t kCell = 8 * kMiB;
constexpr uint64_t kWords = kCell / 8;
constexpr auto kNone = CU_MEM_ACCESS_FLAGS_PROT_NONE;
constexpr auto kRead = CU_MEM_ACCESS_FLAGS_PROT_READ;
constexpr auto kReadWrite = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
constexpr CUmemLocation kDevice0 = [] {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return location;
}();

// A mapped cell, taken down again at the end of the case.
struct Mapped {
  explicit Mapped(CUmemAccess_flags rights = kReadWrite) : handle(Create(kCell)), address(Reserve(kCell)) {
    Map(address, kCell, handle, rights);
  }
  ~Mapped() {
    CHECK_CU(Cu().cuMemUnmap(address, kCell), CUDA_SUCCESS);
    CHECK_CU(Cu().cuMemAddressFree(address, kCell), CUDA_SUCCESS);
    CHECK_CU(Cu().cuMemRelease(handle), CUDA_SUCCESS);
  }
  const CuHandle handle;
  const CUdeviceptr address;
};

unsigned long long AccessOf(CUdeviceptr address) {
  unsigned long long flags = 99;
  REQUIRE_CU(Cu().cuMemGetAccess(&flags, &kDevice0, address));
  return flags;
}

}  // namespace

TEST_CASE("the granule is 2 MiB and sizes are multiples of it") {
  const CUmemAllocationProp properties = DeviceMemory();
  size_t granule = 0;
  REQUIRE_CU(Cu().cuMemGetAllocationGranularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CHECK(granule == 2 * kMiB);
  CuHandle handle;
  CHECK_CU(Cu().cuMemCreate(&handle, kMiB, &properties, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemCreate(&handle, 0, &properties, 0), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr address;
  CHECK_CU(Cu().cuMemAddressReserve(&address, kMiB, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a copy to or from addresses that are reserved but not mapped is refused") {
  const CUdeviceptr address = Reserve(kCell);
  uint64_t word = 7;
  CHECK_CU(Cu().cuMemcpyHtoDAsync(address, &word, 8, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemcpyDtoHAsync(&word, address, 8, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemsetD8Async(address, 1, 8, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
}

TEST_CASE("a copy that runs over the end of what is mapped is refused") {
  const CUdeviceptr address = Reserve(2 * kCell);
  const CuHandle handle = Create(kCell);
  Map(address, kCell, handle);
  const std::vector<uint64_t> words = Pattern(4, 1);
  CHECK_CU(Cu().cuMemcpyHtoDAsync(address + kCell - 16, words.data(), 32, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemcpyHtoDAsync(address + kCell - 32, words.data(), 32, nullptr), CUDA_SUCCESS);
  REQUIRE_CU(Cu().cuStreamSynchronize(nullptr));
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(address, 2 * kCell));
  REQUIRE_CU(Cu().cuMemRelease(handle));
}

TEST_CASE("a copy may span adjacent mappings") {
  const CUdeviceptr address = Reserve(2 * kCell);
  const CuHandle first = Create(kCell);
  const CuHandle second = Create(kCell);
  Map(address, kCell, first);
  Map(address + kCell, kCell, second);
  const std::vector<uint64_t> words = Pattern(2 * kWords, 2);
  REQUIRE_CU(PutWords(address, words));
  CHECK(GetWords(address, 2 * kWords) == words);
  REQUIRE_CU(Cu().cuMemUnmap(address, 2 * kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(address, 2 * kCell));
  REQUIRE_CU(Cu().cuMemRelease(first));
  REQUIRE_CU(Cu().cuMemRelease(second));
}

TEST_CASE("a new allocation reads as zeros, also where a used one was released") {
  for (int round = 0; round < 4; ++round) {
    Mapped cell;
    const std::vector<uint64_t> words = GetWords(cell.address, kWords);
    CHECK(std::count(words.begin(), words.end(), 0u) == static_cast<int64_t>(kWords));
    REQUIRE_CU(PutWords(cell.address, Pattern(kWords, round)));
  }
}

TEST_CASE("an alias shows the same memory") {
  Mapped cell;
  const CUdeviceptr alias = Reserve(kCell);
  Map(alias, kCell, cell.handle);
  REQUIRE_CU(PutWords(cell.address, Pattern(kWords, 3)));
  CHECK(GetWords(alias, kWords) == Pattern(kWords, 3));
  REQUIRE_CU(PutWords(alias, Pattern(kWords, 4)));
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 4));
  REQUIRE_CU(Cu().cuMemUnmap(alias, kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(alias, kCell));
}

TEST_CASE("an address shows the memory that is mapped there now") {
  const CUdeviceptr address = Reserve(kCell);
  const CuHandle handles[2] = {Create(kCell), Create(kCell)};
  for (int round = 0; round < 4; ++round) {
    Map(address, kCell, handles[round % 2]);
    if (round >= 2) CHECK(GetWords(address, kWords) == Pattern(kWords, 10 + round % 2));
    REQUIRE_CU(PutWords(address, Pattern(kWords, 10 + round % 2)));
    REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  }
  for (const CuHandle handle : handles) REQUIRE_CU(Cu().cuMemRelease(handle));
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
}

TEST_CASE("a mapping is of a whole allocation") {
  const CUdeviceptr address = Reserve(kCell);
  const CuHandle handle = Create(kCell);
  CHECK_CU(Cu().cuMemMap(address, kCell / 2, 0, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
  CHECK_CU(Cu().cuMemMap(address, kCell / 2, kCell / 2, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
  REQUIRE_CU(Cu().cuMemRelease(handle));
}

TEST_CASE("unmapping or changing part of a mapping is refused, and nothing changes") {
  Mapped cell;
  REQUIRE_CU(PutWords(cell.address, Pattern(kWords, 5)));
  CHECK_CU(Cu().cuMemUnmap(cell.address, kCell / 2), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemUnmap(cell.address + kCell / 2, kCell / 2), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(SetAccess(cell.address, kCell / 2, kRead), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(SetAccess(cell.address + kCell / 2, kCell / 2, kRead), CUDA_ERROR_INVALID_VALUE);
  CHECK(AccessOf(cell.address) == 3);
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 5));
}

TEST_CASE("one call unmaps all mappings of a range, and changes those up to the first hole") {
  const CUdeviceptr address = Reserve(4 * kCell);
  CuHandle handles[3];
  for (CuHandle& handle : handles) handle = Create(kCell);
  REQUIRE_CU(Cu().cuMemMap(address, kCell, 0, handles[0], 0));
  REQUIRE_CU(Cu().cuMemMap(address + kCell, kCell, 0, handles[1], 0));
  REQUIRE_CU(Cu().cuMemMap(address + 3 * kCell, kCell, 0, handles[2], 0));
  CHECK_CU(SetAccess(address, 2 * kCell, kReadWrite), CUDA_SUCCESS);
  CHECK(AccessOf(address) == 3);
  CHECK(AccessOf(address + kCell) == 3);
  CHECK_CU(SetAccess(address, 4 * kCell, kRead), CUDA_SUCCESS);
  CHECK(AccessOf(address) == 1);
  CHECK(AccessOf(address + kCell) == 1);
  CHECK(AccessOf(address + 3 * kCell) == 0);
  CHECK_CU(Cu().cuMemUnmap(address, 4 * kCell), CUDA_SUCCESS);
  unsigned long long flags = 99;
  for (const uint64_t cell : {0, 1, 3}) {
    CHECK_CU(Cu().cuMemGetAccess(&flags, &kDevice0, address + cell * kCell), CUDA_ERROR_INVALID_VALUE);
  }
  REQUIRE_CU(Cu().cuMemAddressFree(address, 4 * kCell));
  for (const CuHandle handle : handles) REQUIRE_CU(Cu().cuMemRelease(handle));
}

TEST_CASE("where nothing is mapped, unmapping does nothing and changing the access is refused") {
  const CUdeviceptr address = Reserve(kCell);
  CHECK_CU(Cu().cuMemUnmap(address, kCell), CUDA_SUCCESS);
  CHECK_CU(SetAccess(address, kCell, kReadWrite), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemAddressFree(address, kCell), CUDA_SUCCESS);
}

TEST_CASE("mapping where something is mapped is refused, and the first mapping stays") {
  Mapped cell;
  const CuHandle other = Create(kCell);
  REQUIRE_CU(PutWords(cell.address, Pattern(kWords, 6)));
  CHECK_CU(Cu().cuMemMap(cell.address, kCell, 0, other, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 6));
  REQUIRE_CU(Cu().cuMemRelease(other));
}

TEST_CASE("mapping outside a reservation is refused") {
  const CuHandle handle = Create(kCell);
  const CUdeviceptr address = Reserve(kCell);
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
  CHECK_CU(Cu().cuMemMap(address, kCell, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CU(Cu().cuMemRelease(handle));
}

TEST_CASE("a reservation is not given back while something is mapped in it, nor in parts") {
  const CUdeviceptr address = Reserve(2 * kCell);
  const CuHandle handle = Create(kCell);
  Map(address, kCell, handle);
  CHECK_CU(Cu().cuMemAddressFree(address, 2 * kCell), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CU(PutWords(address, Pattern(kWords, 7)));
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  CHECK_CU(Cu().cuMemAddressFree(address, kCell), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemAddressFree(address, 2 * kCell), CUDA_SUCCESS);
  REQUIRE_CU(Cu().cuMemRelease(handle));
}

TEST_CASE("a fixed address is honoured when it is free") {
  const CUdeviceptr address = Reserve(64 * kCell);
  REQUIRE_CU(Cu().cuMemAddressFree(address, 64 * kCell));
  CUdeviceptr again = 0;
  REQUIRE_CU(Cu().cuMemAddressReserve(&again, 64 * kCell, 0, address, 0));
  CHECK(again == address);
  // Taken now: the hint is only a hint.
  CUdeviceptr elsewhere = 0;
  CHECK_CU(Cu().cuMemAddressReserve(&elsewhere, 64 * kCell, 0, address, 0), CUDA_SUCCESS);
  CHECK(elsewhere != address);
  REQUIRE_CU(Cu().cuMemAddressFree(elsewhere, 64 * kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(again, 64 * kCell));
}

TEST_CASE("a reservation is far larger than the card where that is asked for") {
  size_t total_bytes = 0;
  size_t free_bytes = 0;
  REQUIRE_CU(Cu().cuMemGetInfo(&free_bytes, &total_bytes));
  // No more than four cards of 64 GiB: a process under TSan has 0.5 to 1.5 TiB of addresses, as chance has it.
  const uint64_t bytes = 4 * AlignUp(total_bytes, kCell);
  const CUdeviceptr address = Reserve(bytes);
  CHECK(address % (2 * kMiB) == 0);
  CHECK_CU(Cu().cuMemAddressFree(address, bytes), CUDA_SUCCESS);
}

TEST_CASE("the handle under an address is the one that was mapped, through aliases too") {
  Mapped cell;
  const CUdeviceptr alias = Reserve(kCell);
  Map(alias, kCell, cell.handle, kRead);
  for (const CUdeviceptr address : {cell.address, cell.address + kCell / 2 + 8, alias}) {
    CuHandle handle = 0;
    REQUIRE_CU(Cu().cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)));
    CHECK(handle == cell.handle);
    REQUIRE_CU(Cu().cuMemRelease(handle));
  }
  REQUIRE_CU(Cu().cuMemUnmap(alias, kCell));
  CuHandle handle = 0;
  CHECK_CU(Cu().cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(alias)), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CU(Cu().cuMemAddressFree(alias, kCell));
}

TEST_CASE("a released handle can be taken up again from its mapping") {
  const CuHandle handle = Create(kCell);
  const CUdeviceptr address = Reserve(kCell);
  Map(address, kCell, handle);
  REQUIRE_CU(PutWords(address, Pattern(kWords, 8)));
  REQUIRE_CU(Cu().cuMemRelease(handle));
  CHECK(GetWords(address, kWords) == Pattern(kWords, 8));
  CuHandle again = 0;
  REQUIRE_CU(Cu().cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(address)));
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  Map(address, kCell, again);
  CHECK(GetWords(address, kWords) == Pattern(kWords, 8));
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  REQUIRE_CU(Cu().cuMemRelease(again));
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
}

TEST_CASE("the access flags are 0, 1 and 3, and asking about an unmapped address is refused") {
  const CuHandle handle = Create(kCell);
  const CUdeviceptr address = Reserve(kCell);
  unsigned long long flags = 99;
  CHECK_CU(Cu().cuMemGetAccess(&flags, &kDevice0, address), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CU(Cu().cuMemMap(address, kCell, 0, handle, 0));
  CHECK(AccessOf(address) == 0);
  for (const CUmemAccess_flags rights : {kReadWrite, kRead, kReadWrite, kNone, kRead}) {
    REQUIRE_CU(SetAccess(address, kCell, rights));
    CHECK(AccessOf(address) == static_cast<unsigned long long>(rights));
  }
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  CHECK_CU(Cu().cuMemGetAccess(&flags, &kDevice0, address), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
  REQUIRE_CU(Cu().cuMemRelease(handle));
}

TEST_CASE("a copy into a read-only mapping is refused, and nothing breaks") {
  Mapped cell;
  REQUIRE_CU(PutWords(cell.address, Pattern(kWords, 9)));
  REQUIRE_CU(SetAccess(cell.address, kCell, kRead));
  CHECK_CU(PutWords(cell.address, Pattern(kWords, 10)), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemsetD8Async(cell.address, 1, kCell, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 9));
}

TEST_CASE("memory counts as used from its creation, mapped or not, until the last handle and mapping") {
  constexpr uint64_t kBig = 256 * kMiB;
  const uint64_t before = FreeBytes();
  const CuHandle handle = Create(kBig);
  CHECK(FreeBytesBecome(before - kBig));
  const CUdeviceptr address = Reserve(kBig);
  Map(address, kBig, handle);
  CHECK(FreeBytesBecome(before - kBig));
  REQUIRE_CU(Cu().cuMemRelease(handle));
  CHECK(FreeBytesBecome(before - kBig));
  REQUIRE_CU(Cu().cuMemUnmap(address, kBig));
  CHECK(FreeBytesBecome(before));
  REQUIRE_CU(Cu().cuMemAddressFree(address, kBig));
}

TEST_CASE("more than is free is OUT_OF_MEMORY, and less is not") {
  const CUmemAllocationProp properties = DeviceMemory();
  const uint64_t free_bytes = FreeBytes() / (2 * kMiB) * (2 * kMiB);
  CuHandle handle;
  CHECK_CU(Cu().cuMemCreate(&handle, free_bytes + kGiB, &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
  const CuHandle half = Create(free_bytes / 2 / (2 * kMiB) * (2 * kMiB));
  CHECK_CU(Cu().cuMemCreate(&handle, free_bytes / 2 + kGiB / 2 / (2 * kMiB) * (2 * kMiB), &properties, 0),
           CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE_CU(Cu().cuMemRelease(half));
  CUdeviceptr address;
  CHECK_CU(Cu().cuMemAlloc(&address, free_bytes + kGiB), CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("plain allocations are read and written, charged, and given back") {
  constexpr uint64_t kBig = 64 * kMiB;
  const uint64_t before = FreeBytes();
  CUdeviceptr address = 0;
  REQUIRE_CU(Cu().cuMemAlloc(&address, kBig));
  CHECK(FreeBytesBecome(before - kBig));
  REQUIRE_CU(PutWords(address, Pattern(kBig / 8, 11)));
  CHECK(GetWords(address, kBig / 8) == Pattern(kBig / 8, 11));
  REQUIRE_CU(Cu().cuMemFree(address));
  CHECK(FreeBytesBecome(before));
  CHECK_CU(Cu().cuMemFree(0), CUDA_SUCCESS);
}

TEST_CASE("bytes are set through mappings") {
  Mapped cell;
  REQUIRE_CU(PutWords(cell.address, Pattern(kWords, 12)));
  REQUIRE_CU(Cu().cuMemsetD8Async(cell.address + 8, 0xAB, 16, nullptr));
  const std::vector<uint64_t> words = GetWords(cell.address, 4);
  CHECK(words[0] == Pattern(4, 12)[0]);
  CHECK(words[1] == 0xABABABABABABABABu);
  CHECK(words[2] == 0xABABABABABABABABu);
  CHECK(words[3] == Pattern(4, 12)[3]);
}

}  // namespace residency

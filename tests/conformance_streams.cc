// SPDX-License-Identifier: Apache-2.0
//
// Conformance of streams, events, copies of registered memory, and kernels.
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>

#include "mechanisms/digest.h"
#include "tests/conformance_rig.h"

namespace residency {
namespace {

constexpr uint64_t kCell = 32 * kMiB;
constexpr uint64_t kWords = kCell / 8;

struct Mapped {
  Mapped() : handle(Create(kCell)), address(Reserve(kCell)) { Map(address, kCell, handle); }
  ~Mapped() {
    CHECK_CU(Cu().cuMemUnmap(address, kCell), CUDA_SUCCESS);
    CHECK_CU(Cu().cuMemAddressFree(address, kCell), CUDA_SUCCESS);
    CHECK_CU(Cu().cuMemRelease(handle), CUDA_SUCCESS);
  }
  const CuHandle handle;
  const CUdeviceptr address;
};

// Host memory that is registered while the object lives.
struct Registered {
  explicit Registered(uint64_t bytes, unsigned int flags = 0) : memory(bytes) {
    REQUIRE_CU(Cu().cuMemHostRegister(memory.words(), bytes, flags));
  }
  ~Registered() { CHECK_CU(Cu().cuMemHostUnregister(memory.words()), CUDA_SUCCESS); }
  void Fill(uint64_t seed) {
    const std::vector<uint64_t> words = Pattern(kWords, seed);
    std::copy(words.begin(), words.end(), memory.words());
  }
  bool Shows(uint64_t seed) {
    const std::vector<uint64_t> words = Pattern(kWords, seed);
    return std::equal(words.begin(), words.end(), memory.words());
  }
  HostMemory memory;
};

struct Stream {
  Stream() { REQUIRE_CU(Cu().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)); }
  ~Stream() { CHECK_CU(Cu().cuStreamDestroy(stream), CUDA_SUCCESS); }
  CUstream stream;
};

struct Event {
  explicit Event(unsigned int flags = CU_EVENT_DEFAULT) { REQUIRE_CU(Cu().cuEventCreate(&event, flags)); }
  ~Event() { CHECK_CU(Cu().cuEventDestroy(event), CUDA_SUCCESS); }
  CUevent event;
};

}  // namespace

TEST_CASE("a stream does its work in order") {
  Mapped cell;
  Stream stream;
  Registered in(kCell), out(kCell);
  for (uint64_t round = 0; round < 8; ++round) {
    in.Fill(round);
    REQUIRE_CU(Cu().cuMemsetD8Async(cell.address, 0xEE, kCell, stream.stream));
    REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, in.memory.words(), kCell, stream.stream));
    REQUIRE_CU(Cu().cuMemcpyDtoHAsync(out.memory.words(), cell.address, kCell, stream.stream));
    REQUIRE_CU(Cu().cuStreamSynchronize(stream.stream));
    CHECK_CU(Cu().cuStreamQuery(stream.stream), CUDA_SUCCESS);
    CHECK(out.Shows(round));
  }
}

TEST_CASE("a stream that waits for an event sees what was done before it was recorded") {
  Mapped cell;
  Stream writer, reader;
  Event written(CU_EVENT_DISABLE_TIMING), read(CU_EVENT_DISABLE_TIMING);
  Registered in(kCell), out(kCell);
  for (uint64_t round = 0; round < 8; ++round) {
    in.Fill(100 + round);
    REQUIRE_CU(Cu().cuStreamWaitEvent(writer.stream, read.event, 0));
    REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, in.memory.words(), kCell, writer.stream));
    REQUIRE_CU(Cu().cuEventRecord(written.event, writer.stream));
    REQUIRE_CU(Cu().cuStreamWaitEvent(reader.stream, written.event, 0));
    REQUIRE_CU(Cu().cuMemcpyDtoHAsync(out.memory.words(), cell.address, kCell, reader.stream));
    REQUIRE_CU(Cu().cuEventRecord(read.event, reader.stream));
    REQUIRE_CU(Cu().cuEventSynchronize(read.event));
    CHECK_CU(Cu().cuEventQuery(read.event), CUDA_SUCCESS);
    CHECK_CU(Cu().cuEventQuery(written.event), CUDA_SUCCESS);
    CHECK(out.Shows(100 + round));
  }
}

TEST_CASE("an event that was never recorded holds nobody up and has no time") {
  Stream stream;
  Event never, recorded;
  float milliseconds = 0;
  CHECK_CU(Cu().cuEventQuery(never.event), CUDA_SUCCESS);
  CHECK_CU(Cu().cuEventSynchronize(never.event), CUDA_SUCCESS);
  CHECK_CU(Cu().cuStreamWaitEvent(stream.stream, never.event, 0), CUDA_SUCCESS);
  REQUIRE_CU(Cu().cuEventRecord(recorded.event, stream.stream));
  REQUIRE_CU(Cu().cuStreamSynchronize(stream.stream));
  CHECK_CU(Cu().cuEventElapsedTime(&milliseconds, never.event, recorded.event), CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("the time between two events is that of the work between them") {
  Mapped cell;
  Stream stream;
  Event begin, end;
  Registered in(kCell);
  float milliseconds = 0;
  const auto started = std::chrono::steady_clock::now();
  REQUIRE_CU(Cu().cuEventRecord(begin.event, stream.stream));
  REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, in.memory.words(), kCell, stream.stream));
  REQUIRE_CU(Cu().cuEventRecord(end.event, stream.stream));
  REQUIRE_CU(Cu().cuEventSynchronize(end.event));
  const std::chrono::duration<float, std::milli> wall = std::chrono::steady_clock::now() - started;
  REQUIRE_CU(Cu().cuEventElapsedTime(&milliseconds, begin.event, end.event));
  // 32 MiB in less than 0.1 ms would be 335 GB/s.
  CHECK(milliseconds > 0.1f);
  CHECK(milliseconds < wall.count() + 1);
  REQUIRE_CU(Cu().cuEventElapsedTime(&milliseconds, end.event, begin.event));
  CHECK(milliseconds < 0);
}

TEST_CASE("no stream is capturing unless somebody began") {
  Stream stream;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  REQUIRE_CU(Cu().cuStreamIsCapturing(stream.stream, &status));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_NONE);
}

TEST_CASE("work of a destroyed stream is still done") {
  Mapped cell;
  Registered in(kCell);
  Event done;
  in.Fill(7);
  CUstream stream;
  REQUIRE_CU(Cu().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, in.memory.words(), kCell, stream));
  REQUIRE_CU(Cu().cuEventRecord(done.event, stream));
  REQUIRE_CU(Cu().cuStreamDestroy(stream));
  REQUIRE_CU(Cu().cuEventSynchronize(done.event));
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 7));
}

TEST_CASE("the default stream keeps order with blocking streams") {
  Mapped cell;
  Registered in(kCell), out(kCell);
  in.Fill(8);
  CUstream stream;
  REQUIRE_CU(Cu().cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, in.memory.words(), kCell, stream));
  REQUIRE_CU(Cu().cuMemcpyDtoHAsync(out.memory.words(), cell.address, kCell, nullptr));
  REQUIRE_CU(Cu().cuMemsetD8Async(cell.address, 0, kCell, stream));
  REQUIRE_CU(Cu().cuStreamSynchronize(stream));
  CHECK(out.Shows(8));
  REQUIRE_CU(Cu().cuStreamDestroy(stream));
}

TEST_CASE("host memory that is not registered may be used again when the copy's call returns") {
  Mapped cell;
  Stream stream;
  std::vector<uint64_t> words = Pattern(1024, 9);
  REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, words.data(), words.size() * 8, stream.stream));
  std::fill(words.begin(), words.end(), 0);
  REQUIRE_CU(Cu().cuStreamSynchronize(stream.stream));
  CHECK(GetWords(cell.address, 1024) == Pattern(1024, 9));
}

TEST_CASE("memory is registered once, and what was never registered is not unregistered") {
  HostMemory memory(4 * kMiB);
  CHECK_CU(Cu().cuMemHostUnregister(memory.words()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  REQUIRE_CU(Cu().cuMemHostRegister(memory.words(), 4 * kMiB, 0));
  CHECK_CU(Cu().cuMemHostRegister(memory.words(), 4 * kMiB, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK_CU(Cu().cuMemHostRegister(memory.bytes() + 2 * kMiB, kMiB, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  REQUIRE_CU(Cu().cuMemHostUnregister(memory.words()));
  CHECK_CU(Cu().cuMemHostUnregister(memory.words()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

TEST_CASE("a copy whose host range crosses two registrations is refused") {
  Mapped cell;
  HostMemory memory(kCell);
  REQUIRE_CU(Cu().cuMemHostRegister(memory.bytes(), kCell / 2, 0));
  REQUIRE_CU(Cu().cuMemHostRegister(memory.bytes() + kCell / 2, kCell / 2, 0));
  CHECK_CU(Cu().cuMemcpyHtoDAsync(cell.address, memory.bytes(), kCell, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_CU(Cu().cuMemcpyHtoDAsync(cell.address, memory.bytes() + kCell / 2, kCell / 2, nullptr), CUDA_SUCCESS);
  CHECK_CU(Cu().cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  REQUIRE_CU(Cu().cuMemHostUnregister(memory.bytes()));
  REQUIRE_CU(Cu().cuMemHostUnregister(memory.bytes() + kCell / 2));
}

TEST_CASE("pages of a file are registered for reading, where they lie on a disk for nothing else, and copied from") {
  const char* folder = std::getenv("TEST_TMPDIR");
  std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/conformance-XXXXXX";
  const UniqueFd file(::mkstemp(path.data()));
  REQUIRE(file.valid());
  REQUIRE(::unlink(path.c_str()) == 0);
  const std::vector<uint64_t> words = Pattern(kWords, 14);
  REQUIRE(::pwrite(file.get(), words.data(), kCell, 0) == static_cast<ssize_t>(kCell));
  void* const memory = ::mmap(nullptr, kCell, PROT_READ, MAP_SHARED, file.get(), 0);
  REQUIRE(memory != MAP_FAILED);
  struct statfs system;
  REQUIRE(::fstatfs(file.get(), &system) == 0);
  if (system.f_type != TMPFS_MAGIC) CHECK_CU(Cu().cuMemHostRegister(memory, kCell, 0), CUDA_ERROR_INVALID_VALUE);
  Mapped cell;
  // In two pieces, as what is larger than one piece is.
  constexpr unsigned int kFlags = CU_MEMHOSTREGISTER_READ_ONLY | CU_MEMHOSTREGISTER_PORTABLE;
  char* const begin = static_cast<char*>(memory);
  for (const uint64_t offset : {uint64_t{0}, kCell / 2}) {
    REQUIRE_CU(Cu().cuMemHostRegister(begin + offset, kCell / 2, kFlags));
    // Also from and to where no word begins.
    REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address + offset, begin + offset, 4097, nullptr));
    REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address + offset + 4097, begin + offset + 4097, kCell / 2 - 4097, nullptr));
  }
  REQUIRE_CU(Cu().cuStreamSynchronize(nullptr));
  CHECK(GetWords(cell.address, kWords) == words);
  // The pages stay the card's when the file is cut: a copy of them ends, and ends nothing else.
  REQUIRE(::ftruncate(file.get(), 0) == 0);
  CHECK_CU(Cu().cuMemcpyHtoDAsync(cell.address, begin, kCell / 2, nullptr), CUDA_SUCCESS);
  CHECK_CU(Cu().cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  REQUIRE_CU(Cu().cuMemHostUnregister(begin));
  REQUIRE_CU(Cu().cuMemHostUnregister(begin + kCell / 2));
  // Pages that are not there are nothing to register.
  CHECK(Cu().cuMemHostRegister(begin, kCell / 2, kFlags) != CUDA_SUCCESS);
  REQUIRE(::munmap(memory, kCell) == 0);
}

TEST_CASE("memory that is registered for reading is copied from") {
  Mapped cell;
  Registered in(kCell, CU_MEMHOSTREGISTER_READ_ONLY);
  in.Fill(10);
  REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address, in.memory.words(), kCell, nullptr));
  REQUIRE_CU(Cu().cuStreamSynchronize(nullptr));
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 10));
}

TEST_CASE("a copy may begin at any byte on either side") {
  Mapped cell;
  Registered in(kCell);
  in.Fill(11);
  for (const uint64_t from : {1u, 3u, 255u, 4095u}) {
    for (const uint64_t to : {0u, 1u, 8u, 256u}) {
      constexpr uint64_t kBytes = 3 * kMiB + 5;
      std::vector<char> read(kBytes);
      REQUIRE_CU(Cu().cuMemcpyHtoDAsync(cell.address + to, in.memory.bytes() + from, kBytes, nullptr));
      REQUIRE_CU(Cu().cuMemcpyDtoHAsync(read.data(), cell.address + to, kBytes, nullptr));
      REQUIRE_CU(Cu().cuStreamSynchronize(nullptr));
      CHECK(std::memcmp(read.data(), in.memory.bytes() + from, kBytes) == 0);
    }
  }
}

TEST_CASE("a kernel writes through one address and is read through another") {
  Mapped cell;
  const CUdeviceptr alias = Reserve(kCell);
  Map(alias, kCell, cell.handle, CU_MEM_ACCESS_FLAGS_PROT_READ);
  REQUIRE_CU(LaunchFill(FillKernel(), cell.address + 64, 1000, 0x1234567890ABCDEFu, nullptr));
  const std::vector<uint64_t> words = GetWords(alias, 1024);
  CHECK(words[7] == 0);
  CHECK(std::count(words.begin(), words.end(), 0x1234567890ABCDEFu) == 1000);
  REQUIRE_CU(Cu().cuMemUnmap(alias, kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(alias, kCell));
}

TEST_CASE("a module has no function of a name that nobody wrote") {
  CUmodule module;
  CUfunction function;
  FillKernel();
  REQUIRE_CU(Cu().cuModuleLoadData(&module, DigestFatbin().data()));
  CHECK_CU(Cu().cuModuleGetFunction(&function, module, "residency_no_such_kernel"), CUDA_ERROR_NOT_FOUND);
  CHECK_CU(Cu().cuModuleUnload(module), CUDA_SUCCESS);
}

TEST_CASE("the digest kernel gives the digests that the processor gives") {
  Mapped cell;
  const std::vector<uint64_t> words = Pattern(kWords, 12);
  REQUIRE_CU(PutWords(cell.address, words));
  const DigestItem items[] = {
      {cell.address, kWords, 0},
      {cell.address + 8, 1, 1},
      {cell.address + 4096, 777, 512},
      {cell.address, kWords / 2, uint64_t{1} << 33},
  };
  constexpr uint32_t kItems = 4;
  CUmodule module;
  CUfunction digest;
  CUdeviceptr buffer;
  REQUIRE_CU(Cu().cuModuleLoadData(&module, DigestFatbin().data()));
  REQUIRE_CU(Cu().cuModuleGetFunction(&digest, module, kDigestKernel));
  REQUIRE_CU(Cu().cuMemAlloc(&buffer, sizeof(items) + kItems * 8));
  CUdeviceptr items_address = buffer;
  CUdeviceptr sums_address = buffer + sizeof(items);
  REQUIRE_CU(Cu().cuMemcpyHtoDAsync(items_address, items, sizeof(items), nullptr));
  REQUIRE_CU(Cu().cuMemsetD8Async(sums_address, 0, kItems * 8, nullptr));
  uint32_t item_count = kItems;
  void* params[] = {&items_address, &item_count, &sums_address};
  REQUIRE_CU(Cu().cuLaunchKernel(digest, 64, 1, 1, kDigestThreads, 1, 1, 0, nullptr, params, nullptr));
  const std::vector<uint64_t> sums = GetWords(sums_address, kItems);
  for (uint32_t i = 0; i < kItems; ++i) {
    const uint64_t first_word = (items[i].address - cell.address) / 8;
    CHECK(sums[i] == DigestWordsPortable(words.data() + first_word, items[i].word_count, items[i].first_index));
  }
  REQUIRE_CU(Cu().cuMemFree(buffer));
  REQUIRE_CU(Cu().cuModuleUnload(module));
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
//
// Conformance of memory that several processes share, and of processes that die.
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <string>
#include <thread>

#include "mechanisms/nvml.h"
#include "mechanisms/sim_nvml.h"
#include "tests/conformance_rig.h"

namespace residency {
namespace {

constexpr uint64_t kCell = 64 * kMiB;
constexpr uint64_t kWords = kCell / 8;
constexpr uint64_t kRead = CU_MEM_ACCESS_FLAGS_PROT_READ;
constexpr uint64_t kReadWrite = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

// A cell that this process made, exported and filled with Pattern(kWords, seed).
struct Made {
  explicit Made(uint64_t seed) : handle(Create(kCell)), address(Reserve(kCell)), fd(Export(handle)) {
    Map(address, kCell, handle);
    REQUIRE_CU(PutWords(address, Pattern(kWords, seed)));
  }
  // Everything but the descriptor.
  void LetGo() {
    REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
    REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
    REQUIRE_CU(Cu().cuMemRelease(handle));
  }
  const CuHandle handle;
  const CUdeviceptr address;
  UniqueFd fd;
};

// Imports, compares with Pattern(kWords, seed) and lets go of all but the descriptor.
bool ImportShows(const UniqueFd& fd, uint64_t seed) {
  const CuHandle handle = Import(fd);
  const CUdeviceptr address = Reserve(kCell);
  Map(address, kCell, handle, CU_MEM_ACCESS_FLAGS_PROT_READ);
  const bool same = GetWords(address, kWords) == Pattern(kWords, seed);
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
  REQUIRE_CU(Cu().cuMemRelease(handle));
  return same;
}

std::string UuidText() {
  CUuuid uuid{};
  REQUIRE_CU(Cu().cuDeviceGetUuid(&uuid, 0));
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    text += {kDigits[byte / 16], kDigits[byte % 16]};
  }
  return text;
}

// What NVML says that a process has, 0 where it lists none of that pid.
uint64_t UsedBytes(const Nvml& nvml, pid_t pid) {
  const auto processes = MeasureProcesses(nvml, UuidText(), ::getpid());
  REQUIRE(processes.ok());
  for (const ProcessMemory& process : *processes) {
    if (process.pid == pid) return process.bytes;
  }
  return 0;
}

// As FreeBytesBecome.
bool UsedBytesBecome(const Nvml& nvml, pid_t pid, uint64_t expected) {
  const uint64_t tolerance_bytes = OnSim() ? 0 : 16 * kMiB;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (true) {
    const uint64_t used_bytes = UsedBytes(nvml, pid);
    if (used_bytes + tolerance_bytes >= expected && used_bytes <= expected + tolerance_bytes) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

TEST_CASE("shared memory is charged to its maker while that holds it, and then to whoever imported it") {
  FreeBytes();  // the driver is open, and this process has its context
  const absl::StatusOr<Nvml> opened = OnSim() ? SimNvml() : LoadNvml();
  REQUIRE(opened.ok());
  const Nvml& nvml = *opened;
  const pid_t self = ::getpid();
  const uint64_t self_bytes = UsedBytes(nvml, self);
  OtherProcess maker;
  CHECK(UsedBytes(nvml, maker.pid()) == 0);
  maker.Call(Ask::kOpen);
  const uint64_t maker_bytes = UsedBytes(nvml, maker.pid());
  CHECK(maker_bytes > 0);
  Answer made = maker.Call(Ask::kMake, {kCell, 14});
  CHECK(UsedBytesBecome(nvml, maker.pid(), maker_bytes + kCell));
  const CuHandle handle = Import(made.fd);
  const CUdeviceptr address = Reserve(kCell);
  Map(address, kCell, handle);
  made.fd.reset();
  CHECK(UsedBytesBecome(nvml, self, self_bytes));
  maker.Call(Ask::kLetGo);
  CHECK(UsedBytesBecome(nvml, maker.pid(), maker_bytes));
  CHECK(UsedBytesBecome(nvml, self, self_bytes + kCell));
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
  REQUIRE_CU(Cu().cuMemRelease(handle));
  CHECK(UsedBytesBecome(nvml, self, self_bytes));
  const pid_t gone = maker.pid();
  maker.Kill();
  CHECK(UsedBytesBecome(nvml, gone, 0));
}

TEST_CASE("an exported allocation is the same memory in another process") {
  Made cell(1);
  OtherProcess other;
  other.Call(Ask::kOpen);
  const Answer mapped = other.Call(Ask::kMapIn, {kCell, kReadWrite}, cell.fd.get());
  CHECK(other.Call(Ask::kCountWrong, {mapped.values[0], kWords, 1}).values[0] == 0);
  CHECK(other.Call(Ask::kPut, {mapped.values[0], kWords, 2}).result == CUDA_SUCCESS);
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 2));
  REQUIRE_CU(PutWords(cell.address, Pattern(kWords, 3)));
  CHECK(other.Call(Ask::kCountWrong, {mapped.values[0], kWords, 3}).values[0] == 0);
  other.Call(Ask::kLetGo);
  cell.LetGo();
}

TEST_CASE("one descriptor is imported many times") {
  Made cell(4);
  CHECK(ImportShows(cell.fd, 4));
  CHECK(ImportShows(cell.fd, 4));
  cell.LetGo();
}

TEST_CASE("what is imported cannot be exported again") {
  Made cell(5);
  const CuHandle imported = Import(cell.fd);
  int fd = -1;
  CHECK_CU(Cu().cuMemExportToShareableHandle(&fd, imported, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
           CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CU(Cu().cuMemRelease(imported));
  cell.LetGo();
}

TEST_CASE("a descriptor that is not device memory is refused") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd first(ends[0]), second(ends[1]);
  CuHandle handle;
  void* by_value = reinterpret_cast<void*>(static_cast<intptr_t>(first.get()));
  CHECK(Cu().cuMemImportFromShareableHandle(&handle, by_value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) !=
        CUDA_SUCCESS);
}

TEST_CASE("a descriptor alone keeps the memory and counts as used") {
  const uint64_t before = FreeBytes();
  Made cell(6);
  cell.LetGo();
  CHECK(FreeBytesBecome(before - kCell));
  CHECK(ImportShows(cell.fd, 6));
  CHECK(FreeBytesBecome(before - kCell));
  cell.fd.reset();
  CHECK(FreeBytesBecome(before));
}

TEST_CASE("a descriptor on its way through a socket keeps the memory") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd sender(ends[0]);
  UniqueFd receiver(ends[1]);
  const uint64_t before = FreeBytes();
  Made first(7);
  SendPacket(sender.get(), {1}, first.fd.get());
  first.fd.reset();
  first.LetGo();
  CHECK(FreeBytesBecome(before - kCell));
  UniqueFd arrived;
  ReceivePacket(receiver.get(), &arrived);
  CHECK(ImportShows(arrived, 7));
  // Back on its way, and the socket goes without anybody having read it.
  SendPacket(sender.get(), {1}, arrived.get());
  arrived.reset();
  CHECK(FreeBytesBecome(before - kCell));
  receiver.reset();
  CHECK(FreeBytesBecome(before));
}

TEST_CASE("an importer reads on after its maker was killed, and its mapping counts") {
  const uint64_t before = FreeBytes();
  OtherProcess maker;
  maker.Call(Ask::kOpen);
  Answer made = maker.Call(Ask::kMake, {kCell, 8});
  const CuHandle handle = Import(made.fd);
  const CUdeviceptr address = Reserve(kCell);
  Map(address, kCell, handle);
  made.fd.reset();
  maker.Kill();
  CHECK(FreeBytesBecome(before - kCell));
  CHECK(GetWords(address, kWords) == Pattern(kWords, 8));
  REQUIRE_CU(PutWords(address, Pattern(kWords, 9)));
  CHECK(GetWords(address, kWords) == Pattern(kWords, 9));
  REQUIRE_CU(Cu().cuMemUnmap(address, kCell));
  REQUIRE_CU(Cu().cuMemAddressFree(address, kCell));
  REQUIRE_CU(Cu().cuMemRelease(handle));
  CHECK(FreeBytesBecome(before));
}

TEST_CASE("a process without a driver keeps the memory of a killed maker for a third") {
  const uint64_t before = FreeBytes();
  OtherProcess keeper;
  {
    OtherProcess maker;
    maker.Call(Ask::kOpen);
    const Answer made = maker.Call(Ask::kMake, {kCell, 10});
    keeper.Call(Ask::kKeep, {}, made.fd.get());
  }
  CHECK(FreeBytesBecome(before - kCell));
  Answer back = keeper.Call(Ask::kGiveBack);
  CHECK(ImportShows(back.fd, 10));
  {
    OtherProcess third;
    third.Call(Ask::kOpen);
    const Answer mapped = third.Call(Ask::kMapIn, {kCell, kRead}, back.fd.get());
    back.fd.reset();
    CHECK(third.Call(Ask::kCountWrong, {mapped.values[0], kWords, 10}).values[0] == 0);
  }
  CHECK(FreeBytesBecome(before));
}

TEST_CASE("killing the only process that holds memory frees it, its context included") {
  const uint64_t before = FreeBytes();
  OtherProcess holder;
  holder.Call(Ask::kOpen);
  const uint64_t with_context = FreeBytes();
  CHECK(with_context < before);
  holder.Call(Ask::kMake, {kCell, 11}).fd.reset();
  CHECK(FreeBytesBecome(with_context - kCell));
  holder.Kill();
  CHECK(FreeBytesBecome(before));
}

TEST_CASE("a write by a kernel through a read-only mapping ends that process's context and no other") {
  Made cell(12);
  OtherProcess writer;
  OtherProcess bystander;
  writer.Call(Ask::kOpen);
  bystander.Call(Ask::kOpen);
  const Answer here = writer.Call(Ask::kMapIn, {kCell, kRead}, cell.fd.get());
  const Answer there = bystander.Call(Ask::kMapIn, {kCell, kRead}, cell.fd.get());
  CHECK_CU(writer.Call(Ask::kPut, {here.values[0], 16, 1}).result, CUDA_ERROR_INVALID_VALUE);
  CHECK(writer.Call(Ask::kCountWrong, {here.values[0], kWords, 12}).values[0] == 0);
  CHECK_CU(writer.Call(Ask::kFill, {here.values[0], 16, 1}).result, CUDA_ERROR_ILLEGAL_ADDRESS);

  CHECK(bystander.Call(Ask::kCountWrong, {there.values[0], kWords, 12}).values[0] == 0);
  CHECK(GetWords(cell.address, kWords) == Pattern(kWords, 12));
  std::vector<std::string> results;
  for (const uint64_t result : writer.Call(Ask::kResults).values) {
    results.push_back(CuName(static_cast<CUresult>(result)));
  }
  const std::string dead = "CUDA_ERROR_ILLEGAL_ADDRESS";
  const std::string fine = "CUDA_SUCCESS";
  // Memory can still be unmapped and let go.
  CHECK(results == std::vector<std::string>{dead, dead, dead, dead, dead, fine, fine, fine, fine, fine});
  cell.LetGo();
}

TEST_CASE("a kernel that touches an address that was unmapped ends its context") {
  Made cell(13);
  OtherProcess other;
  other.Call(Ask::kOpen);
  const Answer here = other.Call(Ask::kMapIn, {kCell, kReadWrite}, cell.fd.get());
  CHECK_CU(other.Call(Ask::kFill, {here.values[0], 16, 1}).result, CUDA_SUCCESS);
  other.Call(Ask::kLetGo);
  CHECK_CU(other.Call(Ask::kFill, {here.values[0], 16, 1}).result, CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(GetWords(cell.address, 17)[15] == 1);
  CHECK(GetWords(cell.address, 17)[16] == Pattern(17, 13)[16]);
  cell.LetGo();
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance_rig.h"

#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include "mechanisms/cuda_driver.h"
#include "mechanisms/sim_driver.h"

extern char** environ;

namespace residency {
namespace {

constexpr char kDriverVariable[] = "RESIDENCY_CONFORMANCE_DRIVER";
// Where the simulated cards live; the first process of a run chooses it and the others inherit it.
constexpr char kFolderVariable[] = "RESIDENCY_CONFORMANCE_FOLDER";
constexpr int kOtherSocket = 3;
constexpr uint64_t kRealToleranceBytes = 16 * kMiB;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "conformance rig: %s\n", what.c_str());
  std::abort();
}

std::string SimFolder() {
  if (const char* inherited = std::getenv(kFolderVariable)) return inherited;
  const bool has_shm = ::access("/dev/shm", W_OK) == 0;
  std::string folder = has_shm ? "/dev/shm/conformance-XXXXXX" : "/tmp/conformance-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) Fail("no folder for simulated cards");
  ::setenv(kFolderVariable, folder.c_str(), 1);
  static std::string remove_at_exit;
  remove_at_exit = folder;
  std::atexit([] {
    std::error_code ignored;
    std::filesystem::remove_all(remove_at_exit, ignored);
  });
  return folder;
}

// What the real kernel below does, one word at a time.
CUresult SimFillKernel(const SimMemory& memory, void** params) {
  const uint64_t address = *static_cast<uint64_t*>(params[0]);
  const uint64_t words = *static_cast<uint64_t*>(params[1]);
  const uint64_t value = *static_cast<uint64_t*>(params[2]);
  auto* begin = static_cast<uint64_t*>(memory.Write(address, words * sizeof(uint64_t)));
  if (begin == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  for (uint64_t i = 0; i < words; ++i) begin[i] = value;
  return CUDA_SUCCESS;
}

constexpr char kFillPtx[] = R"(
.version 7.0
.target sm_52
.address_size 64
.visible .entry residency_test_fill(.param .u64 address, .param .u64 words, .param .u64 value)
{
  .reg .pred %p<2>;
  .reg .u64 %rd<6>;
  ld.param.u64 %rd1, [address];
  ld.param.u64 %rd2, [words];
  ld.param.u64 %rd3, [value];
  cvta.to.global.u64 %rd5, %rd1;
  mov.u64 %rd4, 0;
NEXT:
  setp.ge.u64 %p1, %rd4, %rd2;
  @%p1 bra DONE;
  st.global.u64 [%rd5], %rd3;
  add.u64 %rd5, %rd5, 8;
  add.u64 %rd4, %rd4, 1;
  bra NEXT;
DONE:
  ret;
}
)";

Driver OpenForConformance() {
  absl::StatusOr<Driver> driver;
  if (OnSim()) {
    RegisterSimKernel("residency_test_fill", {8, 8, 8}, SimFillKernel);
    driver =
        OpenSimDriver({.directory = SimFolder(), .device_bytes = 6 * kGiB, .context_bytes = 96 * kMiB, .faults = ""});
  } else {
    driver = LoadCudaDriver();
  }
  if (!driver.ok()) Fail(std::string(driver.status().message()));
  CUcontext context;
  CUdevice device;
  if (driver->cuInit(0) != CUDA_SUCCESS || driver->cuDeviceGet(&device, 0) != CUDA_SUCCESS ||
      driver->cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS ||
      driver->cuCtxSetCurrent(context) != CUDA_SUCCESS) {
    Fail("no context on device 0");
  }
  return *driver;
}

}  // namespace

bool OnSim() {
  const char* name = std::getenv(kDriverVariable);
  if (name == nullptr || std::string_view(name) == "sim") return true;
  if (std::string_view(name) == "cuda") return false;
  Fail(std::string(kDriverVariable) + " is sim or cuda");
}

const Driver& Cu() {
  static const Driver driver = OpenForConformance();
  return driver;
}

std::string CuName(CUresult result) {
  const char* name = nullptr;
  if (Cu().cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) return std::to_string(result);
  return name;
}

void Must(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + " answered " + CuName(result));
}

CUfunction FillKernel() {
  CUmodule module;
  CUfunction fill;
  REQUIRE_CU(Cu().cuModuleLoadData(&module, kFillPtx));
  REQUIRE_CU(Cu().cuModuleGetFunction(&fill, module, "residency_test_fill"));
  return fill;
}

CUresult LaunchFill(CUfunction fill, CUdeviceptr address, uint64_t words, uint64_t value, CUstream stream) {
  uint64_t first = address;
  void* params[] = {&first, &words, &value};
  return Cu().cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr);
}

CUmemAllocationProp DeviceMemory() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  return properties;
}

CuHandle Create(uint64_t bytes) {
  const CUmemAllocationProp properties = DeviceMemory();
  CuHandle handle = 0;
  REQUIRE_CU(Cu().cuMemCreate(&handle, bytes, &properties, 0));
  return handle;
}

CUdeviceptr Reserve(uint64_t bytes) {
  CUdeviceptr address = 0;
  REQUIRE_CU(Cu().cuMemAddressReserve(&address, bytes, 0, 0, 0));
  return address;
}

CUresult SetAccess(CUdeviceptr address, uint64_t bytes, CUmemAccess_flags rights) {
  CUmemAccessDesc wanted{};
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = 0;
  wanted.flags = rights;
  return Cu().cuMemSetAccess(address, bytes, &wanted, 1);
}

void Map(CUdeviceptr address, uint64_t bytes, CuHandle handle, CUmemAccess_flags rights) {
  REQUIRE_CU(Cu().cuMemMap(address, bytes, 0, handle, 0));
  REQUIRE_CU(SetAccess(address, bytes, rights));
}

UniqueFd Export(CuHandle handle) {
  int fd = -1;
  REQUIRE_CU(Cu().cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  return UniqueFd(fd);
}

CuHandle Import(const UniqueFd& fd) {
  CuHandle handle = 0;
  void* by_value = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
  REQUIRE_CU(Cu().cuMemImportFromShareableHandle(&handle, by_value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return handle;
}

std::vector<uint64_t> Pattern(uint64_t words, uint64_t seed) {
  std::vector<uint64_t> pattern(words);
  // An odd multiplier is a bijection of 64-bit numbers, so no two words are equal.
  for (uint64_t i = 0; i < words; ++i) pattern[i] = (i + (seed << 40) + 1) * 0x9E3779B97F4A7C15u;
  return pattern;
}

CUresult PutWords(CUdeviceptr address, const std::vector<uint64_t>& words) {
  const CUresult result = Cu().cuMemcpyHtoDAsync(address, words.data(), words.size() * 8, nullptr);
  return result != CUDA_SUCCESS ? result : Cu().cuStreamSynchronize(nullptr);
}

std::vector<uint64_t> GetWords(CUdeviceptr address, uint64_t words) {
  std::vector<uint64_t> read(words);
  REQUIRE_CU(Cu().cuMemcpyDtoHAsync(read.data(), address, words * 8, nullptr));
  REQUIRE_CU(Cu().cuStreamSynchronize(nullptr));
  return read;
}

uint64_t FreeBytes() {
  size_t free_bytes = 0, total_bytes = 0;
  REQUIRE_CU(Cu().cuMemGetInfo(&free_bytes, &total_bytes));
  return free_bytes;
}

bool FreeBytesBecome(uint64_t expected) {
  const uint64_t tolerance_bytes = OnSim() ? 0 : kRealToleranceBytes;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  uint64_t free_bytes = 0;
  do {
    free_bytes = FreeBytes();
    if (free_bytes + tolerance_bytes >= expected && free_bytes <= expected + tolerance_bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  } while (std::chrono::steady_clock::now() < deadline);
  std::fprintf(stderr, "free bytes: %llu, expected %llu\n", static_cast<unsigned long long>(free_bytes),
               static_cast<unsigned long long>(expected));
  return false;
}

HostMemory::HostMemory(uint64_t bytes) : bytes_(bytes) {
  begin_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (begin_ == MAP_FAILED) Fail("no host memory");
}

HostMemory::~HostMemory() { ::munmap(begin_, bytes_); }

void SendPacket(int socket, const std::vector<uint64_t>& words, int fd) {
  iovec data{const_cast<uint64_t*>(words.data()), words.size() * 8};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) Fail("a packet was not sent");
}

std::vector<uint64_t> ReceivePacket(int socket, UniqueFd* fd) {
  std::vector<uint64_t> words(64);
  iovec data{words.data(), words.size() * 8};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) return {};
  words.resize(static_cast<size_t>(got) / 8);
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(int));
    *fd = UniqueFd(received);
  }
  return words;
}

OtherProcess::OtherProcess() {
  if (OnSim()) SimFolder();
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) Fail("no socket pair");
  socket_ = UniqueFd(ends[0]);
  const UniqueFd theirs(ends[1]);
  // Spawned and not forked: a process that has used CUDA must not go on in a fork.
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), kOtherSocket);
  char program[] = "conformance_test";
  char other[] = "--other_process";
  char* const arguments[] = {program, other, nullptr};
  if (::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments, environ) != 0) Fail("no other process");
  ::posix_spawn_file_actions_destroy(&actions);
}

OtherProcess::~OtherProcess() { Kill(); }

void OtherProcess::Kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

Answer OtherProcess::Call(Ask ask, std::vector<uint64_t> arguments, int fd) {
  arguments.insert(arguments.begin(), static_cast<uint64_t>(ask));
  SendPacket(socket_.get(), arguments, fd);
  Answer answer;
  answer.values = ReceivePacket(socket_.get(), &answer.fd);
  if (answer.values.empty()) throw std::runtime_error("the other process has ended");
  answer.result = static_cast<CUresult>(answer.values[0]);
  answer.values.erase(answer.values.begin());
  return answer;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
//
// Runs a piece of a test in a process of its own, with a simulated driver of its own: there is one such
// driver in a process, and these tests want many. The parent never opens one, so that forking is safe.
// Also the few sequences of calls that those pieces share.
#ifndef RESIDENCY_TESTS_SIM_CHILD_H_
#define RESIDENCY_TESTS_SIM_CHILD_H_

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "mechanisms/sim_driver.h"
#include "mechanisms/units.h"

// Notes `condition` as failed where it does not hold; the parent compares the notes with none.
#define EXPECT(condition) \
  if (!(condition)) notes += std::string(#condition) + " (line " + std::to_string(__LINE__) + ")\n"

namespace residency {

// A folder for simulated cards, removed at the end.
class SimFolder {
 public:
  SimFolder() {
    path_ = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm/sim-test-XXXXXX" : "/tmp/sim-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~SimFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  SimFolder(const SimFolder&) = delete;
  SimFolder& operator=(const SimFolder&) = delete;
  std::string cards() const { return path_ + "/cards"; }

 private:
  std::string path_;
};

// What `body` returns in a process of its own; "died" where that process did not end by itself.
inline std::string InChild(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) std::abort();
  const pid_t child = ::fork();
  if (child == 0) {
    // The parent's handlers would report on the parent's test.
    for (const int fatal : {SIGSEGV, SIGBUS, SIGABRT}) ::signal(fatal, SIG_DFL);
    const std::string notes = body();
    const bool written = ::write(ends[1], notes.data(), notes.size()) == static_cast<ssize_t>(notes.size());
    ::_exit(written ? 0 : 1);
  }
  ::close(ends[1]);
  std::string notes;
  char buffer[4096];
  for (ssize_t got; (got = ::read(ends[0], buffer, sizeof(buffer))) > 0;) notes.append(buffer, got);
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? notes : notes + "died";
}

// As InChild, with the driver opened, cuInit called and device 0's context current.
inline std::string WithSim(const SimOptions& options, const std::function<std::string(const Driver&)>& body) {
  return InChild([&]() -> std::string {
    absl::StatusOr<Driver> driver = OpenSimDriver(options);
    if (!driver.ok()) return std::string(driver.status().message());
    CUcontext context;
    if (driver->cuInit(0) != CUDA_SUCCESS || driver->cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
        driver->cuCtxSetCurrent(context) != CUDA_SUCCESS) {
      return "no context";
    }
    return body(*driver);
  });
}

using Clock = std::chrono::steady_clock;

inline constexpr uint64_t kCell = 4 * kMiB;

inline double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline SimOptions Options(const SimFolder& folder, const std::string& faults = "") {
  SimOptions options;
  options.directory = folder.cards();
  options.device_bytes = kGiB;
  options.faults = faults;
  return options;
}

inline CUmemAllocationProp MemoryOf(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

inline CUresult SetAccess(const Driver& cu, CUdeviceptr address, int device) {
  CUmemAccessDesc wanted{};
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  wanted.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return cu.cuMemSetAccess(address, kCell, &wanted, 1);
}

// A mapped cell of device 0, or 0 where a call failed.
inline CUdeviceptr MappedCell(const Driver& cu) {
  const CUmemAllocationProp properties = MemoryOf(0);
  CUmemGenericAllocationHandle handle;
  CUdeviceptr address;
  const bool made = cu.cuMemCreate(&handle, kCell, &properties, 0) == CUDA_SUCCESS &&
                    cu.cuMemAddressReserve(&address, kCell, 0, 0, 0) == CUDA_SUCCESS &&
                    cu.cuMemMap(address, kCell, 0, handle, 0) == CUDA_SUCCESS &&
                    SetAccess(cu, address, 0) == CUDA_SUCCESS && cu.cuMemRelease(handle) == CUDA_SUCCESS;
  return made ? address : 0;
}

inline uint64_t FreeBytes(const Driver& cu) {
  size_t free_bytes = 0, total_bytes = 0;
  return cu.cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_SUCCESS ? free_bytes : 0;
}

inline char* HostBytes(uint64_t bytes) {
  return static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

}  // namespace residency

#endif  // RESIDENCY_TESTS_SIM_CHILD_H_

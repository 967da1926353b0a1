// SPDX-License-Identifier: Apache-2.0
//
// What the conformance cases stand on: one opened driver with a current context, short names for the
// sequences of calls that every case needs, and other processes to play with. The driver is the one that
// RESIDENCY_CONFORMANCE_DRIVER names: sim (where nothing is set) or cuda, so that both are held to the
// same sentences.
#ifndef RESIDENCY_TESTS_CONFORMANCE_RIG_H_
#define RESIDENCY_TESTS_CONFORMANCE_RIG_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "mechanisms/driver.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/units.h"

// Compares by name, so that a failure can be read.
#define CHECK_CU(expression, expected) CHECK(residency::CuName(expression) == #expected)
// Ends the case (or the other process) where a call that has to succeed does not.
#define REQUIRE_CU(expression) residency::Must(expression, #expression)

namespace residency {

using CuHandle = CUmemGenericAllocationHandle;

// Whether the suite runs on the simulated driver.
bool OnSim();

// The table, opened on first use with device 0's primary context current on the first thread that asks.
const Driver& Cu();

// The driver's name of a result, and its number where it has none.
std::string CuName(CUresult result);
// Throws std::runtime_error with both arguments unless `result` is CUDA_SUCCESS.
void Must(CUresult result, const char* what);

// Kernel residency_test_fill(uint64_t address, uint64_t words, uint64_t value) of the current context.
CUfunction FillKernel();
CUresult LaunchFill(CUfunction fill, CUdeviceptr address, uint64_t words, uint64_t value, CUstream stream);

CUmemAllocationProp DeviceMemory();
CuHandle Create(uint64_t bytes);
CUdeviceptr Reserve(uint64_t bytes);
CUresult SetAccess(CUdeviceptr address, uint64_t bytes, CUmemAccess_flags rights);
void Map(CUdeviceptr address, uint64_t bytes, CuHandle handle,
         CUmemAccess_flags rights = CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
UniqueFd Export(CuHandle handle);
CuHandle Import(const UniqueFd& fd);

// `words` values that differ from each other and from those of another seed.
std::vector<uint64_t> Pattern(uint64_t words, uint64_t seed);
CUresult PutWords(CUdeviceptr address, const std::vector<uint64_t>& words);
std::vector<uint64_t> GetWords(CUdeviceptr address, uint64_t words);

uint64_t FreeBytes();
// Whether the free figure comes to `expected` within five seconds: to the byte on the simulated driver,
// within a few MiB on a real one, which keeps tables of its own.
bool FreeBytesBecome(uint64_t expected);

// Host memory of its own, page-aligned and zero.
class HostMemory {
 public:
  explicit HostMemory(uint64_t bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  uint64_t* words() { return static_cast<uint64_t*>(begin_); }
  char* bytes() { return static_cast<char*>(begin_); }

 private:
  void* begin_;
  uint64_t bytes_;
};

// What another process can be asked to do; see conformance_rig.cc for the arguments.
enum class Ask : uint32_t {
  kOpen,        // open the driver and a context
  kMake,        // bytes, seed: create, map, fill with Pattern, export: answers a descriptor and keeps the rest
  kMapIn,       // descriptor, bytes, rights: import, map, close the descriptor: answers the address
  kCountWrong,  // address, words, seed: how many words differ from Pattern
  kPut,         // address, words, seed: copies Pattern there
  kFill,        // address, words, value: by a kernel; answers the result of synchronising
  kResults,     // answers results of calls made now, see ResultsNow
  kLetGo,       // unmap and release everything
  kKeep,        // descriptor: keep it, without a driver
  kGiveBack,    // answers the descriptor kept
};

struct Answer {
  CUresult result = CUDA_SUCCESS;
  std::vector<uint64_t> values;
  UniqueFd fd;
};

// Another process: this binary, executed anew.
class OtherProcess {
 public:
  OtherProcess();
  ~OtherProcess();  // kills it
  Answer Call(Ask ask, std::vector<uint64_t> arguments = {}, int fd = -1);
  pid_t pid() const { return pid_; }
  // kill -9, and waits until it is gone.
  void Kill();

 private:
  pid_t pid_ = -1;
  UniqueFd socket_;
};

// Results of a fixed list of calls made now, for looking at a context that was made unusable:
// cuStreamSynchronize, cuMemGetInfo, cuMemcpyHtoDAsync, cuEventCreate, cuStreamCreate, cuCtxGetCurrent,
// cuMemCreate, cuMemUnmap, cuMemRelease, cuMemAddressFree (the last three of what the process holds).
std::vector<uint64_t> ResultsNow();

// The life of an OtherProcess.
int RunOtherProcess(int socket);

// One packet with at most one descriptor.
void SendPacket(int socket, const std::vector<uint64_t>& words, int fd = -1);
// Empty words when the other end is closed.
std::vector<uint64_t> ReceivePacket(int socket, UniqueFd* fd);

}  // namespace residency

#endif  // RESIDENCY_TESTS_CONFORMANCE_RIG_H_

// SPDX-License-Identifier: Apache-2.0
//
// The other side of OtherProcess: does what it is asked, one packet at a time, until its socket closes.
#include <optional>
#include <utility>

#include "tests/conformance_rig.h"

namespace residency {
namespace {

// What the process holds of the device.
struct Held {
  CUdeviceptr address;
  uint64_t bytes;
  CuHandle handle;
};
std::vector<Held> held;

struct Request {
  std::vector<uint64_t> arguments;
  UniqueFd fd;
};

Answer Make(uint64_t bytes, uint64_t seed) {
  const CuHandle handle = Create(bytes);
  const CUdeviceptr address = Reserve(bytes);
  Map(address, bytes, handle);
  held.push_back({address, bytes, handle});
  const CUresult result = PutWords(address, Pattern(bytes / 8, seed));
  return {result, {}, Export(handle)};
}

Answer MapIn(const UniqueFd& fd, uint64_t bytes, CUmemAccess_flags rights) {
  const CuHandle handle = Import(fd);
  const CUdeviceptr address = Reserve(bytes);
  Map(address, bytes, handle, rights);
  held.push_back({address, bytes, handle});
  return {CUDA_SUCCESS, {address}, {}};
}

Answer CountWrong(CUdeviceptr address, uint64_t words, uint64_t seed) {
  const std::vector<uint64_t> expected = Pattern(words, seed);
  const std::vector<uint64_t> read = GetWords(address, words);
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < words; ++i) wrong += read[i] != expected[i];
  return {CUDA_SUCCESS, {wrong}, {}};
}

Answer Fill(CUdeviceptr address, uint64_t words, uint64_t value) {
  const CUresult launched = LaunchFill(FillKernel(), address, words, value, nullptr);
  return {launched != CUDA_SUCCESS ? launched : Cu().cuStreamSynchronize(nullptr), {}, {}};
}

Answer LetGo() {
  for (const Held& piece : held) {
    REQUIRE_CU(Cu().cuMemUnmap(piece.address, piece.bytes));
    REQUIRE_CU(Cu().cuMemAddressFree(piece.address, piece.bytes));
    REQUIRE_CU(Cu().cuMemRelease(piece.handle));
  }
  held.clear();
  return {};
}

Answer Do(Request request, UniqueFd& kept) {
  const std::vector<uint64_t>& a = request.arguments;
  switch (static_cast<Ask>(a[0])) {
    case Ask::kOpen:
      Cu();
      return {};
    case Ask::kMake:
      return Make(a[1], a[2]);
    case Ask::kMapIn:
      return MapIn(request.fd, a[1], static_cast<CUmemAccess_flags>(a[2]));
    case Ask::kCountWrong:
      return CountWrong(a[1], a[2], a[3]);
    case Ask::kPut:
      return {PutWords(a[1], Pattern(a[2], a[3])), {}, {}};
    case Ask::kFill:
      return Fill(a[1], a[2], a[3]);
    case Ask::kResults:
      return {CUDA_SUCCESS, ResultsNow(), {}};
    case Ask::kLetGo:
      return LetGo();
    case Ask::kKeep:
      kept = std::move(request.fd);
      return {};
    case Ask::kGiveBack:
      return {CUDA_SUCCESS, {}, std::move(kept)};
  }
  return {CUDA_ERROR_INVALID_VALUE, {}, {}};
}

}  // namespace

std::vector<uint64_t> ResultsNow() {
  const Held piece = held.at(0);
  const CUmemAllocationProp properties = DeviceMemory();
  const uint64_t word = 1;
  size_t free_bytes, total_bytes;
  CUevent event;
  CUstream stream;
  CUcontext context;
  CuHandle handle;
  return {
      Cu().cuStreamSynchronize(nullptr),
      Cu().cuMemGetInfo(&free_bytes, &total_bytes),
      Cu().cuMemcpyHtoDAsync(piece.address, &word, sizeof(word), nullptr),
      Cu().cuEventCreate(&event, 0),
      Cu().cuStreamCreate(&stream, 0),
      Cu().cuCtxGetCurrent(&context),
      Cu().cuMemCreate(&handle, piece.bytes, &properties, 0),
      Cu().cuMemUnmap(piece.address, piece.bytes),
      Cu().cuMemRelease(piece.handle),
      Cu().cuMemAddressFree(piece.address, piece.bytes),
  };
}

int RunOtherProcess(int socket) {
  UniqueFd kept;
  for (;;) {
    Request request;
    request.arguments = ReceivePacket(socket, &request.fd);
    if (request.arguments.empty()) return 0;
    Answer answer = Do(std::move(request), kept);
    answer.values.insert(answer.values.begin(), static_cast<uint64_t>(answer.result));
    SendPacket(socket, answer.values, answer.fd.get());
  }
}

}  // namespace residency

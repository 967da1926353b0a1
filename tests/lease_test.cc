// SPDX-License-Identifier: Apache-2.0
#include "client/lease.h"

#include <sys/socket.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "client/reader.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"
#include "tests/fake_daemon.h"

namespace residency {
namespace {

constexpr uint64_t kLease = 7;
using Indices = std::vector<uint32_t>;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

// The leases that the client wants to end, as its RPC tells the daemon, which does what it does then on a thread of its
// own: the test's thread is waiting in ~Lease.
class Releases {
 public:
  explicit Releases(FakeDaemon& daemon) : daemon_(daemon) {}
  ~Releases() {
    for (std::thread& answer : answers_) answer.join();
  }
  ReleaseLeaseFunction Function() {
    return [this](uint64_t lease_id) {
      answers_.emplace_back([this, lease_id] {
        daemon_.Release(lease_id, on_released);
        const std::lock_guard<std::mutex> lock(mutex_);
        ids_.push_back(lease_id);
        changed_.notify_all();
      });
    };
  }
  // Until the daemon has ended so many leases.
  bool Await(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, absl::ToChronoTime(Soon()), [&] { return ids_.size() >= count; });
  }
  std::vector<uint64_t> ids() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ids_;
  }

  std::function<void()> on_released;  // what the daemon does once the client has let go

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> ids_;
  std::vector<std::thread> answers_;  // grown by the reader thread, joined when that is gone
  FakeDaemon& daemon_;
};

// A client with its reader, and an Activate of it under way.
struct Rig {
  explicit Rig(Driver table = TestDriver()) : driver(table) { Begin(); }
  void Begin() {
    auto started = Reader::Start(daemon.Connect().channel, driver, releases.Function());
    REQUIRE(started.ok());
    reader = *std::move(started);
    reader->BeginActivation();
  }
  absl::StatusOr<Lease> Take(uint64_t generation = 1, absl::Time deadline = Soon()) {
    auto record = reader->Claim(kLease, generation, deadline);
    if (!record.ok()) return record.status();
    return Lease::Make(*reader, **record, FakeTable());
  }
  // A lease whose first generation is mapped.
  Lease Mapped() {
    daemon.Grant(kLease);
    daemon.SendGeneration(kLease, 1);
    REQUIRE(daemon.Receive().has_cells_mapped());
    auto lease = Take();
    REQUIRE(lease.ok());
    return *std::move(lease);
  }

  const Driver driver;
  FakeDaemon daemon;
  Releases releases{daemon};
  std::unique_ptr<Reader> reader;
};

bool ReadsGeneration(Lease& lease, const LeaseTensor& tensor, uint64_t generation) {
  std::vector<uint8_t> bytes(tensor.bytes);
  if (!lease.ReadTensor(tensor, bytes.data()).ok()) return false;
  for (uint64_t i = 0; i < tensor.bytes; ++i) {
    if (bytes[i] != FakeByte(generation, tensor.device_offset + i)) return false;
  }
  return true;
}

// A kernel that runs until the test says so.
std::atomic<bool> kernel_may_end{false};

class LongKernel {
 public:
  explicit LongKernel(const Device& device) : driver_(device.driver()) {
    kernel_may_end = false;
    RegisterSimKernel("until_told", {}, [](const SimMemory&, void**) -> CUresult {
      kernel_may_end.wait(false);
      return CUDA_SUCCESS;
    });
    REQUIRE(device.MakeCurrent().ok());
    REQUIRE(driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    REQUIRE(driver_.cuModuleLoadData(&module_, "") == CUDA_SUCCESS);
    CUfunction function = nullptr;
    REQUIRE(driver_.cuModuleGetFunction(&function, module_, "until_told") == CUDA_SUCCESS);
    REQUIRE(driver_.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr) == CUDA_SUCCESS);
  }
  ~LongKernel() {
    End();
    driver_.cuStreamDestroy(stream_);
    driver_.cuModuleUnload(module_);
  }
  void End() {
    kernel_may_end = true;
    kernel_may_end.notify_all();
  }
  const CUstream& stream() const { return stream_; }

 private:
  const Driver& driver_;
  CUstream stream_ = nullptr;
  CUmodule module_ = nullptr;
};

std::atomic<int> maps_until_failure{0};
decltype(Driver::cuMemMap) real_map = nullptr;

CUresult FailingMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
  if (--maps_until_failure == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  return real_map(address, bytes, offset, handle, flags);
}

}  // namespace

TEST_CASE("A lease that is granted without cells can be claimed, also by who waits for the grant already") {
  Rig rig;
  absl::StatusOr<LeaseRecord*> claimed = absl::UnknownError("");
  // The reader opens a device before the lease is there, which takes longer than to begin to wait.
  std::thread waiting([&] { claimed = rig.reader->Claim(kLease, 0, Soon()); });
  rig.daemon.Grant(kLease);
  waiting.join();
  REQUIRE(claimed.ok());
  CHECK((*claimed)->generation == 0);
  CHECK(rig.reader->AwaitGeneration(kLease, 1, absl::Now()).code() == absl::StatusCode::kDeadlineExceeded);
  rig.daemon.SendGeneration(kLease, 1);
  CHECK(rig.reader->AwaitGeneration(kLease, 1, Soon()).ok());
  rig.reader->Retire(kLease);
}

TEST_CASE("a session begins with a Hello that carries the client's name and its own pidfd") {
  FakeDaemon daemon;
  const Session session = daemon.Connect("a name with \x01 in it");
  CHECK(daemon.hello()->protocol_version() == 1);
  CHECK(daemon.hello()->client_name() == "a name with ? in it");
  CHECK(session.terms.driver == "sim");
  CHECK(session.terms.session_id == "0123456789abcdef");
}

TEST_CASE("a daemon that refuses the session is quoted, and one that is silent is named so") {
  int sockets[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
  PageChannel daemon{UniqueFd(sockets[0])};
  SECTION("refused") {
    v1::DaemonPacket packet;
    packet.mutable_refused()->set_code("FAILED_PRECONDITION");
    packet.mutable_refused()->set_reason("PROTOCOL_VERSION");
    packet.mutable_refused()->set_message("too old");
    REQUIRE(daemon.Send(packet.SerializeAsString()).ok());
    const auto session = BeginSession(UniqueFd(sockets[1]), "test", Soon());
    CHECK(session.status().code() == absl::StatusCode::kFailedPrecondition);
    CHECK(ReasonOf(session.status()) == "PROTOCOL_VERSION");
  }
  SECTION("silent") {
    const auto session = BeginSession(UniqueFd(sockets[1]), "test", absl::Now() + absl::Milliseconds(50));
    CHECK(session.status().code() == absl::StatusCode::kDeadlineExceeded);
    CHECK(ReasonOf(session.status()) == "NO_ANSWER");
  }
}

TEST_CASE("a lease whose cells come in several packets is there with the last, and each packet is acknowledged") {
  Rig rig;
  rig.daemon.Grant(kLease);
  rig.daemon.SendCells(kLease, 1, 0, 3, /*last=*/false);
  const v1::ClientPacket first = rig.daemon.Receive();
  REQUIRE(first.has_cells_mapped());
  CHECK(Indices(first.cells_mapped().cells().begin(), first.cells_mapped().cells().end()) == Indices{0, 1, 2});
  CHECK(ReasonOf(rig.Take(1, absl::Now()).status()) == "DEADLINE");
  rig.daemon.SendCells(kLease, 1, 3, 1, /*last=*/true);
  CHECK(rig.daemon.Receive().cells_mapped().generation() == 1);
  auto lease = rig.Take();
  REQUIRE(lease.ok());
  CHECK(lease->generation() == 1);
  CHECK(lease->model() == "model");
  CHECK(lease->device_uuid() == rig.daemon.device_uuid());
  CHECK(rig.daemon.word(kLease).Read() == UseWordState{});
}

TEST_CASE("a claim waits for cells that come after it") {
  Rig rig;
  std::optional<absl::StatusOr<Lease>> lease;
  std::thread claimer([&] { lease = rig.Take(); });
  rig.daemon.Grant(kLease);
  rig.daemon.SendGeneration(kLease, 1);
  claimer.join();
  REQUIRE(lease->ok());
  CHECK(ReadsGeneration(**lease, (*lease)->tensors()[0], 1));
}

TEST_CASE("tensors are found by name, or by component and name where two share it, and hold the daemon's bytes") {
  Rig rig;
  Lease lease = rig.Mapped();
  REQUIRE(lease.tensors().size() == 3);
  const LeaseTensor* bias = lease.Find("bias");
  REQUIRE(bias != nullptr);
  CHECK(bias == lease.Find("unet/bias"));
  CHECK(bias->dtype == "U8");
  CHECK(bias->shape == std::vector<uint64_t>{8192});
  CHECK(bias->address - lease.Find("unet/weight")->address == kFakeCellBytes - 4096);
  CHECK(lease.Find("weight") == nullptr);
  CHECK(lease.Find("vae/weight")->bytes == 200);
  CHECK(lease.Find("no such tensor") == nullptr);
  for (const LeaseTensor& tensor : lease.tensors()) CHECK(ReadsGeneration(lease, tensor, 1));
  std::vector<uint8_t> part(100);
  REQUIRE(lease.Read(*bias, 8092, part).ok());
  CHECK(part[99] == FakeByte(1, bias->device_offset + 8191));
  CHECK(lease.Read(*bias, 8093, part).code() == absl::StatusCode::kOutOfRange);
}

TEST_CASE("a table of another layout than the lease's is refused, and the lease is released") {
  Rig rig;
  rig.daemon.Grant(kLease);
  rig.daemon.SendGeneration(kLease, 1);
  auto record = rig.reader->Claim(kLease, 1, Soon());
  REQUIRE(record.ok());
  TensorTable table = FakeTable();
  table.layout_digest += 1;
  const auto lease = Lease::Make(*rig.reader, **record, table);
  CHECK(lease.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK(ReasonOf(lease.status()) == "LAYOUT_MISMATCH");
  REQUIRE(rig.releases.Await(1));
  CHECK(rig.releases.ids() == std::vector<uint64_t>{kLease});
}

TEST_CASE("cells that are revoked are named as released, and the next generation lies under the same addresses") {
  Rig rig;
  Lease lease = rig.Mapped();
  const CUdeviceptr address = lease.tensors()[0].address;
  REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
  rig.daemon.Revoke(kLease, 1);
  CHECK(rig.daemon.ReceiveReleased(kLease, 1, kFakeCells) == Indices{3, 2, 1, 0});
  CHECK_FALSE(rig.daemon.device().IsBacked(address));
  const auto late = lease.Use({.deadline = absl::Now() + absl::Milliseconds(20)});
  CHECK(late.status().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(ReasonOf(late.status()) == "DEADLINE");

  bool entered = false;
  std::thread user([&] { entered = lease.Use().ok(); });
  rig.daemon.SendGeneration(kLease, 2);
  user.join();
  CHECK(entered);
  CHECK(lease.generation() == 2);
  CHECK(lease.tensors()[0].address == address);
  CHECK(ReadsGeneration(lease, lease.tensors()[1], 2));
}

TEST_CASE("a use keeps its cells until the outermost one of its thread ends") {
  Rig rig;
  Lease lease = rig.Mapped();
  std::optional<Use> outer = *lease.Use();
  REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
  rig.daemon.Revoke(kLease, 1);
  CHECK(rig.daemon.HearsNothing());
  CHECK(ReadsGeneration(lease, lease.tensors()[0], 1));  // a use inside the use, of a closed word
  CHECK(rig.daemon.HearsNothing());
  outer.reset();
  CHECK(rig.daemon.ReceiveReleased(kLease, 1, kFakeCells).size() == kFakeCells);
}

TEST_CASE("device work of a use that has ended is waited for before its cells go") {
  Rig rig;
  Lease lease = rig.Mapped();
  LongKernel kernel(rig.daemon.device());
  SECTION("on the streams that the use named") { REQUIRE(lease.Use({.streams = {&kernel.stream(), 1}}).ok()); }
  SECTION("on any stream where it named none") { REQUIRE(lease.Use().ok()); }
  REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
  rig.daemon.Revoke(kLease, 1);
  CHECK(rig.daemon.HearsNothing());
  kernel.End();
  CHECK(rig.daemon.ReceiveReleased(kLease, 1, kFakeCells).size() == kFakeCells);
}

TEST_CASE("a stream that was forgotten is not waited for") {
  Rig rig;
  Lease lease = rig.Mapped();
  LongKernel kernel(rig.daemon.device());
  REQUIRE(lease.Use({.streams = {&kernel.stream(), 1}}).ok());
  lease.Forget(kernel.stream());
  REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
  rig.daemon.Revoke(kLease, 1);
  CHECK(rig.daemon.ReceiveReleased(kLease, 1, kFakeCells).size() == kFakeCells);
}

TEST_CASE("a revocation that was taken back in time changes nothing") {
  Rig rig;
  Lease lease = rig.Mapped();
  {
    const auto use = lease.Use();
    REQUIRE(use.ok());
    REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
    rig.daemon.Revoke(kLease, 1);
    CHECK(rig.daemon.HearsNothing());
    REQUIRE(rig.daemon.word(kLease).Cancel() == CancelResult::kCancelled);
  }
  CHECK(rig.daemon.HearsNothing());
  CHECK(ReadsGeneration(lease, lease.tensors()[2], 1));
}

TEST_CASE("cells of a generation that was given back are acknowledged and given back too") {
  Rig rig;
  rig.daemon.Grant(kLease);
  rig.daemon.SendCells(kLease, 1, 0, 2, /*last=*/false);
  rig.daemon.Revoke(kLease, 1);
  rig.daemon.SendCells(kLease, 1, 2, 2, /*last=*/true);
  CHECK(rig.daemon.Receive().has_cells_mapped());
  CHECK(rig.daemon.ReceiveReleased(kLease, 1, 2) == Indices{1, 0});
  CHECK(rig.daemon.Receive().has_cells_mapped());
  CHECK(rig.daemon.ReceiveReleased(kLease, 1, 2) == Indices{2, 3});
  CHECK(rig.daemon.word(kLease).Read().taken);
}

TEST_CASE("a lease that goes is revoked by the daemon, and nothing of it is left in the process when it ends") {
  Rig rig;
  const uint64_t free_before = rig.daemon.device().Memory()->free_bytes;
  std::optional<Lease> lease = rig.Mapped();
  CHECK(rig.daemon.device().Memory()->free_bytes == free_before - kFakeCells * kFakeCellBytes);
  uint64_t free_at_release = 0;
  rig.releases.on_released = [&] { free_at_release = rig.daemon.device().Memory()->free_bytes; };
  lease.reset();
  REQUIRE(rig.releases.Await(1));
  CHECK(rig.releases.ids() == std::vector<uint64_t>{kLease});
  CHECK(free_at_release == free_before);
}

TEST_CASE("a lease that is destroyed inside a use of itself goes when the use ends") {
  Rig rig;
  std::optional<Lease> lease = rig.Mapped();
  std::optional<Use> use = *lease->Use();
  const CUdeviceptr address = lease->tensors()[0].address;
  lease.reset();
  CHECK(rig.releases.ids().empty());
  CHECK(rig.daemon.device().IsBacked(address));
  use.reset();
  REQUIRE(rig.releases.Await(1));
  CHECK_FALSE(rig.daemon.device().IsBacked(address));
}

TEST_CASE("two leases on one model share one grant, which the last of them ends") {
  Rig rig;
  std::optional<Lease> first = rig.Mapped();
  std::optional<Lease> second = *rig.Take();
  CHECK(first->tensors()[0].address == second->tensors()[0].address);
  first.reset();
  CHECK(rig.releases.ids().empty());
  CHECK(ReadsGeneration(*second, second->tensors()[0], 1));
  second.reset();
  REQUIRE(rig.releases.Await(1));
  CHECK(rig.releases.ids() == std::vector<uint64_t>{kLease});
}

TEST_CASE("a lease that nobody claimed is ended once no activation is under way") {
  Rig rig;
  rig.daemon.Grant(kLease);
  rig.daemon.SendGeneration(kLease, 1);
  REQUIRE(rig.daemon.Receive().has_cells_mapped());
  CHECK(rig.releases.ids().empty());
  rig.reader->EndActivation();
  REQUIRE(rig.releases.Await(1));
  CHECK(rig.releases.ids() == std::vector<uint64_t>{kLease});
}

TEST_CASE("a lease that the daemon ends refuses its users with the reason and is not released again") {
  Rig rig;
  std::optional<Lease> lease = rig.Mapped();
  REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
  absl::Status refused;
  std::thread user([&] { refused = lease->Use().status(); });
  rig.daemon.EndLease(kLease, "UNLOADED");
  user.join();
  CHECK(refused.code() == absl::StatusCode::kAborted);
  CHECK(ReasonOf(refused) == "UNLOADED");
  CHECK(ReasonOf(rig.Take().status()) == "UNLOADED");
  lease.reset();
  CHECK(rig.releases.ids().empty());
}

TEST_CASE("when the daemon hangs up users are refused, and what is mapped stays readable until the lease goes") {
  Rig rig;
  std::optional<Lease> lease = rig.Mapped();
  const LeaseTensor tensor = lease->tensors()[0];
  rig.daemon.HangUp();
  CHECK(ReasonOf(rig.reader->Claim(kLease + 1, 1, Soon()).status()) == "DAEMON_GONE");
  const auto use = lease->Use();
  CHECK(use.status().code() == absl::StatusCode::kUnavailable);
  CHECK(ReasonOf(use.status()) == "DAEMON_GONE");
  std::vector<uint8_t> bytes(tensor.bytes);
  auto stream = rig.daemon.device().CreateStream();
  REQUIRE(rig.daemon.device().CopyToHost(bytes.data(), tensor.address, bytes.size(), *stream).ok());
  REQUIRE(rig.daemon.device().Synchronize(*stream).ok());
  CHECK(bytes[17] == FakeByte(1, tensor.device_offset + 17));
  lease.reset();
  CHECK_FALSE(rig.daemon.device().IsBacked(tensor.address));
  CHECK(rig.releases.ids().empty());
}

TEST_CASE("a cell that cannot be mapped fails the lease, and the cells before it are taken off again") {
  real_map = TestDriver().cuMemMap;
  Driver failing = TestDriver();
  failing.cuMemMap = FailingMap;
  Rig rig(failing);
  const uint64_t free_before = rig.daemon.device().Memory()->free_bytes;
  maps_until_failure = 3;
  rig.daemon.Grant(kLease);
  rig.daemon.SendGeneration(kLease, 1);
  const v1::ClientPacket failed = rig.daemon.Receive();
  REQUIRE(failed.has_lease_failed());
  CHECK(failed.lease_failed().code() == "RESOURCE_EXHAUSTED");
  CHECK(failed.lease_failed().reason() == "GPU_MEMORY");
  CHECK(failed.lease_failed().message().find("cell 2 of model") != std::string::npos);
  CHECK(rig.daemon.Receive().has_cells_mapped());
  CHECK(ReasonOf(rig.Take().status()) == "GPU_MEMORY");
  CHECK(rig.daemon.device().Memory()->free_bytes == free_before);
}

TEST_CASE("a lease on a GPU that this process does not see fails and names it") {
  Rig rig;
  rig.daemon.Grant(kLease, "GPU-00000000-0000-0000-0000-000000000000");
  const v1::ClientPacket failed = rig.daemon.Receive();
  REQUIRE(failed.has_lease_failed());
  CHECK(failed.lease_failed().reason() == "NO_SUCH_DEVICE");
  CHECK(failed.lease_failed().message().find("GPU-00000000") != std::string::npos);
  CHECK(ReasonOf(rig.Take().status()) == "NO_SUCH_DEVICE");
}

TEST_CASE("cells outside the span or over others are refused as a broken lease, not mapped") {
  Rig rig;
  rig.daemon.Grant(kLease);
  rig.daemon.SendCells(kLease, 1, kFakeCells, 1, /*last=*/true);
  const v1::ClientPacket failed = rig.daemon.Receive();
  REQUIRE(failed.has_lease_failed());
  CHECK(failed.lease_failed().reason() == "PROTOCOL");
}

TEST_CASE("users of many threads only ever see whole generations while the daemon takes and gives") {
  Rig rig;
  Lease lease = rig.Mapped();
  constexpr uint64_t kGenerations = 30;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> users;
  for (int i = 0; i < 4; ++i) {
    users.emplace_back([&, tensor = lease.tensors()[static_cast<size_t>(i) % 3]] {
      std::vector<uint8_t> bytes(tensor.bytes);
      while (!done) {
        const auto use = lease.Use();
        const uint64_t generation = lease.generation();
        if (!use.ok() || !lease.ReadTensor(tensor, bytes.data()).ok()) ++wrong;
        if (bytes.front() != FakeByte(generation, tensor.device_offset)) ++wrong;
        if (bytes.back() != FakeByte(generation, tensor.device_offset + tensor.bytes - 1)) ++wrong;
        if (lease.generation() != generation) ++wrong;
      }
    });
  }
  for (uint64_t generation = 1; generation < kGenerations; ++generation) {
    REQUIRE(rig.daemon.word(kLease).Close() == CloseResult::kClosed);
    rig.daemon.Revoke(kLease, generation);
    CHECK(rig.daemon.ReceiveReleased(kLease, generation, kFakeCells).size() == kFakeCells);
    rig.daemon.SendGeneration(kLease, generation + 1);
    REQUIRE(rig.daemon.Receive().has_cells_mapped());
  }
  done = true;
  for (std::thread& user : users) user.join();
  CHECK(wrong == 0);
}

}  // namespace residency

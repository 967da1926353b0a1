// SPDX-License-Identifier: Apache-2.0
//
// In which order an arena makes its driver calls while cells are being filled, with and without arenas that give
// theirs.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

#include "mechanisms/refusal.h"
#include "tests/arena_rig.h"

namespace residency {
namespace {

// The calls that make, move and fill cells, in their order: "create", "release", "unmap", "copy", "digest",
// "wait".
std::vector<std::string> calls;
uint64_t mapped_bytes = 0;
uint64_t most_mapped_bytes = 0;
int waits_until_failure = 0;  // 0: none fails

Driver LoggingDriver() {
  Driver driver = TestDriver();
  driver.cuMemCreate = [](CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                          unsigned long long flags) {
    calls.push_back("create");
    return TestDriver().cuMemCreate(handle, bytes, properties, flags);
  };
  driver.cuMemRelease = [](CUmemGenericAllocationHandle handle) {
    calls.push_back("release");
    return TestDriver().cuMemRelease(handle);
  };
  driver.cuMemMap = [](CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                       unsigned long long flags) {
    mapped_bytes += bytes;
    most_mapped_bytes = std::max(most_mapped_bytes, mapped_bytes);
    return TestDriver().cuMemMap(address, bytes, offset, handle, flags);
  };
  driver.cuMemUnmap = [](CUdeviceptr address, size_t bytes) {
    calls.push_back("unmap");
    mapped_bytes -= bytes;
    return TestDriver().cuMemUnmap(address, bytes);
  };
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr destination, const void* source, size_t bytes, CUstream stream) {
    // The digester's items are few bytes.
    if (bytes >= kMiB) calls.push_back("copy");
    return TestDriver().cuMemcpyHtoDAsync(destination, source, bytes, stream);
  };
  driver.cuStreamSynchronize = [](CUstream stream) {
    calls.push_back("wait");
    if (waits_until_failure > 0 && --waits_until_failure == 0) return CUDA_ERROR_INVALID_VALUE;
    return TestDriver().cuStreamSynchronize(stream);
  };
  driver.cuLaunchKernel = [](CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                             void** parameters, void** extra) {
    calls.push_back("digest");
    return TestDriver().cuLaunchKernel(kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                                       parameters, extra);
  };
  return driver;
}

// Whatever asks the driver which cell lies where releases the handle that it was told; that is after the last copy.
void ForgetAfterCopies() { calls.resize(calls.rend() - std::find(calls.rbegin(), calls.rend(), "copy")); }

size_t Count(const std::string& call) { return static_cast<size_t>(std::count(calls.begin(), calls.end(), call)); }
size_t First(const std::string& call) { return std::find(calls.begin(), calls.end(), call) - calls.begin(); }
size_t Last(const std::string& call) { return calls.rend() - std::find(calls.rbegin(), calls.rend(), call) - 1; }

// Another model of the same card and pool.
struct Second {
  Second(ArenaRig& rig, Layout its_layout)
      : layout(std::move(its_layout)),
        big(layout, 0, 77),
        arena(*Arena::Create(*rig.device, rig.pool, *rig.digester, layout, {.map_ahead_bytes = 4 * kMiB})) {
    for (uint32_t i = 1; i < layout.components.size(); ++i) rest.push_back(TestSource(layout, i, 78 + i));
  }
  std::vector<const Source*> sources() const {
    std::vector<const Source*> sources = {&big};
    for (const TestSource& source : rest) sources.push_back(&source);
    return sources;
  }

  const Layout layout;
  TestSource big;
  std::vector<TestSource> rest;
  std::unique_ptr<Arena> arena;
};

Layout OneComponent(uint64_t bytes) { return *MakeLayout({ComponentOf("all", bytes)}, 4 * kMiB, 2 * kMiB); }

TEST_CASE("Every cell that a fill needs exists before its first byte is copied, and none is released before its last") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  // Idle cells of a size that nobody needs, which have to give way.
  rig.pool.Put(*rig.pool.Take(8 * kMiB));
  calls.clear();
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  ForgetAfterCopies();
  CHECK(Count("create") == 5);
  CHECK(Count("release") == 1);
  CHECK(Last("create") < First("copy"));
  CHECK(Last("release") < First("copy"));
}

TEST_CASE(
    "What was copied is digested in batches while the rest is being copied, and a wrong cell of any batch is found") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver, {.digest_batch_bytes = 4 * kMiB});
  calls.clear();
  const auto report = rig.Realize(AllResident(rig.layout));
  REQUIRE(report.ok());
  // 3 cells of 4 MiB, and the two small ones together.
  CHECK(Count("digest") == 4);
  CHECK(First("digest") < Last("copy"));
  CHECK(report->verified_cells == 5);
  REQUIRE(rig.Realize(NoneResident(rig.layout)).ok());
  rig.small.wrong = 1;
  CHECK(ReasonOf(rig.Realize(AllResident(rig.layout)).status()) == "VERIFY");
}

TEST_CASE("A fill that is not to be verified digests nothing, and says so") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  calls.clear();
  const auto report = rig.arena->Realize(AllResident(rig.layout), rig.sources(), {.verify = false});
  REQUIRE(report.ok());
  CHECK(report->verified_cells == 0);
  CHECK(Count("digest") == 0);
  CHECK(rig.HoldsItsSources(AllResident(rig.layout)));
}

TEST_CASE(
    "Cells are told of in their order once their bytes are there, while others still come, and the last ones never") {
  ArenaRig rig(TestDriver(), {.pieces = {2 * kMiB, 2 * kMiB}, .filled_cells_at_once = 1});
  std::vector<uint32_t> told;
  bool right = true;
  RealizeOptions options;
  options.filled = [&](std::span<const uint32_t> cells) {
    told.insert(told.end(), cells.begin(), cells.end());
    Plan those = NoneResident(rig.layout);
    for (uint32_t cell : cells) those.cells[cell] = CellResidency::kResident;
    right = right && rig.HoldsItsSources(those);
  };
  REQUIRE(rig.arena->Realize(AllResident(rig.layout), rig.sources(), options).ok());
  CHECK(right);
  // 8 pieces, of which the first two are through when the sixth is begun, and four when the last is.
  CHECK(told == std::vector<uint32_t>{0, 1});
  told.clear();
  REQUIRE(rig.Realize(FirstResident(rig.layout)).ok());
  REQUIRE(rig.arena->Realize(AllResident(rig.layout), rig.sources(), options).ok());
  CHECK(told == std::vector<uint32_t>{1});
}

TEST_CASE("A swap takes the giver's cells as it needs them: the first byte flows before the last cell is taken off") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  Second second(rig, TwoComponents());
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  const uint64_t free_bytes = rig.device->Memory()->free_bytes;
  calls.clear();
  Arena* const givers[] = {rig.arena.get()};
  const auto report = second.arena->Realize(AllResident(second.layout), second.sources(), {.givers = givers});
  REQUIRE(report.ok());
  ForgetAfterCopies();
  CHECK(Count("create") == 0);
  CHECK(Count("release") == 0);
  CHECK(First("copy") < Last("unmap"));
  CHECK(rig.arena->MappedCells().empty());
  CHECK(rig.arena->Empty().ok());
  CHECK(rig.arena->Measure().device_bytes == 0);
  CHECK(second.arena->Measure().device_bytes == 16 * kMiB);
  CHECK(second.arena->Verify(second.sources()).value_or(kNotVerified).refilled_cells == 0);
  CHECK(rig.device->Memory()->free_bytes == free_bytes);
}

TEST_CASE("A swap never has more mapped than one of the two, though the pool has cells for all of it") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  {
    Second third(rig, TwoComponents());
    REQUIRE(third.arena->Realize(AllResident(third.layout), third.sources()).ok());
  }
  REQUIRE(rig.pool.idle_bytes() == 16 * kMiB);
  Second second(rig, TwoComponents());
  mapped_bytes = most_mapped_bytes = 16 * kMiB;
  Arena* const givers[] = {rig.arena.get()};
  REQUIRE(second.arena->Realize(AllResident(second.layout), second.sources(), {.givers = givers}).ok());
  CHECK(most_mapped_bytes == 16 * kMiB);
  CHECK(mapped_bytes == 16 * kMiB);
  CHECK(rig.pool.idle_bytes() == 16 * kMiB);
}

// What a client still has of the giver of a swap is let go by another thread, as soon as the free cells are filled.
struct HeldSwap {
  HeldSwap() : rig(driver, {.map_ahead_bytes = 4 * kMiB}), second(rig, TwoComponents()) {
    REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
    held.Hold({2, 3, 4});
    rig.arena->set_held(&held);
    unmapped = 0;
    copied = 0;
  }
  static Driver Counting() {
    Driver driver = TestDriver();
    driver.cuMemUnmap = [](CUdeviceptr address, size_t bytes) {
      unmapped += bytes;
      return TestDriver().cuMemUnmap(address, bytes);
    };
    driver.cuMemcpyHtoDAsync = [](CUdeviceptr destination, const void* source, size_t bytes, CUstream stream) {
      if (bytes >= kMiB) {
        const std::lock_guard<std::mutex> lock(mutex);
        copied += bytes;
        changed.notify_all();
      }
      return TestDriver().cuMemcpyHtoDAsync(destination, source, bytes, stream);
    };
    return driver;
  }
  // Until so many bytes have been told to be copied.
  static void AwaitCopied(uint64_t bytes) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(60), [bytes] { return copied >= bytes; });
  }
  absl::Status Run(std::stop_token stop = {}) {
    Arena* const givers[] = {rig.arena.get()};
    return second.arena->Realize(AllResident(second.layout), second.sources(), {.stop = stop, .givers = givers})
        .status();
  }

  static inline std::atomic<uint64_t> unmapped = 0;
  static inline std::mutex mutex;
  static inline std::condition_variable changed;
  static inline uint64_t copied = 0;  // guarded by mutex
  const Driver driver = Counting();
  ArenaRig rig;
  Second second;
  HeldCells held;
};

TEST_CASE("A swap fills the cells that clients have let go, and waits for the others where it needs them") {
  HeldSwap swap;
  uint64_t unmapped_before_bytes = 0;
  std::thread client([&] {
    HeldSwap::AwaitCopied(8 * kMiB);
    unmapped_before_bytes = HeldSwap::unmapped;
    swap.held.LetGo({2});
    HeldSwap::AwaitCopied(12 * kMiB);
    swap.held.LetGo({3, 4});
  });
  const absl::Status status = swap.Run();
  client.join();
  CHECK(status.ok());
  CHECK(unmapped_before_bytes == 8 * kMiB);
  CHECK(swap.rig.arena->MappedCells().empty());
  CHECK(swap.second.arena->Verify(swap.second.sources()).value_or(kNotVerified).refilled_cells == 0);
  CHECK(swap.second.arena->Measure().device_bytes == 16 * kMiB);
}

TEST_CASE("A plan that brings no cells waits all the same for the clients of those that give way to it") {
  HeldSwap swap;
  std::stop_source stop;
  stop.request_stop();
  Arena* const givers[] = {swap.rig.arena.get()};
  const auto report = swap.second.arena->Realize(NoneResident(swap.second.layout), swap.second.sources(),
                                                 {.stop = stop.get_token(), .givers = givers});
  CHECK(ReasonOf(report.status()) == "CANCELLED");
  CHECK(swap.rig.arena->MappedCells() == std::vector<uint32_t>{2, 3, 4});
}

TEST_CASE("A swap whose victim a client does not let go stops when it is told to, and both are as before") {
  HeldSwap swap;
  std::stop_source stop;
  std::thread client([&] {
    HeldSwap::AwaitCopied(8 * kMiB);
    stop.request_stop();
  });
  const absl::Status status = swap.Run(stop.get_token());
  client.join();
  CHECK(ReasonOf(status) == "CANCELLED");
  CHECK(swap.second.arena->MappedCells().empty());
  CHECK(swap.rig.arena->Return(AllResident(swap.rig.layout), swap.rig.sources()).ok());
  CHECK(swap.rig.HoldsItsSources(AllResident(swap.rig.layout)));
}

TEST_CASE("What is brought back is given up when it is told to, and broken then") {
  ArenaRig rig;
  const Plan all = AllResident(rig.layout);
  REQUIRE(rig.Realize(all).ok());
  REQUIRE(rig.arena->Empty().ok());
  std::stop_source stop;
  stop.request_stop();
  CHECK(ReasonOf(rig.arena->Return(all, rig.sources(), stop.get_token())) == "CANCELLED");
  CHECK(rig.arena->broken());
}

TEST_CASE("Idle cells that a giver's make superfluous give way to those that are missing") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());  // 3 of 4 MiB, 2 of 2 MiB
  std::vector<Cell> idle;
  for (int i = 0; i < 2; ++i) idle.push_back(*rig.pool.Take(2 * kMiB));
  for (Cell& cell : idle) rig.pool.Put(std::move(cell));
  const uint64_t free_bytes = rig.device->Memory()->free_bytes;
  Second second(rig, *MakeLayout({ComponentOf("big", 16 * kMiB), ComponentOf("a", 100), ComponentOf("b", 100)},
                                 4 * kMiB, 2 * kMiB));
  calls.clear();
  Arena* const givers[] = {rig.arena.get()};
  REQUIRE(second.arena->Realize(AllResident(second.layout), second.sources(), {.givers = givers}).ok());
  ForgetAfterCopies();
  CHECK(Count("create") == 1);
  CHECK(Count("release") == 2);
  CHECK(Last("release") < First("create"));
  CHECK(rig.device->Memory()->free_bytes == free_bytes);
}

TEST_CASE("Where nobody knows whether a refill is through, it is waited for before anything is digested") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  const uint64_t junk = 1;
  const auto stream = *rig.device->CreateStream();
  REQUIRE(rig.device->CopyToDevice(rig.arena->address(), &junk, sizeof(junk), stream).ok());
  REQUIRE(rig.device->Synchronize(stream).ok());
  calls.clear();
  waits_until_failure = 2;  // the digests', the refill's
  CHECK_FALSE(rig.arena->Verify(rig.sources()).ok());
  CHECK(waits_until_failure == 0);
  const std::vector<std::string> after(calls.begin() + Last("copy"), calls.end());
  CHECK(after == std::vector<std::string>{"copy", "wait", "wait", "digest", "wait"});
  CHECK_FALSE(rig.arena->broken());
  CHECK(rig.HoldsItsSources(AllResident(rig.layout)));
}

TEST_CASE("A fill that was told to stop before it began creates nothing") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  calls.clear();
  std::stop_source stop;
  stop.request_stop();
  const auto report = rig.arena->Realize(AllResident(rig.layout), rig.sources(), {.stop = stop.get_token()});
  CHECK(ReasonOf(report.status()) == "CANCELLED");
  CHECK(Count("create") == 0);
}

TEST_CASE("A swap between layouts of other cells never holds more than the larger of them") {
  const Driver driver = LoggingDriver();
  ArenaRig rig(driver);
  const uint64_t before_bytes = rig.device->Memory()->free_bytes;
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  SECTION("a smaller one") {
    Second second(rig, OneComponent(9 * kMiB));  // 4, 4, 2 MiB
    calls.clear();
    Arena* const givers[] = {rig.arena.get()};
    REQUIRE(second.arena->Realize(AllResident(second.layout), second.sources(), {.givers = givers}).ok());
    CHECK(Count("create") == 0);
    CHECK(rig.arena->MappedCells().empty());
    CHECK(rig.pool.idle_bytes() == 6 * kMiB);
    CHECK(before_bytes - rig.device->Memory()->free_bytes == 16 * kMiB);
  }
  SECTION("one of larger cells only, for whose last the small ones of the giver make room") {
    Second second(rig, OneComponent(16 * kMiB));  // 4 of 4 MiB against 3, and 2 of 2 MiB
    calls.clear();
    Arena* const givers[] = {rig.arena.get()};
    REQUIRE(second.arena->Realize(AllResident(second.layout), second.sources(), {.givers = givers}).ok());
    ForgetAfterCopies();
    CHECK(Count("create") == 1);
    CHECK(Count("release") == 2);
    CHECK(Last("release") < First("create"));
    CHECK(Last("create") < First("copy"));
    CHECK(rig.pool.idle_bytes() == 0);
    CHECK(before_bytes - rig.device->Memory()->free_bytes == 16 * kMiB);
  }
  CHECK(rig.arena->Empty().ok());
}

TEST_CASE("A giver that cannot be emptied is whole again, and verified") {
  static int failing_unmaps = 0;
  Driver driver = TestDriver();
  driver.cuMemUnmap = [](CUdeviceptr address, size_t bytes) {
    return failing_unmaps > 0 && failing_unmaps-- > 0 ? CUDA_ERROR_INVALID_VALUE
                                                      : TestDriver().cuMemUnmap(address, bytes);
  };
  ArenaRig rig(driver);
  Second second(rig, TwoComponents());
  const Plan all = AllResident(rig.layout);
  REQUIRE(rig.Realize(all).ok());
  Arena* const givers[] = {rig.arena.get()};
  failing_unmaps = 1;
  CHECK_FALSE(second.arena->Realize(AllResident(second.layout), second.sources(), {.givers = givers}).ok());
  CHECK(second.arena->MappedCells().empty());
  failing_unmaps = 1;
  CHECK_FALSE(rig.arena->Empty().ok());
  CHECK(rig.arena->Return(all, rig.sources()).ok());
  CHECK_FALSE(rig.arena->broken());
  CHECK(rig.arena->Measure().device_bytes == 16 * kMiB);
  CHECK(rig.HoldsItsSources(all));
}

}  // namespace
}  // namespace residency

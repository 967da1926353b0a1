// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/arena.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <stop_token>

#include "mechanisms/copy_queue.h"
#include "mechanisms/refusal.h"
#include "tests/arena_rig.h"

namespace residency {
namespace {

TEST_CASE("After an activation the driver shows the price of the plan to the byte, and every byte is right") {
  ArenaRig rig;
  const Plan plan = AllResident(rig.layout);
  CHECK(rig.arena->Measure().device_bytes == 0);
  const auto report = rig.Realize(plan);
  REQUIRE(report.ok());
  CHECK(report->copied_bytes == 16 * kMiB);
  CHECK(report->verified_cells == 5);
  CHECK(report->refilled_cells == 0);
  const Footprint footprint = rig.arena->Measure();
  CHECK(footprint.device_bytes == Price(rig.layout, plan));
  CHECK(footprint.components[0].cells_on_gpu == 4);
  CHECK(footprint.components[1].device_bytes == 2 * kMiB);
  CHECK(rig.HoldsItsSources(plan));
}

TEST_CASE("A deactivation copies nothing, keeps the cells in the pool, and a trim gives them back") {
  ArenaRig rig;
  const uint64_t before = rig.device->Memory()->free_bytes;
  const CUdeviceptr address = rig.arena->address();
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  const uint64_t copied = rig.device->copied_to_host_bytes();
  const auto report = rig.Realize(NoneResident(rig.layout));
  REQUIRE(report.ok());
  CHECK(report->unmapped_bytes == 16 * kMiB);
  CHECK(report->copied_bytes == 0);
  CHECK(rig.device->copied_to_host_bytes() == copied);
  CHECK(rig.arena->Measure().device_bytes == 0);
  CHECK(rig.pool.idle_bytes() == 16 * kMiB);
  CHECK(rig.pool.Trim() == 16 * kMiB);
  CHECK(rig.device->Memory()->free_bytes == before);
  CHECK(rig.arena->address() == address);
}

TEST_CASE("Cells of one model serve the next, and hold nothing of the first") {
  ArenaRig first;
  REQUIRE(first.Realize(AllResident(first.layout)).ok());
  REQUIRE(first.Realize(NoneResident(first.layout)).ok());
  const Layout layout = TwoComponents();
  const TestSource big(layout, 0, 77);
  const TestSource small(layout, 1, 78);
  auto arena = *Arena::Create(*first.device, first.pool, *first.digester, layout);
  const std::vector<const Source*> sources = {&big, &small};
  REQUIRE(arena->Realize(AllResident(layout), sources).ok());
  CHECK(first.pool.idle_bytes() == 0);
  CHECK(arena->Verify(sources).value_or(kNotVerified).refilled_cells == 0);
}

TEST_CASE("Any sequence of plans leaves what the last one says") {
  ArenaRig rig;
  const uint32_t seed = 4711;
  std::mt19937 random(seed);
  INFO("seed " << seed);
  for (int round = 0; round < 60; ++round) {
    Plan plan = NoneResident(rig.layout);
    for (CellResidency& cell : plan.cells) cell = random() % 2 == 0 ? CellResidency::kResident : CellResidency::kAbsent;
    REQUIRE(rig.Realize(plan).ok());
    REQUIRE(rig.arena->Measure().device_bytes == Price(rig.layout, plan));
    REQUIRE(rig.HoldsItsSources(plan));
  }
}

TEST_CASE("A word that changed on the device is found by Verify and put right") {
  ArenaRig rig;
  const Plan plan = AllResident(rig.layout);
  REQUIRE(rig.Realize(plan).ok());
  const uint64_t junk = 0x1234567890abcdef;
  auto stream = *rig.device->CreateStream();
  REQUIRE(rig.device->CopyToDevice(rig.arena->address() + 5 * kMiB + 8, &junk, sizeof(junk), stream).ok());
  REQUIRE(rig.device->Synchronize(stream).ok());
  CHECK_FALSE(rig.HoldsItsSources(plan));
  const auto report = rig.arena->Verify(rig.sources());
  REQUIRE(report.ok());
  CHECK(report->verified_cells == 5);
  CHECK(report->refilled_cells == 1);
  CHECK(rig.HoldsItsSources(plan));
  CHECK(rig.arena->Verify(rig.sources()).value_or(kNotVerified).refilled_cells == 0);
}

TEST_CASE("An activation whose bytes never match is undone and says so") {
  ArenaRig rig;
  rig.small.wrong = 1;
  const auto report = rig.Realize(AllResident(rig.layout));
  CHECK(ReasonOf(report.status()) == "VERIFY");
  CHECK(rig.arena->Measure().device_bytes == 0);
  CHECK_FALSE(rig.arena->broken());
  rig.small.wrong = 0;
  CHECK(rig.Realize(AllResident(rig.layout)).ok());
}

TEST_CASE("A cell on the device that cannot be put right breaks the arena, which then only empties") {
  ArenaRig rig;
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  rig.big.wrong = 1;
  CHECK(ReasonOf(rig.arena->Verify(rig.sources()).status()) == "VERIFY");
  CHECK(rig.arena->broken());
  CHECK(ReasonOf(rig.Realize(AllResident(rig.layout)).status()) == "BROKEN");
  CHECK(rig.Realize(NoneResident(rig.layout)).ok());
  CHECK(rig.arena->Measure().device_bytes == 0);
}

// The k-th call of the function that a test has replaced fails; counted over all rigs of a test.
int calls_until_failure = 0;

bool FailsNow() { return --calls_until_failure == 0; }

template <auto Entry>
void MakeFail(Driver& driver);

template <>
void MakeFail<&Driver::cuMemCreate>(Driver& driver) {
  driver.cuMemCreate = [](CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                          unsigned long long flags) {
    return FailsNow() ? CUDA_ERROR_OUT_OF_MEMORY : TestDriver().cuMemCreate(handle, size, properties, flags);
  };
}
template <>
void MakeFail<&Driver::cuMemMap>(Driver& driver) {
  driver.cuMemMap = [](CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                       unsigned long long flags) {
    return FailsNow() ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemMap(address, size, offset, handle, flags);
  };
}
template <>
void MakeFail<&Driver::cuMemSetAccess>(Driver& driver) {
  driver.cuMemSetAccess = [](CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
    return FailsNow() ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemSetAccess(address, size, access, count);
  };
}
template <>
void MakeFail<&Driver::cuMemcpyHtoDAsync>(Driver& driver) {
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return FailsNow() ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemcpyHtoDAsync(to, from, bytes, stream);
  };
}
template <>
void MakeFail<&Driver::cuLaunchKernel>(Driver& driver) {
  driver.cuLaunchKernel = [](CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                             unsigned shared, CUstream stream, void** params, void** extra) {
    return FailsNow() ? CUDA_ERROR_INVALID_VALUE
                      : TestDriver().cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
  };
}

TEST_CASE("Whichever call of an activation fails, it is undone, the first error is told, and the next one is exact") {
  Driver driver = TestDriver();
  const int which = GENERATE(0, 1, 2, 3, 4);
  const int kth = GENERATE(1, 2, 3, 4, 5);
  if (which == 0) MakeFail<&Driver::cuMemCreate>(driver);
  if (which == 1) MakeFail<&Driver::cuMemMap>(driver);
  if (which == 2) MakeFail<&Driver::cuMemSetAccess>(driver);
  if (which == 3) MakeFail<&Driver::cuMemcpyHtoDAsync>(driver);
  if (which == 4) MakeFail<&Driver::cuLaunchKernel>(driver);
  // An activation of this layout launches the digest kernel once.
  if (which == 4 && kth > 1) return;
  calls_until_failure = 0;
  ArenaRig rig(driver);
  calls_until_failure = kth;
  const auto report = rig.Realize(AllResident(rig.layout));
  // The first allocation that finds no room while the pool has idle cells is tried again; here it has none.
  REQUIRE_FALSE(report.ok());
  const std::string names[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuLaunchKernel"};
  CHECK(std::string(report.status().message()).find(names[which]) == 0);
  CHECK(rig.arena->Measure().device_bytes == 0);
  CHECK_FALSE(rig.arena->broken());
  CHECK(rig.pool.Trim() <= Price(rig.layout, AllResident(rig.layout)));
  const Plan plan = AllResident(rig.layout);
  REQUIRE(rig.Realize(plan).ok());
  CHECK(rig.HoldsItsSources(plan));
}

TEST_CASE("An activation that fails and cannot be undone either breaks the arena, which then only empties") {
  static bool fails;
  fails = false;
  Driver driver = TestDriver();
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    // Not the few bytes that a digest needs.
    return fails && bytes >= kMiB ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemcpyHtoDAsync(to, from, bytes, stream);
  };
  driver.cuMemUnmap = [](CUdeviceptr address, size_t size) {
    return fails ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemUnmap(address, size);
  };
  ArenaRig rig(driver);
  fails = true;
  const auto report = rig.Realize(AllResident(rig.layout));
  REQUIRE_FALSE(report.ok());
  CHECK(std::string(report.status().message()).find("cuMemcpyHtoDAsync") == 0);
  CHECK(rig.arena->broken());
  CHECK(rig.arena->Measure().device_bytes > 0);
  fails = false;
  CHECK(ReasonOf(rig.Realize(AllResident(rig.layout)).status()) == "BROKEN");
  CHECK(rig.Realize(NoneResident(rig.layout)).ok());
  CHECK(rig.arena->Measure().device_bytes == 0);
}

TEST_CASE("A verify touches no cell that could be neither opened nor unmapped, and opens it when it can") {
  static bool refuses;
  Driver driver = TestDriver();
  driver.cuMemSetAccess = [](CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
    return refuses ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemSetAccess(address, size, access, count);
  };
  driver.cuMemUnmap = [](CUdeviceptr address, size_t size) {
    return refuses ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuMemUnmap(address, size);
  };
  refuses = false;
  ArenaRig rig(driver);
  refuses = true;
  CHECK(std::string(rig.Realize(AllResident(rig.layout)).status().message()).starts_with("cuMemSetAccess"));
  CHECK(rig.arena->broken());
  CHECK(rig.arena->Measure().device_bytes == 4 * kMiB);
  CHECK(std::string(rig.arena->Verify(rig.sources()).status().message()).starts_with("cuMemSetAccess"));
  CHECK(rig.device->Lost().ok());
  refuses = false;
  CHECK(rig.arena->Verify(rig.sources()).value_or(kNotVerified).refilled_cells == 1);
  CHECK(rig.Realize(NoneResident(rig.layout)).ok());
  CHECK(rig.arena->Measure().device_bytes == 0);
}

// What is asked to stop when the k-th copy is enqueued; counted as above.
std::stop_source* stop_at_failure = nullptr;

TEST_CASE("An activation that is stopped between two copies leaves nothing behind, and the next one is exact") {
  Driver driver = TestDriver();
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    if (FailsNow()) stop_at_failure->request_stop();
    return TestDriver().cuMemcpyHtoDAsync(to, from, bytes, stream);
  };
  calls_until_failure = 0;
  ArenaRig rig(driver);
  const Plan plan = AllResident(rig.layout);
  const Plan before = GENERATE(false, true) ? FirstResident(rig.layout) : NoneResident(rig.layout);
  REQUIRE(rig.Realize(before).ok());
  std::stop_source stop;
  stop_at_failure = &stop;
  calls_until_failure = GENERATE(1, 2, 3);
  const auto report = rig.arena->Realize(plan, rig.sources(), {.stop = stop.get_token()});
  CHECK(report.status().code() == absl::StatusCode::kCancelled);
  CHECK(rig.arena->Measure().device_bytes == Price(rig.layout, before));
  CHECK_FALSE(rig.arena->broken());
  CHECK(rig.HoldsItsSources(before));
  REQUIRE(rig.Realize(plan).ok());
  CHECK(rig.HoldsItsSources(plan));
  // Taking cells off is not stopped: there is nothing to wait for.
  CHECK(rig.arena->Realize(NoneResident(rig.layout), rig.sources(), {.stop = stop.get_token()}).ok());
}

// What the calls of a driver say of copies under way: enqueued, and not yet known to be through.
struct CopiesSeen {
  uint64_t enqueued_bytes = 0;
  uint64_t through_bytes = 0;
  uint64_t most_under_way_bytes = 0;
  std::map<CUevent, uint64_t> recorded_at;  // bytes enqueued before the event
};
CopiesSeen copies_seen;

TEST_CASE("At most 64 MiB of the first copies are under way, and every byte of larger ones arrives") {
  Driver driver = TestDriver();
  copies_seen = {};
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    copies_seen.enqueued_bytes += bytes;
    const uint64_t under_way_bytes = copies_seen.enqueued_bytes - copies_seen.through_bytes;
    copies_seen.most_under_way_bytes = std::max(copies_seen.most_under_way_bytes, under_way_bytes);
    return TestDriver().cuMemcpyHtoDAsync(to, from, bytes, stream);
  };
  driver.cuEventRecord = [](CUevent event, CUstream stream) {
    copies_seen.recorded_at[event] = copies_seen.enqueued_bytes;
    return TestDriver().cuEventRecord(event, stream);
  };
  driver.cuEventSynchronize = [](CUevent event) {
    copies_seen.through_bytes = std::max(copies_seen.through_bytes, copies_seen.recorded_at.at(event));
    return TestDriver().cuEventSynchronize(event);
  };
  const auto device = OpenTestDevice(driver);
  const uint64_t bytes = 90 * kMiB + 4096;
  auto range = *device->Reserve(92 * kMiB);
  const auto memory = *device->Create(92 * kMiB);
  REQUIRE(device->Map(range.get(), memory).ok());
  REQUIRE(device->SetAccess(range.get(), 92 * kMiB, Access::kReadWrite).ok());
  const auto stream = *device->CreateStream();
  std::vector<std::byte> source(bytes);
  std::mt19937_64 random(5);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  // Two uneven copies, the second of which crosses several pieces.
  CopyQueue copies(*device, stream, std::stop_token());
  const uint64_t first_bytes = 5 * kMiB + 8;
  REQUIRE(copies.Add(range.get(), source.data(), first_bytes).ok());
  REQUIRE(copies.Add(range.get() + first_bytes, source.data() + first_bytes, bytes - first_bytes).ok());
  CHECK(copies_seen.most_under_way_bytes <= 64 * kMiB);
  CHECK(copies_seen.most_under_way_bytes > 48 * kMiB);
  REQUIRE(device->Synchronize(stream).ok());
  std::vector<std::byte> read(bytes);
  REQUIRE(device->CopyToHost(read.data(), range.get(), bytes, stream).ok());
  REQUIRE(device->Synchronize(stream).ok());
  CHECK(std::memcmp(read.data(), source.data(), bytes) == 0);
  REQUIRE(device->Unmap(range.get(), 92 * kMiB).ok());
}

// Of the driver below: what is said of every piece, and the copies asked for.
float piece_milliseconds = 0;
std::vector<uint64_t> copied_pieces;

TEST_CASE("A link that is through with a piece in no time gets larger ones, a slow one does not") {
  Driver driver = TestDriver();
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr, const void*, size_t bytes, CUstream) {
    copied_pieces.push_back(bytes);
    return CUDA_SUCCESS;
  };
  driver.cuEventElapsedTime = [](float* milliseconds, CUevent, CUevent) {
    *milliseconds = piece_milliseconds;
    return CUDA_SUCCESS;
  };
  copied_pieces.clear();
  const auto device = OpenTestDevice(driver);
  const auto stream = *device->CreateStream();
  CopyQueue copies(*device, stream, std::stop_token());
  std::vector<uint64_t> expected;
  SECTION("fast") {
    piece_milliseconds = 0.3f;
    // The first to be timed is the second one, when the sixth is about to take its place.
    expected = {16, 16, 16, 16, 16, 32, 64, 64, 64};
  }
  SECTION("slow") {
    piece_milliseconds = 1.1f;
    expected = std::vector<uint64_t>(20, 16);
  }
  uint64_t all_bytes = 0;
  for (uint64_t& bytes : expected) all_bytes += bytes *= kMiB;
  const std::byte nowhere{};  // nothing is read or written
  REQUIRE(copies.Add(0, &nowhere, all_bytes).ok());
  CHECK(copied_pieces == expected);
}

TEST_CASE("A resident cell's descriptor is exported once and serves an importer; an absent one has none") {
  ArenaRig rig;
  CHECK(ReasonOf(rig.arena->Descriptor(0).status()) == "NOT_ACTIVE");
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  const auto descriptor = rig.arena->Descriptor(1);
  REQUIRE(descriptor.ok());
  CHECK(*rig.arena->Descriptor(1) == *descriptor);
  auto memory = rig.device->Import(*descriptor, rig.layout.cells[1].bytes);
  REQUIRE(memory.ok());
  auto range = *rig.device->Reserve(memory->bytes());
  REQUIRE(rig.device->Map(range.get(), *memory).ok());
  REQUIRE(rig.device->SetAccess(range.get(), memory->bytes(), Access::kReadOnly).ok());
  auto stream = *rig.device->CreateStream();
  std::vector<std::byte> read(memory->bytes());
  REQUIRE(rig.device->CopyToHost(read.data(), range.get(), read.size(), stream).ok());
  REQUIRE(rig.device->Synchronize(stream).ok());
  CHECK(std::memcmp(read.data(), rig.big.CellData(1), read.size()) == 0);
  REQUIRE(rig.device->Unmap(range.get(), memory->bytes()).ok());
}

TEST_CASE("The device's digests are the processor's, for every length and place of a range") {
  const auto device = OpenTestDevice();
  auto digester = *Digester::Create(*device);
  auto stream = *device->CreateStream();
  const uint64_t word_count = 3 * 1000 * 1000 + 7;
  std::vector<uint64_t> words(word_count);
  std::mt19937_64 random(99);
  for (uint64_t& word : words) word = random();
  auto buffer = *device->Allocate(word_count * 8);
  REQUIRE(device->CopyToDevice(buffer.get(), words.data(), word_count * 8, stream).ok());
  std::vector<DigestItem> items;
  std::vector<uint64_t> expected;
  const auto add = [&](uint64_t first, uint64_t count, uint64_t index) {
    items.push_back({buffer.get() + first * 8, count, index});
    expected.push_back(DigestWordsPortable(words.data() + first, count, index));
  };
  for (uint64_t count = 0; count < 300; ++count) add(random() % 1000, count, random());
  add(0, word_count, 0);
  add(1, word_count - 1, 1);
  CHECK(*digester->Digest(items) == expected);
  CHECK(digester->Digest({})->empty());
  // The same in batches.
  REQUIRE(digester->Begin(items).ok());
  for (size_t first = 0; first < items.size(); first += 100) {
    REQUIRE(digester->Launch(first, std::min<size_t>(100, items.size() - first), stream).ok());
  }
  CHECK(*digester->Finish() == expected);
}

// Of the driver below.
bool stream_waits_fail = false;

TEST_CASE("After a digest that failed, the next one waits for what may still run of it") {
  Driver driver = TestDriver();
  driver.cuStreamSynchronize = [](CUstream stream) {
    return stream_waits_fail ? CUDA_ERROR_INVALID_VALUE : TestDriver().cuStreamSynchronize(stream);
  };
  stream_waits_fail = false;
  ArenaRig rig(driver);
  REQUIRE(rig.Realize(AllResident(rig.layout)).ok());
  const std::vector<DigestItem> items = {{.address = rig.arena->address(), .word_count = 1000, .first_index = 0}};
  const auto right = rig.digester->Digest(items);
  REQUIRE(right.ok());
  stream_waits_fail = true;
  CHECK_FALSE(rig.digester->Digest(items).ok());
  // As long as nobody knows what still runs, nothing else begins.
  CHECK_FALSE(rig.digester->Begin(items).ok());
  stream_waits_fail = false;
  CHECK(*rig.digester->Digest(items) == *right);
  // A run that was given up between its batches.
  REQUIRE(rig.digester->Begin(items).ok());
  CHECK(rig.digester->Settle().ok());
  CHECK(*rig.digester->Digest(items) == *right);
}

}  // namespace
}  // namespace residency

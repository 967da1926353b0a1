// SPDX-License-Identifier: Apache-2.0
//
// A device that is filled from mirrors while they are still being read.
#include "mechanisms/mirror_flow.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mechanisms/arena.h"
#include "mechanisms/mirror_read.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"
#include "tests/mirror_models.h"
#include "tests/source_files.h"

namespace residency {
namespace {

constexpr uint64_t kPieceBytes = kCellBytes;
constexpr uint64_t kModelBytes = 3 * kPieceBytes;

// A simulated card that says when it copies, and can be asked to refuse to page-lock.
class FlowCard {
 public:
  static FlowCard& Get() {
    static FlowCard card;
    return card;
  }
  const Device& device() const { return *device_; }
  // Hears of each copy to the device, on the thread that asks for it.
  void OnCopy(std::function<void()> copy) { copy_ = std::move(copy); }
  // Hears of each registration, and says how it is answered, on the thread that asks for it.
  void OnRegister(std::function<CUresult()> answer) { answer_ = std::move(answer); }

 private:
  FlowCard() {
    SimOptions options;
    options.directory = dir_.Path("sim");
    options.device_bytes = kGiB;
    auto driver = OpenDriver(DriverKind::kSim, options);
    REQUIRE(driver.ok());
    driver_ = *driver;
    copy_call_ = driver_.cuMemcpyHtoDAsync;
    driver_.cuMemcpyHtoDAsync = [](CUdeviceptr device, const void* host, size_t bytes, CUstream stream) {
      const CUresult answer = copy_call_(device, host, bytes, stream);
      if (copy_) copy_();
      return answer;
    };
    register_call_ = driver_.cuMemHostRegister;
    driver_.cuMemHostRegister = [](void* address, size_t bytes, unsigned flags) {
      const CUresult answer = answer_ ? answer_() : CUDA_SUCCESS;
      return answer == CUDA_SUCCESS ? register_call_(address, bytes, flags) : answer;
    };
    auto device = Device::Open(driver_, 0);
    REQUIRE(device.ok());
    device_ = *std::move(device);
  }

  // Set while no other thread runs.
  static inline std::function<void()> copy_;
  static inline std::function<CUresult()> answer_;
  static inline decltype(Driver::cuMemcpyHtoDAsync) copy_call_ = nullptr;
  static inline decltype(Driver::cuMemHostRegister) register_call_ = nullptr;
  TempDir dir_;
  Driver driver_;
  std::unique_ptr<Device> device_;
};

// A model of three components of one piece each, which are read in their order, and an arena for it.
struct FlowRig {
  FlowRig() {
    options.refill = {.engine = ReadEngine::kThreads, .queue_depth = 1};
    options.pin_for = &card.device();
    options.flow = &flow;
    card.OnCopy([this] { copied.Say(); });
  }
  ~FlowRig() {
    card.OnCopy({});
    card.OnRegister({});
  }

  // Realizes all of it on a thread of its own.
  void BeginFill(bool verify = true) {
    filler = std::jthread([this, verify](const std::stop_token& stop) {
      filled = arena->Realize(AllResident(model.layout), flow.sources(), {.verify = verify, .stop = stop});
      ended.set_value();
    });
  }
  absl::StatusOr<RealizeReport> EndFill() {
    filler.join();
    return filled;
  }
  // What the owner of both does after a reading that went well.
  void Finish(MirrorSet set) {
    flow.Deliver(std::move(set.mirrors));
    mirrors = flow.TakeMirrors();
    std::vector<const Source*> sources;
    for (const Mirror& mirror : mirrors) sources.push_back(&mirror);
    flow.Finish(sources);
  }
  bool OnDevice() const {
    const auto stream = card.device().CreateStream();
    Bytes read(kPieceBytes);
    for (uint32_t i = 0; i < 3; ++i) {
      const CUdeviceptr address = arena->address() + model.layout.components[i].device_offset;
      if (!card.device().CopyToHost(read.data(), address, read.size(), *stream).ok()) return false;
      if (!card.device().Synchronize(*stream).ok() || read != Content(i, 0, kPieceBytes)) return false;
    }
    return true;
  }
  uint64_t locked_bytes() const { return card.device().registered_host_bytes(); }

  FlowCard& card = FlowCard::Get();
  TempDir dir;
  const Model model =
      MakeModel({WriteContent(dir.Path("a"), 0, kPieceBytes), WriteContent(dir.Path("b"), 1, kPieceBytes),
                 WriteContent(dir.Path("c"), 2, kPieceBytes)},
                {{{0, 0, kPieceBytes}}, {{1, 0, kPieceBytes}}, {{2, 0, kPieceBytes}}});
  std::vector<Mirror> mirrors;
  MirrorFlow flow{model.layout};
  MirrorOptions options;
  CellPool pool{card.device()};
  std::unique_ptr<Digester> digester = *Digester::Create(card.device());
  std::unique_ptr<Arena> arena = *Arena::Create(card.device(), pool, *digester, model.layout);
  Happening copied;
  absl::StatusOr<RealizeReport> filled = absl::UnknownError("not filled");
  std::promise<void> ended;  // by the filler
  std::jthread filler;
};

TEST_CASE("copies to the device begin before the last byte is read, and all of them are right at the end") {
  FlowRig rig;
  const bool locks = GENERATE(true, false);
  if (!locks) rig.options.pin_for = nullptr;
  INFO("page-locked: " << locks);
  std::atomic<bool> in_time{true};
  rig.options.progress = [&](uint64_t done_bytes) {
    if (done_bytes == 2 * kPieceBytes && !rig.copied.Await()) in_time = false;
    return true;
  };
  rig.BeginFill();
  auto set = ReadMirrors(rig.model.layout, rig.model.manifest, rig.options);
  REQUIRE(set.ok());
  CHECK(in_time);
  rig.Finish(*std::move(set));
  const auto report = rig.EndFill();
  REQUIRE(report.ok());
  CHECK(report->copied_bytes == kModelBytes);
  CHECK(report->verified_cells == rig.model.layout.cells.size());
  CHECK(report->refilled_cells == 0);
  CHECK(rig.OnDevice());
  CHECK(rig.locked_bytes() == (locks ? kModelBytes : 0));
}

TEST_CASE("a fill has not ended before the reading has ended well, whether it verifies or not") {
  FlowRig rig;
  rig.BeginFill(GENERATE(true, false));
  auto set = ReadMirrors(rig.model.layout, rig.model.manifest, rig.options);
  REQUIRE(set.ok());
  REQUIRE(rig.copied.Await());
  // All bytes are there, and yet their reader may find that their file changed. One that did not wait would have ended.
  CHECK(rig.ended.get_future().wait_for(std::chrono::milliseconds(200)) == std::future_status::timeout);
  rig.flow.Fail(Refuse(absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", "it changed"),
                {.memory = {}, .mirrors = std::move(set->mirrors), .pinned = {}});
  CHECK(ReasonOf(rig.EndFill().status()) == "FILE_CHANGED");
  CHECK(rig.arena->MappedCells().empty());
  CHECK_FALSE(rig.arena->broken());
}

TEST_CASE("a reading that fails under a fill takes the fill with it, and its memory stays as long as the flow") {
  const size_t mappings = MirrorMappings();
  {
    FlowRig rig;
    const bool changes = GENERATE(true, false);
    INFO("the last file changes: " << changes);
    rig.options.progress = [&](uint64_t done_bytes) {
      if (done_bytes < 2 * kPieceBytes || !rig.copied.Await()) return true;
      if (changes) std::filesystem::resize_file(rig.dir.Path("c"), kPieceBytes / 2);
      return changes;
    };
    rig.BeginFill();
    const absl::Status failed = ReadMirrors(rig.model.layout, rig.model.manifest, rig.options).status();
    CHECK(changes == (ReasonOf(failed) == "FILE_CHANGED"));
    CHECK(changes != absl::IsCancelled(failed));
    CHECK(rig.EndFill().status() == failed);
    CHECK(rig.arena->MappedCells().empty());
    CHECK_FALSE(rig.arena->broken());
    CHECK(MirrorMappings() == mappings + 3);
    CHECK(rig.locked_bytes() >= kPieceBytes);
    // Nothing is copied from there any more.
    const auto again = rig.arena->Realize(AllResident(rig.model.layout), rig.flow.sources());
    CHECK(again.status() == failed);
  }
  CHECK(MirrorMappings() == mappings);
  CHECK(FlowCard::Get().device().registered_host_bytes() == 0);
}

TEST_CASE("a reading that fails before a cell was given out leaves nothing") {
  FlowRig rig;
  const size_t mappings = MirrorMappings();
  rig.options.progress = [](uint64_t done_bytes) { return done_bytes < 2 * kPieceBytes; };
  CHECK(absl::IsCancelled(ReadMirrors(rig.model.layout, rig.model.manifest, rig.options).status()));
  CHECK(MirrorMappings() == mappings);
  CHECK(rig.locked_bytes() == 0);
  rig.BeginFill();
  CHECK(absl::IsCancelled(rig.EndFill().status()));
}

TEST_CASE("page-locking that is refused unlocks nothing under a fill, which goes on from pageable memory") {
  FlowRig rig;
  const bool filling = GENERATE(true, false);
  INFO("filling: " << filling);
  std::atomic<int> asked{0};
  rig.card.OnRegister([&] {
    if (++asked < 2) return CUDA_SUCCESS;
    if (filling) rig.copied.Await();
    return CUDA_ERROR_OUT_OF_MEMORY;
  });
  if (filling) rig.BeginFill();
  auto set = ReadMirrors(rig.model.layout, rig.model.manifest, rig.options);
  REQUIRE(set.ok());
  CHECK(asked == 2);
  CHECK(rig.locked_bytes() == (filling ? kPieceBytes : 0));
  rig.Finish(*std::move(set));
  for (const Mirror& mirror : rig.mirrors) CHECK(mirror.pinned_bytes() == 0);
  if (!filling) rig.BeginFill();
  const auto report = rig.EndFill();
  REQUIRE(report.ok());
  CHECK(report->verified_cells == rig.model.layout.cells.size());
  CHECK(rig.OnDevice());
}

TEST_CASE("a fill that waits for bytes can be stopped, and another one finds the mirrors") {
  FlowRig rig;
  Happening stopped;
  std::atomic<bool> in_time{true};
  rig.options.progress = [&](uint64_t done_bytes) {
    if (done_bytes == 2 * kPieceBytes && !stopped.Await()) in_time = false;
    return true;
  };
  absl::StatusOr<MirrorSet> set = absl::UnknownError("not read");
  std::thread reader([&] { set = ReadMirrors(rig.model.layout, rig.model.manifest, rig.options); });
  rig.BeginFill();
  CHECK(rig.copied.Await());
  rig.filler.request_stop();
  CHECK(absl::IsCancelled(rig.EndFill().status()));
  CHECK(rig.arena->MappedCells().empty());
  CHECK_FALSE(rig.arena->broken());
  stopped.Say();
  reader.join();
  CHECK(in_time);
  REQUIRE(set.ok());
  rig.Finish(*std::move(set));
  const auto report = rig.arena->Realize(AllResident(rig.model.layout), rig.flow.sources());
  REQUIRE(report.ok());
  CHECK(report->verified_cells == rig.model.layout.cells.size());
  CHECK(rig.OnDevice());
}

}  // namespace
}  // namespace residency

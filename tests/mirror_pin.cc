// SPDX-License-Identifier: Apache-2.0
//
// Mirrors that are page-locked while they are read.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mechanisms/mirror_read.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/pin_pieces.h"
#include "mechanisms/refusal.h"
#include "tests/mirror_models.h"
#include "tests/source_files.h"

namespace residency {
namespace {

// A simulated card that takes 300 MiB of page-locked memory, and the registrations that it was asked for.
constexpr uint64_t kPinLimitBytes = 300 * kMiB;

struct PinnedPiece {
  const std::byte* address;
  uint64_t bytes;
};

class Card {
 public:
  static Card& Get() {
    static Card card;
    return card;
  }
  const Device& device() const { return *device_; }
  std::vector<PinnedPiece> TakeAsked() { return std::exchange(asked_, {}); }
  // The next registration is answered with `error`.
  void AnswerNext(CUresult error) { answer_next_ = error; }
  // Runs before each registration, until it is told otherwise.
  void BeforeEach(std::function<void(const PinnedPiece&)> before) { before_ = std::move(before); }

 private:
  Card() {
    SimOptions options;
    options.directory = dir_.Path("sim");
    options.device_bytes = kGiB;
    options.faults = "pin_limit=" + std::to_string(kPinLimitBytes);
    auto driver = OpenDriver(DriverKind::kSim, options);
    REQUIRE(driver.ok());
    driver_ = *driver;
    register_ = driver_.cuMemHostRegister;
    driver_.cuMemHostRegister = [](void* address, size_t bytes, unsigned flags) {
      asked_.push_back({static_cast<const std::byte*>(address), bytes});
      if (before_) before_(asked_.back());
      if (const CUresult answer = std::exchange(answer_next_, CUDA_SUCCESS); answer != CUDA_SUCCESS) return answer;
      return register_(address, bytes, flags);
    };
    auto device = Device::Open(driver_, 0);
    REQUIRE(device.ok());
    device_ = *std::move(device);
  }

  // Touched on the one thread that registers, and on the test's while there is none.
  static inline std::vector<PinnedPiece> asked_;
  static inline CUresult answer_next_ = CUDA_SUCCESS;
  static inline std::function<void(const PinnedPiece&)> before_;
  static inline decltype(Driver::cuMemHostRegister) register_ = nullptr;
  TempDir dir_;
  Driver driver_;
  std::unique_ptr<Device> device_;
};

// A model of one component for each of `sizes`, each of a file of its own that is all zeros and takes no room on disk.
Model ZeroModel(const TempDir& dir, const std::vector<uint64_t>& sizes, uint64_t cell_bytes) {
  std::vector<SourceFile> files;
  std::vector<std::vector<Range>> components;
  for (const uint64_t bytes : sizes) {
    const std::string path = dir.Path("zeros" + std::to_string(files.size()));
    std::ofstream(path).close();
    std::filesystem::resize_file(path, bytes);
    components.push_back({{static_cast<uint32_t>(files.size()), 0, bytes}});
    files.push_back(Describe(path));
  }
  return MakeModel(std::move(files), components, cell_bytes);
}

absl::StatusOr<MirrorSet> ReadPinned(const Model& model, MirrorOptions options = {}) {
  options.pin_for = &Card::Get().device();
  return ReadMirrors(model.layout, model.manifest, options);
}

uint64_t PinnedBytes(const MirrorSet& set) {
  uint64_t sum = 0;
  for (const Mirror& mirror : set.mirrors) sum += mirror.pinned_bytes();
  return sum;
}

// What is complete after each of some bytes have come, as offset and size of the pieces.
class Completed {
 public:
  Completed(uint64_t tensor_bytes, uint64_t cell_bytes)
      : model_(MakeModel({{.path = "none", .bytes = tensor_bytes}}, {{{0, 0, tensor_bytes}}}, cell_bytes)),
        pieces_(model_.layout, 0, [this](uint64_t offset, uint64_t bytes) { complete_.emplace_back(offset, bytes); }) {}

  std::vector<std::pair<uint64_t, uint64_t>> After(uint64_t offset, uint64_t bytes) {
    complete_.clear();
    pieces_.Add(offset, bytes);
    return complete_;
  }

 private:
  const Model model_;
  std::vector<std::pair<uint64_t, uint64_t>> complete_;
  PinPieces pieces_;
};

TEST_CASE("a piece to be page-locked is whole cells, at most 256 MiB, and is complete with its last byte") {
  using Pieces = std::vector<std::pair<uint64_t, uint64_t>>;
  Completed small_cells(600 * kMiB + 1, 4 * kMiB);
  CHECK(small_cells.After(1, 256 * kMiB - 1).empty());
  CHECK(small_cells.After(512 * kMiB, 88 * kMiB).empty());
  CHECK(small_cells.After(600 * kMiB, 1) == Pieces{{512 * kMiB, 90 * kMiB}});
  CHECK(small_cells.After(256 * kMiB, 200 * kMiB).empty());
  CHECK(small_cells.After(0, 1) == Pieces{{0, 256 * kMiB}});
  CHECK(small_cells.After(456 * kMiB, 56 * kMiB) == Pieces{{256 * kMiB, 256 * kMiB}});
  // The next cell would bring it over 256 MiB; and bytes that come at once may complete both.
  Completed large_cells(257 * kMiB, 256 * kMiB);
  CHECK(large_cells.After(0, 257 * kMiB) == Pieces{{0, 256 * kMiB}, {256 * kMiB, 2 * kMiB}});
}

TEST_CASE("mirrors are page-locked piece by piece, and unlocked when they go") {
  Card& card = Card::Get();
  const TempDir dir;
  const Model model = ZeroModel(dir, {257 * kMiB + 1, 3 * kMiB}, 4 * kMiB);
  std::vector<uint64_t> pinned;
  MirrorOptions options;
  options.pin.progress = [&](uint64_t pinned_bytes) {
    pinned.push_back(pinned_bytes);
    return true;
  };
  auto set = ReadPinned(model, options);
  REQUIRE(set.ok());
  CHECK(set->mirrors[0].pinned_bytes() == 258 * kMiB);
  CHECK(set->mirrors[1].pinned_bytes() == 4 * kMiB);
  // In the order in which their last bytes came.
  std::map<const std::byte*, uint64_t> asked;
  for (const PinnedPiece& piece : card.TakeAsked()) asked.emplace(piece.address, piece.bytes);
  CHECK(asked.size() == 3);
  CHECK(asked[set->mirrors[0].data()] == 256 * kMiB);
  CHECK(asked[set->mirrors[0].data() + 256 * kMiB] == 2 * kMiB);
  CHECK(asked[set->mirrors[1].data()] == 4 * kMiB);
  CHECK(pinned.size() == 3);
  CHECK(std::is_sorted(pinned.begin(), pinned.end()));
  CHECK(pinned.back() == 262 * kMiB);
  CHECK(card.device().registered_host_bytes() == 262 * kMiB);
  {
    Mirror moved = std::move(set->mirrors[0]);
    set->mirrors.clear();
    CHECK(moved.pinned_bytes() == 258 * kMiB);
    CHECK(card.device().registered_host_bytes() == 258 * kMiB);
  }
  CHECK(card.device().registered_host_bytes() == 0);
}

TEST_CASE("a piece is page-locked while the bytes behind it are read, and reading waits for no page-locking") {
  Card& card = Card::Get();
  const TempDir dir;
  const Model model = ZeroModel(dir, {4 * kMiB, 6 * kMiB}, 4 * kMiB);
  Happening asked;
  Happening read;
  std::atomic<bool> in_time{true};
  MirrorOptions options;
  SECTION("the first piece is asked for before the last byte is there") {
    card.BeforeEach([&](const PinnedPiece&) { asked.Say(); });
    options.progress = [&](uint64_t done_bytes) {
      if (done_bytes == 10 * kMiB && !asked.Await()) in_time = false;
      return true;
    };
  }
  SECTION("the last byte is there while the first piece is being locked") {
    card.BeforeEach([&](const PinnedPiece&) {
      if (!read.Await()) in_time = false;
    });
    options.progress = [&](uint64_t done_bytes) {
      if (done_bytes == 10 * kMiB) read.Say();
      return true;
    };
  }
  const auto set = ReadPinned(model, options);
  card.BeforeEach({});
  REQUIRE(set.ok());
  CHECK(in_time);
  CHECK(PinnedBytes(*set) == 10 * kMiB);
  card.TakeAsked();
}

TEST_CASE("a piece that is page-locked while others are read has all of its bytes") {
  Card& card = Card::Get();
  const Sharded sharded;
  std::map<const std::byte*, Bytes> locked;
  card.BeforeEach([&](const PinnedPiece& piece) {
    locked.emplace(piece.address, Bytes(piece.address, piece.address + piece.bytes));
  });
  const auto set = ReadPinned(sharded.model, {.refill = {.block_bytes = 4096}});
  card.BeforeEach({});
  card.TakeAsked();
  REQUIRE(set.ok());
  CHECK(locked.size() == 2);
  CHECK((locked[set->mirrors[0].data()] == ExpectedImage(sharded.first)));
  CHECK((locked[set->mirrors[1].data()] == ExpectedImage(sharded.second)));
  CheckImage(set->mirrors[1], sharded.model, 1, ExpectedImage(sharded.second));
}

TEST_CASE("a pin limit that is met in the middle of reading leaves all of a set unlocked, and it is read to the end") {
  Card& card = Card::Get();
  const TempDir dir;
  const Model model = ZeroModel(dir, {6 * kMiB, 8 * kMiB, 2 * kMiB}, 4 * kMiB);
  // Others have all but 10 MiB of the limit; the simulated driver locks no page of it.
  constexpr uint64_t kOthersBytes = kPinLimitBytes - 10 * kMiB;
  void* others = ::mmap(nullptr, kOthersBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(others != MAP_FAILED);
  const HostMapping others_memory(static_cast<std::byte*>(others), kOthersBytes);
  const auto others_locked = card.device().RegisterHost(others, kOthersBytes);
  REQUIRE(others_locked.ok());
  card.TakeAsked();
  std::atomic<int> refusals{0};
  uint64_t read_bytes = 0;
  bool given_back = false;
  MirrorOptions options;
  options.progress = [&](uint64_t done_bytes) {
    read_bytes = done_bytes;
    // By the last byte all pieces were added; what was locked is given back while reading has not returned yet.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (done_bytes == 16 * kMiB && !given_back && std::chrono::steady_clock::now() < deadline) {
      given_back = refusals > 0 && card.device().registered_host_bytes() == kOthersBytes;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  };
  absl::Status refused;
  uint64_t had_bytes = 0;
  uint64_t registered_bytes = 0;
  options.pin.refused = [&](const absl::Status& status, uint64_t pinned_bytes) {
    ++refusals;
    refused = status;
    had_bytes = pinned_bytes;
    registered_bytes = card.device().registered_host_bytes();
  };
  const auto set = ReadPinned(model, options);
  REQUIRE(set.ok());
  CHECK(refusals == 1);
  CHECK(absl::IsResourceExhausted(refused));
  CHECK(ReasonOf(refused) == "PIN_LIMIT");
  // What came before is still locked then, so that the limit can be told.
  CHECK(had_bytes > 0);
  CHECK(had_bytes <= 10 * kMiB);
  CHECK(registered_bytes == kOthersBytes + had_bytes);
  CHECK(read_bytes == 16 * kMiB);
  CHECK(given_back);
  CHECK(PinnedBytes(*set) == 0);
  CHECK(card.device().registered_host_bytes() == kOthersBytes);
  // What came behind the refused one was not tried.
  const std::vector<PinnedPiece> asked = card.TakeAsked();
  uint64_t asked_bytes = 0;
  for (const PinnedPiece& piece : asked) asked_bytes += piece.bytes;
  CHECK(asked_bytes > 10 * kMiB);
  CHECK(asked_bytes == had_bytes + asked.back().bytes);

  // All was given back, so this fits under the limit.
  const TempDir other;
  const auto small = ReadPinned(ZeroModel(other, {10 * kMiB}, 4 * kMiB));
  REQUIRE(small.ok());
  CHECK(PinnedBytes(*small) == 10 * kMiB);
  card.TakeAsked();
}

TEST_CASE("a system that does not let us page-lock is a pin limit, whichever of its words the driver has for it") {
  Card& card = Card::Get();
  const TempDir dir;
  const Model model = ZeroModel(dir, {4 * kMiB}, 4 * kMiB);
  for (const CUresult word : {CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY}) {
    card.AnswerNext(word);
    absl::Status refused;
    MirrorOptions options;
    options.pin.refused = [&](const absl::Status& status, uint64_t) { refused = status; };
    const auto set = ReadPinned(model, options);
    REQUIRE(set.ok());
    CHECK(ReasonOf(refused) == "PIN_LIMIT");
    CHECK(std::string(refused.message()).find("GPU") == std::string::npos);
    CHECK(PinnedBytes(*set) == 0);
  }
  card.TakeAsked();
}

TEST_CASE("reading and page-locking can each be given up in the middle, and nothing is left of either") {
  Card& card = Card::Get();
  const TempDir dir;
  const Model model = ZeroModel(dir, {8 * kMiB, 8 * kMiB, 40 * kMiB, 4 * kMiB}, 4 * kMiB);
  const size_t descriptors = OpenDescriptors();
  const size_t mappings = MirrorMappings();
  Happening locked;
  MirrorOptions options;
  SECTION("while reading, with pieces locked") {
    options.pin.progress = [&](uint64_t) {
      locked.Say();
      return true;
    };
    // One block is missing at most then, so that a small component is there.
    options.progress = [&](uint64_t done_bytes) { return done_bytes < 56 * kMiB || !locked.Await(); };
  }
  SECTION("while page-locking what was read") {
    options.pin.progress = [&](uint64_t pinned_bytes) { return pinned_bytes < 16 * kMiB; };
  }
  CHECK(absl::IsCancelled(ReadPinned(model, options).status()));
  CHECK(card.device().registered_host_bytes() == 0);
  CHECK(OpenDescriptors() == descriptors);
  CHECK(MirrorMappings() == mappings);
  CHECK(card.TakeAsked().size() >= 1);
}

}  // namespace
}  // namespace residency

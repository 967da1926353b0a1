// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/mirror.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mechanisms/digest.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"
#include "tests/source_files.h"

namespace residency {
namespace {

constexpr uint64_t kCellBytes = 2 * kMiB;

struct Range {
  uint32_t file = 0;
  uint64_t file_offset = 0;
  uint64_t bytes = 0;
};

// A model whose file i has the content of seed i.
struct Model {
  Manifest manifest;
  Layout layout;
};

Model MakeModel(std::vector<SourceFile> files, const std::vector<std::vector<Range>>& components,
                uint64_t cell_bytes = kCellBytes) {
  Model model;
  model.manifest.files = std::move(files);
  for (const std::vector<Range>& ranges : components) {
    ManifestComponent component;
    component.name = "part" + std::to_string(model.manifest.components.size());
    for (const Range& range : ranges) {
      component.tensors.push_back({.name = "tensor" + std::to_string(component.tensors.size()),
                                   .dtype = DType::kU8,
                                   .shape = {range.bytes},
                                   .file = range.file,
                                   .file_offset = range.file_offset,
                                   .bytes = range.bytes});
    }
    model.manifest.components.push_back(std::move(component));
  }
  auto layout = MakeLayout(ToLayoutComponents(model.manifest), cell_bytes, kDefaultGranuleBytes);
  REQUIRE(layout.ok());
  model.layout = *std::move(layout);
  return model;
}

// The image of a component as the design describes it: tensors in order, each on the next multiple of 256, zeros
// between and behind them up to the next multiple of 2 MiB.
Bytes ExpectedImage(const std::vector<Range>& ranges) {
  Bytes image;
  for (const Range& range : ranges) {
    image.resize((image.size() + 255) / 256 * 256);
    const Bytes content = Content(range.file, range.file_offset, range.bytes);
    image.insert(image.end(), content.begin(), content.end());
  }
  image.resize((image.size() + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB));
  return image;
}

void CheckImage(const Mirror& mirror, const Model& model, uint32_t component_index, const Bytes& expected,
                uint64_t cell_bytes = kCellBytes) {
  const LayoutComponent& component = model.layout.components[component_index];
  REQUIRE(mirror.bytes() == expected.size());
  CHECK((std::memcmp(mirror.data(), expected.data(), expected.size()) == 0));
  CHECK(component.cell_count == (expected.size() + cell_bytes - 1) / cell_bytes);
  for (uint32_t i = 0; i < component.cell_count; ++i) {
    const uint64_t begin = i * cell_bytes;
    const uint64_t bytes = std::min(cell_bytes, expected.size() - begin);
    CHECK(mirror.CellData(component.first_cell + i) == mirror.data() + begin);
    CHECK(mirror.CellDigest(component.first_cell + i) ==
          DigestWordsPortable(reinterpret_cast<const uint64_t*>(expected.data() + begin), bytes / 8, 0));
  }
}

// Two files and two components; the second one has odd offsets, tensors across the ends of cells, tensors smaller
// than a word, empty ones, and both files.
struct Sharded {
  TempDir dir;
  std::vector<Range> first = {{1, 0, 10}};
  std::vector<Range> second = {
      {0, 13, 1000},
      {0, 1013, 0},
      {0, 1013, 2 * kMiB + 333},
      {0, 2 * kMiB + 1346, 1},
      {0, 2 * kMiB + 1347, 7},
      {0, 2 * kMiB + 1354, 8},
      {0, 2 * kMiB + 1362, 9},
      {0, 3 * kMiB, 5 * kMiB + 77},
      {1, 3, kMiB + kMiB / 2},
      {1, 3 * kMiB + 4, 1},
  };
  Model model = MakeModel({WriteContent(dir.Path("a"), 0, 8 * kMiB + 77), WriteContent(dir.Path("b"), 1, 3 * kMiB + 5)},
                          {first, second});

  absl::StatusOr<Mirror> Build(const MirrorOptions& options = {}) const {
    return Mirror::Build(model.layout, 1, model.manifest, options);
  }
};

size_t MirrorMappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:residency-") != std::string::npos;
  return count;
}

TEST_CASE("a mirror holds its component's tensors at the layout's places, zeros elsewhere, and every cell's digest") {
  const Sharded sharded;
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    for (bool direct : {true, false}) {
      for (uint64_t block_bytes : {uint64_t{4096}, 128 * kKiB, 4 * kMiB}) {
        INFO("engine " << static_cast<int>(engine) << ", direct " << direct << ", blocks of " << block_bytes);
        const auto mirror = sharded.Build({.refill = {.engine = engine, .direct = direct, .block_bytes = block_bytes}});
        REQUIRE(mirror.ok());
        CheckImage(*mirror, sharded.model, 1, ExpectedImage(sharded.second));
        if (!direct) CHECK(mirror->report().direct_files == 0);
      }
    }
  }
  const auto first = Mirror::Build(sharded.model.layout, 0, sharded.model.manifest, {});
  REQUIRE(first.ok());
  CheckImage(*first, sharded.model, 0, ExpectedImage(sharded.first));
}

TEST_CASE("random models come out right") {
  const TempDir dir;
  const std::vector<SourceFile> files = {WriteContent(dir.Path("a"), 0, 3 * kMiB),
                                         WriteContent(dir.Path("b"), 1, kMiB)};
  for (uint64_t seed = 0; seed < 25; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    const uint64_t most_bytes = std::vector<uint64_t>{5, 300, 5000, kMiB}[random() % 4];
    std::vector<Range> ranges;
    for (uint32_t file = 0; file < files.size(); ++file) {
      uint64_t offset = random() % 5000;
      for (int i = 0; i < 200; ++i) {
        const uint64_t bytes = random() % most_bytes;
        if (offset + bytes > files[file].bytes) break;
        ranges.push_back({file, offset, bytes});
        offset += bytes + (random() % 4 == 0 ? random() % 10000 : 0);
      }
    }
    const Model model = MakeModel(files, {ranges});
    const auto mirror = Mirror::Build(model.layout, 0, model.manifest, {.refill = {.block_bytes = 16 * kKiB}});
    REQUIRE(mirror.ok());
    CheckImage(*mirror, model, 0, ExpectedImage(ranges));
  }
}

TEST_CASE("tensors of a table that share bytes of the file are each mirrored") {
  const TempDir dir;
  const std::vector<Range> ranges = {{0, 0, kMiB}, {0, 1, kMiB}, {0, 1, 20}, {0, kMiB - 3, 3}};
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 2 * kMiB)}, {ranges});
  const auto mirror = Mirror::Build(model.layout, 0, model.manifest, {.refill = {.block_bytes = 8192}});
  REQUIRE(mirror.ok());
  CheckImage(*mirror, model, 0, ExpectedImage(ranges));
}

TEST_CASE("a component may list its files in another order than the manifest") {
  const TempDir dir;
  const std::vector<Range> ranges = {{1, 100, 5000}, {0, 7, 3000}, {1, 5100, 10}, {0, 3007, 1}};
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 4000), WriteContent(dir.Path("b"), 1, 6000)}, {ranges});
  const auto mirror = Mirror::Build(model.layout, 0, model.manifest, {});
  REQUIRE(mirror.ok());
  CheckImage(*mirror, model, 0, ExpectedImage(ranges));
}

TEST_CASE("cells larger than the component are cut to what it needs") {
  const TempDir dir;
  const std::vector<Range> ranges = {{0, 5, 3 * kMiB}, {0, 4 * kMiB, 100}};
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 5 * kMiB)}, {{{0, 0, 8}}, ranges}, 64 * kMiB);
  const auto mirror = Mirror::Build(model.layout, 1, model.manifest, {});
  REQUIRE(mirror.ok());
  CHECK(mirror->bytes() == 4 * kMiB);
  CheckImage(*mirror, model, 1, ExpectedImage(ranges), 64 * kMiB);
}

TEST_CASE("a component of empty tensors has a mirror of its span") {
  const TempDir dir;
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 100)}, {{{0, 50, 0}, {0, 100, 0}}});
  const auto mirror = Mirror::Build(model.layout, 0, model.manifest, {});
  REQUIRE(mirror.ok());
  CHECK(mirror->bytes() == model.layout.components[0].span_bytes);
  CHECK(std::all_of(mirror->data(), mirror->data() + mirror->bytes(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST_CASE("a complete mirror is sealed against every write and change of size, and can still be mapped to be read") {
  const Sharded sharded;
  const auto mirror = sharded.Build();
  REQUIRE(mirror.ok());
  const int fd = mirror->fd();
  CHECK(::fcntl(fd, F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL));
  CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  const auto bytes = static_cast<off_t>(mirror->bytes());
  const auto is_refused = [](int64_t result) { return result == -1 && errno == EPERM; };
  CHECK(is_refused(::pwrite(fd, "x", 1, 0)));
  CHECK(is_refused(::ftruncate(fd, bytes - 4096)));
  CHECK(is_refused(::ftruncate(fd, bytes + 4096)));
  CHECK(is_refused(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096)));
  CHECK(is_refused(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE)));
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  const UniqueFd again(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(again.valid());
  CHECK(is_refused(::pwrite(again.get(), "x", 1, 0)));

  void* view = ::mmap(nullptr, mirror->bytes(), PROT_READ, MAP_SHARED, fd, 0);
  REQUIRE(view != MAP_FAILED);
  CHECK((std::memcmp(view, mirror->data(), mirror->bytes()) == 0));
  ::munmap(view, mirror->bytes());
}

TEST_CASE("a mirror's memfd bears its component's name and has exactly its span") {
  const Sharded sharded;
  const auto mirror = sharded.Build();
  REQUIRE(mirror.ok());
  const std::string link = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(mirror->fd()));
  CHECK(link.find("memfd:residency-part1") != std::string::npos);
  struct stat now;
  REQUIRE(::fstat(mirror->fd(), &now) == 0);
  CHECK(static_cast<uint64_t>(now.st_size) == sharded.model.layout.components[1].span_bytes);
}

TEST_CASE("a mirror outlives its files") {
  Sharded sharded;
  const auto mirror = sharded.Build();
  REQUIRE(mirror.ok());
  std::filesystem::resize_file(sharded.dir.Path("a"), 0);
  std::filesystem::remove(sharded.dir.Path("b"));
  CheckImage(*mirror, sharded.model, 1, ExpectedImage(sharded.second));
}

TEST_CASE("progress counts the bytes of tensors, to the last") {
  const Sharded sharded;
  std::vector<uint64_t> seen;
  const auto mirror = sharded.Build({.refill = {.block_bytes = 64 * kKiB}, .progress = [&](uint64_t done_bytes) {
                                       seen.push_back(done_bytes);
                                       return true;
                                     }});
  REQUIRE(mirror.ok());
  CHECK(std::is_sorted(seen.begin(), seen.end()));
  CHECK(seen.back() == sharded.model.layout.components[1].payload_bytes);
}

TEST_CASE("a build that is cancelled leaves neither memory nor a descriptor") {
  const Sharded sharded;
  const size_t descriptors = OpenDescriptors();
  const size_t mappings = MirrorMappings();
  int calls = 0;
  const auto mirror =
      sharded.Build({.refill = {.block_bytes = 64 * kKiB}, .progress = [&](uint64_t) { return ++calls < 5; }});
  CHECK(absl::IsCancelled(mirror.status()));
  CHECK(calls == 5);
  CHECK(OpenDescriptors() == descriptors);
  CHECK(MirrorMappings() == mappings);
}

TEST_CASE("a file that changes under a build is noticed, whichever engine reads it") {
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    Sharded sharded;
    const std::string path = sharded.dir.Path("a");
    const size_t mappings = MirrorMappings();
    bool done = false;
    const auto build = [&](auto change) {
      return sharded
          .Build({.refill = {.engine = engine, .block_bytes = 4096},
                  .progress =
                      [&](uint64_t) {
                        if (!std::exchange(done, true)) change();
                        return true;
                      }})
          .status();
    };
    SECTION("written to, engine " + std::to_string(static_cast<int>(engine))) {
      const absl::Status status = build([&] { std::ofstream(path, std::ios::app) << "x"; });
      CHECK(absl::IsFailedPrecondition(status));
      CHECK(GetRefusal(status)->reason == "FILE_CHANGED");
      CHECK(GetRefusal(status)->file == path);
    }
    SECTION("cut, engine " + std::to_string(static_cast<int>(engine))) {
      const absl::Status status = build([&] { std::filesystem::resize_file(path, 10000); });
      CHECK(absl::IsDataLoss(status));
      CHECK(GetRefusal(status)->reason == "FILE_TRUNCATED");
      CHECK(GetRefusal(status)->file == path);
    }
    CHECK(MirrorMappings() == mappings);
  }
}

TEST_CASE("a file that changed since the manifest is refused") {
  Sharded sharded;
  WriteContent(sharded.dir.Path("new"), 0, 8 * kMiB + 77);
  std::filesystem::rename(sharded.dir.Path("new"), sharded.dir.Path("a"));
  CHECK(ReasonOf(sharded.Build().status()) == "FILE_CHANGED");
  std::filesystem::remove(sharded.dir.Path("a"));
  CHECK(ReasonOf(sharded.Build().status()) == "FILE_MISSING");
}

TEST_CASE("a layout of another model is refused") {
  const Sharded sharded;
  const auto refused = [&](Manifest manifest, uint32_t component_index) {
    return ReasonOf(Mirror::Build(sharded.model.layout, component_index, manifest, {}).status()) == "LAYOUT_MISMATCH";
  };
  CHECK(refused(sharded.model.manifest, 2));
  Manifest fewer = sharded.model.manifest;
  fewer.components[1].tensors.pop_back();
  CHECK(refused(fewer, 1));
  Manifest larger = sharded.model.manifest;
  larger.components[1].tensors[0].bytes += 1;
  CHECK(refused(larger, 1));
  Manifest renamed = sharded.model.manifest;
  renamed.components[1].tensors[0].name = "other";
  CHECK(refused(renamed, 1));
  Manifest one = sharded.model.manifest;
  one.components.pop_back();
  CHECK(refused(one, 0));
}

TEST_CASE("a moved mirror keeps its bytes where they are") {
  const Sharded sharded;
  auto built = sharded.Build();
  REQUIRE(built.ok());
  const std::byte* data = built->data();
  const size_t mappings = MirrorMappings();
  Mirror moved = *std::move(built);
  CHECK(moved.data() == data);
  CHECK(MirrorMappings() == mappings);
  auto first = Mirror::Build(sharded.model.layout, 0, sharded.model.manifest, {});
  REQUIRE(first.ok());
  *first = std::move(moved);
  CHECK(first->data() == data);
  CheckImage(*first, sharded.model, 1, ExpectedImage(sharded.second));
}

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

 private:
  Card() {
    SimOptions options;
    options.directory = dir_.Path("sim");
    options.device_bytes = kGiB;
    options.faults = "pin_limit=300MiB";
    auto driver = OpenDriver(DriverKind::kSim, options);
    REQUIRE(driver.ok());
    driver_ = *driver;
    register_ = driver_.cuMemHostRegister;
    driver_.cuMemHostRegister = [](void* address, size_t bytes, unsigned flags) {
      asked_.push_back({static_cast<const std::byte*>(address), bytes});
      if (const CUresult answer = std::exchange(answer_next_, CUDA_SUCCESS); answer != CUDA_SUCCESS) return answer;
      return register_(address, bytes, flags);
    };
    auto device = Device::Open(driver_, 0);
    REQUIRE(device.ok());
    device_ = *std::move(device);
  }

  static inline std::vector<PinnedPiece> asked_;
  static inline CUresult answer_next_ = CUDA_SUCCESS;
  static inline decltype(Driver::cuMemHostRegister) register_ = nullptr;
  TempDir dir_;
  Driver driver_;
  std::unique_ptr<Device> device_;
};

// A mirror of a file of `bytes` zeros.
Mirror ZeroMirror(const TempDir& dir, uint64_t bytes, uint64_t cell_bytes) {
  const std::string path = dir.Path("zeros" + std::to_string(bytes));
  std::ofstream(path).close();
  std::filesystem::resize_file(path, bytes);
  const Model model = MakeModel({Describe(path)}, {{{0, 0, bytes}}}, cell_bytes);
  auto mirror = Mirror::Build(model.layout, 0, model.manifest, {});
  REQUIRE(mirror.ok());
  return *std::move(mirror);
}

TEST_CASE("a mirror is page-locked in whole cells, at most 256 MiB at a time, and can be unlocked and locked again") {
  Card& card = Card::Get();
  const TempDir dir;
  Mirror mirror = ZeroMirror(dir, 270 * kMiB + 1, 4 * kMiB);
  CHECK(mirror.pinned_bytes() == 0);
  for (int round = 0; round < 2; ++round) {
    REQUIRE(mirror.Pin(card.device()).ok());
    CHECK(mirror.pinned_bytes() == 272 * kMiB);
    const std::vector<PinnedPiece> asked = card.TakeAsked();
    REQUIRE(asked.size() == 2);
    CHECK(asked[0].address == mirror.data());
    CHECK(asked[0].bytes == 256 * kMiB);
    CHECK(asked[1].address == mirror.data() + 256 * kMiB);
    CHECK(asked[1].bytes == 16 * kMiB);
    CHECK(mirror.Pin(card.device()).ok());  // is pinned already
    CHECK(card.TakeAsked().empty());
    CHECK(card.device().registered_host_bytes() == 272 * kMiB);
    mirror.Unpin();
    CHECK(mirror.pinned_bytes() == 0);
    CHECK(card.device().registered_host_bytes() == 0);
  }
}

TEST_CASE("a piece ends before the cell that would bring it over 256 MiB") {
  Card& card = Card::Get();
  const TempDir dir;
  Mirror mirror = ZeroMirror(dir, 257 * kMiB, 256 * kMiB);
  REQUIRE(mirror.Pin(card.device()).ok());
  const std::vector<PinnedPiece> asked = card.TakeAsked();
  REQUIRE(asked.size() == 2);
  CHECK(asked[0].bytes == 256 * kMiB);
  CHECK(asked[1].bytes == 2 * kMiB);
}

TEST_CASE("a mirror over the pin limit stays unpinned as a whole and says what it asked for") {
  Card& card = Card::Get();
  const TempDir dir;
  Mirror large = ZeroMirror(dir, 304 * kMiB, 4 * kMiB);
  const absl::Status status = large.Pin(card.device());
  CHECK(absl::IsResourceExhausted(status));
  const auto refusal = GetRefusal(status);
  REQUIRE(refusal.has_value());
  CHECK(refusal->reason == "PIN_LIMIT");
  CHECK(refusal->needed_bytes == 304 * kMiB);
  CHECK(refusal->available_bytes == 256 * kMiB);
  CHECK(large.pinned_bytes() == 0);
  CHECK(card.device().registered_host_bytes() == 0);
  card.TakeAsked();

  // The first piece was given back, so this fits under the limit.
  Mirror small = ZeroMirror(dir, 260 * kMiB, 4 * kMiB);
  CHECK(small.Pin(card.device()).ok());
  card.TakeAsked();
}

TEST_CASE("a system that does not let us page-lock is a pin limit, whichever of its words the driver has for it") {
  Card& card = Card::Get();
  const TempDir dir;
  Mirror mirror = ZeroMirror(dir, 4 * kMiB, 4 * kMiB);
  for (const CUresult word : {CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY}) {
    card.AnswerNext(word);
    const absl::Status status = mirror.Pin(card.device());
    CHECK(ReasonOf(status) == "PIN_LIMIT");
    CHECK(std::string(status.message()).find("GPU") == std::string::npos);
    CHECK(mirror.pinned_bytes() == 0);
  }
  CHECK(mirror.Pin(card.device()).ok());
  card.TakeAsked();
}

TEST_CASE("a mirror that goes gives back its page-locked memory") {
  Card& card = Card::Get();
  const TempDir dir;
  for (int round = 0; round < 3; ++round) {
    Mirror mirror = ZeroMirror(dir, 200 * kMiB, 64 * kMiB);
    REQUIRE(mirror.Pin(card.device()).ok());
    Mirror moved = std::move(mirror);
    CHECK(moved.pinned_bytes() == 200 * kMiB);
  }
  card.TakeAsked();
}

}  // namespace
}  // namespace residency

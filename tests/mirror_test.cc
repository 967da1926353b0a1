// SPDX-License-Identifier: Apache-2.0
//
// What a mirror holds and how it is read. Page-locking it is in mirror_pin.cc.
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
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mechanisms/mirror_read.h"
#include "mechanisms/refusal.h"
#include "tests/mirror_models.h"
#include "tests/source_files.h"

namespace residency {
namespace {

TEST_CASE("a mirror holds its component's tensors at the layout's places, zeros elsewhere, and every cell's digest") {
  const Sharded sharded;
  for (ReadEngine engine : {ReadEngine::kAuto, ReadEngine::kThreads}) {
    for (bool direct : {true, false}) {
      for (uint64_t block_bytes : {uint64_t{4096}, 128 * kKiB, 4 * kMiB}) {
        INFO("engine " << static_cast<int>(engine) << ", direct " << direct << ", blocks of " << block_bytes);
        const auto set = ReadMirrors(sharded.model.layout, sharded.model.manifest,
                                     {.refill = {.engine = engine, .direct = direct, .block_bytes = block_bytes}});
        REQUIRE(set.ok());
        REQUIRE(set->mirrors.size() == 2);
        CheckImage(set->mirrors[0], sharded.model, 0, ExpectedImage(sharded.first));
        CheckImage(set->mirrors[1], sharded.model, 1, ExpectedImage(sharded.second));
        if (!direct) CHECK(set->report.direct_files == 0);
      }
    }
  }
}

TEST_CASE("components that were cut out of one file in turns are all read in one pass over it") {
  const TempDir dir;
  std::vector<std::vector<Range>> components(3);
  for (uint64_t i = 0; i < 300; ++i) components[i % 3].push_back({0, i * 10000, 10000});
  components.push_back({{0, 50, 0}});  // without bytes, so without memory
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 3000000)}, components);
  const auto set = ReadMirrors(model.layout, model.manifest, {.refill = {.block_bytes = 64 * kKiB}});
  REQUIRE(set.ok());
  REQUIRE(set->mirrors.size() == 4);
  for (uint32_t i = 0; i < 3; ++i) CheckImage(set->mirrors[i], model, i, ExpectedImage(components[i]));
  CHECK(set->mirrors[3].bytes() == 0);
  // Each page once.
  CHECK(set->report.read_bytes < 3000000 + 4096);
  CHECK(set->report.direct_files + set->report.buffered_files == 1);
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
    const auto mirror = ReadOne(model, 0, {.refill = {.block_bytes = 16 * kKiB}});
    REQUIRE(mirror.ok());
    CheckImage(*mirror, model, 0, ExpectedImage(ranges));
  }
}

TEST_CASE("tensors of a table that share bytes of the file are each mirrored") {
  const TempDir dir;
  const std::vector<Range> ranges = {{0, 0, kMiB}, {0, 1, kMiB}, {0, 1, 20}, {0, kMiB - 3, 3}};
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 2 * kMiB)}, {ranges});
  const auto mirror = ReadOne(model, 0, {.refill = {.block_bytes = 8192}});
  REQUIRE(mirror.ok());
  CheckImage(*mirror, model, 0, ExpectedImage(ranges));
}

TEST_CASE("a component may list its files in another order than the manifest") {
  const TempDir dir;
  const std::vector<Range> ranges = {{1, 100, 5000}, {0, 7, 3000}, {1, 5100, 10}, {0, 3007, 1}};
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 4000), WriteContent(dir.Path("b"), 1, 6000)}, {ranges});
  const auto mirror = ReadOne(model, 0);
  REQUIRE(mirror.ok());
  CheckImage(*mirror, model, 0, ExpectedImage(ranges));
}

TEST_CASE("cells larger than the component are cut to what it needs") {
  const TempDir dir;
  const std::vector<Range> ranges = {{0, 5, 3 * kMiB}, {0, 4 * kMiB, 100}};
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 5 * kMiB)}, {{{0, 0, 8}}, ranges}, 64 * kMiB);
  const auto mirror = ReadOne(model, 1);
  REQUIRE(mirror.ok());
  CHECK(mirror->bytes() == 4 * kMiB);
  CheckImage(*mirror, model, 1, ExpectedImage(ranges), 64 * kMiB);
}

TEST_CASE("a component of empty tensors has a mirror of its span") {
  const TempDir dir;
  const Model model = MakeModel({WriteContent(dir.Path("a"), 0, 100)}, {{{0, 50, 0}, {0, 100, 0}}});
  const auto mirror = ReadOne(model, 0);
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
  CHECK(seen.back() == sharded.model.layout.payload_bytes);
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
  const auto refused = [&](const Manifest& manifest) {
    return ReasonOf(ReadMirrors(sharded.model.layout, manifest, {}).status()) == "LAYOUT_MISMATCH";
  };
  Manifest fewer = sharded.model.manifest;
  fewer.components[1].tensors.pop_back();
  CHECK(refused(fewer));
  Manifest larger = sharded.model.manifest;
  larger.components[1].tensors[0].bytes += 1;
  CHECK(refused(larger));
  Manifest renamed = sharded.model.manifest;
  renamed.components[1].tensors[0].name = "other";
  CHECK(refused(renamed));
  Manifest one = sharded.model.manifest;
  one.components.pop_back();
  CHECK(refused(one));
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
  auto first = ReadOne(sharded.model, 0);
  REQUIRE(first.ok());
  *first = std::move(moved);
  CHECK(first->data() == data);
  CheckImage(*first, sharded.model, 1, ExpectedImage(sharded.second));
}

}  // namespace
}  // namespace residency

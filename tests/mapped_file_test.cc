// SPDX-License-Identifier: Apache-2.0
//
// The host tier `file`: cells that are filled from the weight files where they lie, and what becomes of it when
// somebody truncates, rewrites or replaces the files under a registration.
#include "mechanisms/mapped_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mechanisms/arena.h"
#include "mechanisms/digest.h"
#include "mechanisms/file_parts.h"
#include "mechanisms/file_source.h"
#include "mechanisms/refusal.h"
#include "tests/mirror_models.h"
#include "tests/source_files.h"
#include "tests/test_driver.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kPage = 4096;
using Components = std::vector<std::vector<Range>>;

// Odd offsets, tensors across the ends of cells and pieces, tensors smaller than a word, empty ones, neighbours that
// stay neighbours on the device, two files in one component, and one file in two.
const Components kComponents = {{{1, 0, 10}},
                                {{0, 13, 1000},
                                 {0, 1013, 0},
                                 {0, 1013, 2 * kMiB + 333},
                                 {0, 2 * kMiB + 1346, 1},
                                 {0, 2 * kMiB + 1347, 7},
                                 {0, 2 * kMiB + 1354, 9},
                                 {0, 3 * kMiB, 512 * kKiB},
                                 {0, 3 * kMiB + 512 * kKiB, 1536 * kKiB + 256},
                                 {0, 5 * kMiB + 256, 3 * kMiB + 77},
                                 {1, 3, kMiB + kMiB / 2},
                                 {1, 3 * kMiB + 4, 1}}};

// So old that a write now shows, however coarse the file system's clock is.
void MakeOld(const std::string& path) { fs::last_write_time(path, fs::last_write_time(path) - std::chrono::hours(24)); }

// The model of kComponents, its two files, and an arena for it.
struct Rig {
  explicit Rig(uint64_t piece_bytes = kFilePieceBytes, const Driver& driver = TestDriver())
      : device(OpenTestDevice(driver)), pool(*device), digester(*Digester::Create(*device)) {
    WriteContent(dir.Path("a"), 0, 8 * kMiB + 333);
    WriteContent(dir.Path("b"), 1, 3 * kMiB + 5);
    MakeOld(dir.Path("a"));
    MakeOld(dir.Path("b"));
    Model files = MakeModel({Describe(dir.Path("a")), Describe(dir.Path("b"))}, kComponents);
    manifest = std::move(files.manifest);
    layout = std::move(files.layout);
    options.piece_bytes = piece_bytes;
    arena = *Arena::Create(*device, pool, *digester, layout);
  }

  absl::Status Map() {
    auto mapped = MappedModel::Map(layout, manifest, *device, options);
    if (mapped.ok()) model = *std::move(mapped);
    return mapped.status();
  }
  absl::StatusOr<RealizeReport> Activate() { return arena->Realize(AllResident(layout), model->sources()); }
  absl::StatusOr<RealizeReport> Deactivate() { return arena->Realize(NoneResident(layout), model->sources()); }

  Bytes OnDevice(const LayoutComponent& component) const {
    Bytes read(component.span_bytes);
    auto stream = *device->CreateStream();
    REQUIRE(device->CopyToHost(read.data(), arena->address() + component.device_offset, read.size(), stream).ok());
    REQUIRE(device->Synchronize(stream).ok());
    return read;
  }
  bool HoldsItsFiles() const {
    for (size_t i = 0; i < kComponents.size(); ++i) {
      if (OnDevice(layout.components[i]) != ExpectedImage(kComponents[i])) return false;
    }
    return true;
  }
  void Spoil(uint64_t offset) const {
    const uint64_t junk = 0x1234567890abcdef;
    auto stream = *device->CreateStream();
    REQUIRE(device->CopyToDevice(arena->address() + offset, &junk, sizeof(junk), stream).ok());
    REQUIRE(device->Synchronize(stream).ok());
  }
  // Writes one byte in place, in the middle of a tensor.
  void Rewrite() const {
    std::fstream file(dir.Path("a"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4 * kMiB);
    file.put(static_cast<char>(~std::to_integer<int>(ByteAt(4 * kMiB, 0))));
    file.close();
    REQUIRE(file.good());
  }

  TempDir dir;
  Manifest manifest;
  Layout layout;
  MapOptions options;
  std::unique_ptr<Device> device;
  std::unique_ptr<MappedModel> model;  // arenas copy from it, so it goes after them
  CellPool pool;
  std::unique_ptr<Digester> digester;
  std::unique_ptr<Arena> arena;
};

// A table that calls `before` when a call of the kind comes, once for each Arm.
struct Interposed {
  Interposed() : driver(TestDriver()) {
    driver.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
      Fire(on_copy);
      return TestDriver().cuMemcpyHtoDAsync(to, from, bytes, stream);
    };
    driver.cuMemHostRegister = [](void* address, size_t bytes, unsigned flags) {
      if (left_to_register == 0) return CUDA_ERROR_OUT_OF_MEMORY;
      --left_to_register;
      Fire(on_register);
      return TestDriver().cuMemHostRegister(address, bytes, flags);
    };
    driver.cuDeviceGetAttribute = [](int* value, CUdevice_attribute attribute, CUdevice device) {
      const CUresult result = TestDriver().cuDeviceGetAttribute(value, attribute, device);
      if (attribute == CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED && !read_only_pin) *value = 0;
      return result;
    };
  }
  ~Interposed() {
    on_copy = on_register = nullptr;
    left_to_register = -1;
    read_only_pin = true;
  }
  static void Fire(std::function<void()>& armed) {
    if (auto act = std::exchange(armed, nullptr)) act();
  }
  static inline std::function<void()> on_copy;
  static inline std::function<void()> on_register;
  static inline int left_to_register = -1;
  static inline bool read_only_pin = true;
  Driver driver;
};

TEST_CASE("pages of tensors are locked in pieces, by file and offset, none twice, small gaps with them") {
  const Components components = {{{1, 5000, 100}, {0, 3 * kPage, 2 * kPage}, {0, 10, 20}},
                                 {{0, 3 * kPage + 5, 0}, {0, 40 * kMiB - 1, 2}, {1, 5050, 200}}};
  const Manifest manifest = MakeModel({{}, {}}, components).manifest;
  CHECK(FilePieces(manifest, 3 * kPage) ==
        std::vector<FilePiece>{{0, 0, 3 * kPage},          // up to the second tensor is a gap of two pages
                               {0, 3 * kPage, 2 * kPage},  // cut at the border of a piece
                               {0, 40 * kMiB - kPage, 2 * kPage},
                               {1, kPage, kPage}});
  CHECK(FilePieces(manifest, 256 * kMiB).size() == 3);
}

TEST_CASE("whoever gives a mapping up waits for at most 64 MiB to be read and locked") {
  const Manifest manifest = MakeModel({{}, {}}, {{{0, 10, 5 * kGiB}}, {{1, 0, 65 * kMiB}}}).manifest;
  const std::vector<FilePiece> pieces = FilePieces(manifest, MapOptions().piece_bytes);
  uint64_t most_bytes = 0;
  for (const FilePiece& piece : pieces) most_bytes = std::max(most_bytes, piece.bytes);
  CHECK(most_bytes == 64 * kMiB);
  // A call costs about as much as a few MiB, so they are not cut finer than that.
  CHECK(pieces.size() == 81 + 2);
}

TEST_CASE("a cell's parts are its tensors, cut at cells and pieces, neighbours together, with zeros between") {
  const Components components = {{{0, 100, 256}, {0, 356, 1000}, {0, 1356, 3 * kMiB}}, {{1, 0, 2 * kMiB}}, {}};
  const auto [manifest, layout] = MakeModel({{}, {}}, components);
  const Bytes memory(8);
  const std::byte* a = memory.data();
  const std::byte* b = a + (uint64_t{1} << 40);
  const std::vector<FilePiece> pieces = {{0, 0, kMiB}, {0, kMiB, 3 * kMiB}, {1, 0, 2 * kMiB}};
  const std::vector<const std::byte*> files = {a, b};
  // On the device the third tensor begins at 1280, 24 bytes further from the second than in the file.
  CHECK(FileParts(layout, 0, manifest, pieces, files) ==
        std::vector<std::vector<CellPart>>{
            {{0, 1256, a + 100}, {1256, 24, nullptr}, {1280, kMiB - 1356, a + 1356}, {kMiB - 76, kMiB + 76, a + kMiB}},
            {{0, kMiB + 1280, a + 2 * kMiB + 76}, {kMiB + 1280, kMiB - 1280, nullptr}}});
  CHECK(FileParts(layout, 1, manifest, pieces, files) == std::vector<std::vector<CellPart>>{{{0, 2 * kMiB, b}}});
  CHECK(FileParts(layout, 2, manifest, pieces, files).empty());
}

TEST_CASE("a model filled from its mapped files has their bytes and zeros between, however the files are cut") {
  for (const uint64_t piece_bytes : {3 * kPage, 256 * kKiB, kFilePieceBytes}) {
    INFO("pieces of " << piece_bytes);
    Rig rig(piece_bytes);
    const uint64_t copied_before_bytes = rig.device->copied_to_host_bytes();
    REQUIRE(rig.Map().ok());
    CHECK(rig.model->pinned_bytes() == AlignUp(8 * kMiB + 333, kPage) + AlignUp(3 * kMiB + 5, kPage));
    CHECK(rig.device->registered_host_bytes() == rig.model->pinned_bytes());
    // What the files hold was not digested yet, so the first time it counts as right, and is said to.
    const auto first = rig.Activate();
    REQUIRE(first.ok());
    CHECK(first->trusted_cells == rig.layout.cells.size());
    CHECK(first->verified_cells == 0);
    CHECK(first->copied_bytes == rig.layout.payload_bytes);
    CHECK(rig.device->copied_to_host_bytes() - copied_before_bytes <= 8 * rig.layout.cells.size());
    CHECK(rig.HoldsItsFiles());
    REQUIRE(rig.Deactivate().ok());
    const auto second = rig.Activate();
    REQUIRE(second.ok());
    CHECK(second->trusted_cells == 0);
    CHECK(second->verified_cells == rig.layout.cells.size());
    CHECK(second->refilled_cells == 0);
    CHECK(rig.HoldsItsFiles());
    // The digests are those that a mirror of the files would have.
    for (uint32_t cell = 0; cell < rig.layout.cells.size(); ++cell) {
      const LayoutCell& place = rig.layout.cells[cell];
      const Bytes image = ExpectedImage(kComponents[place.component]);
      const auto* words = reinterpret_cast<const uint64_t*>(
          image.data() + (place.device_offset - rig.layout.components[place.component].device_offset));
      const uint64_t digest = DigestWordsPortable(words, place.bytes / 8, 0);
      CHECK(rig.model->sources()[place.component]->Accept(cell, digest));
      CHECK_FALSE(rig.model->sources()[place.component]->Accept(cell, digest + 1));
    }
    REQUIRE(rig.Deactivate().ok());
    rig.model.reset();
    CHECK(rig.device->registered_host_bytes() == 0);
  }
}

TEST_CASE(
    "files that were truncated, written to, replaced or removed refuse the next activation, which moves nothing") {
  struct Change {
    const char* what;
    std::function<void(const Rig&)> make;
    const char* reason;
  };
  const std::vector<Change> changes = {
      {"cut", [](const Rig& rig) { fs::resize_file(rig.dir.Path("a"), 3 * kMiB + 1); }, "FILE_CHANGED"},
      {"emptied", [](const Rig& rig) { fs::resize_file(rig.dir.Path("a"), 0); }, "FILE_CHANGED"},
      {"grown", [](const Rig& rig) { fs::resize_file(rig.dir.Path("b"), 4 * kMiB); }, "FILE_CHANGED"},
      {"written to", [](const Rig& rig) { rig.Rewrite(); }, "FILE_CHANGED"},
      {"replaced",
       [](const Rig& rig) {
         fs::copy_file(rig.dir.Path("a"), rig.dir.Path("c"));
         fs::last_write_time(rig.dir.Path("c"), fs::last_write_time(rig.dir.Path("a")));
         fs::rename(rig.dir.Path("c"), rig.dir.Path("a"));
       },
       "FILE_CHANGED"},
      {"removed", [](const Rig& rig) { fs::remove(rig.dir.Path("b")); }, "FILE_MISSING"},
  };
  for (const bool activated_before : {false, true}) {
    for (const Change& change : changes) {
      INFO(change.what << ", " << (activated_before ? "after" : "before") << " a first activation");
      Rig rig;
      REQUIRE(rig.Map().ok());
      if (activated_before) {
        REQUIRE(rig.Activate().ok());
        REQUIRE(rig.Deactivate().ok());
      }
      change.make(rig);
      const absl::Status refused = rig.Activate().status();
      INFO(refused.ToString());
      CHECK(ReasonOf(refused) == change.reason);
      CHECK(GetRefusal(refused)->file.starts_with(rig.dir.Path("")));
      CHECK_FALSE(rig.arena->broken());
      CHECK(rig.arena->Measure().device_bytes == 0);
      // The same files mapped again are refused as well, until somebody reads their headers anew.
      rig.model.reset();
      CHECK(ReasonOf(rig.Map()) == change.reason);
      CHECK(rig.device->registered_host_bytes() == 0);
      CHECK(rig.device->Lost().ok());
    }
  }
}

TEST_CASE("a file that is cut while its bytes are copied refuses that activation, and its digests are forgotten") {
  Interposed interposed;
  Rig rig(kFilePieceBytes, interposed.driver);
  REQUIRE(rig.Map().ok());
  Interposed::on_copy = [&rig] { fs::resize_file(rig.dir.Path("a"), kPage); };
  CHECK(ReasonOf(rig.Activate().status()) == "FILE_CHANGED");
  CHECK(rig.device->Lost().ok());
  CHECK_FALSE(rig.arena->broken());
  CHECK(rig.arena->Measure().device_bytes == 0);
  for (uint32_t cell = 1; cell < rig.layout.cells.size(); ++cell) CHECK_FALSE(rig.model->sources()[1]->HasDigest(cell));
}

TEST_CASE("bytes that were written in place are found by their digest where the time of the last write was put back") {
  Rig rig;
  REQUIRE(rig.Map().ok());
  REQUIRE(rig.Activate().ok());
  REQUIRE(rig.Deactivate().ok());
  const auto time = fs::last_write_time(rig.dir.Path("a"));
  rig.Rewrite();
  fs::last_write_time(rig.dir.Path("a"), time);
  const absl::Status refused = rig.Activate().status();
  CHECK(refused.code() == absl::StatusCode::kDataLoss);
  CHECK(ReasonOf(refused) == "VERIFY");
  CHECK_FALSE(rig.arena->broken());
  CHECK(rig.arena->Measure().device_bytes == 0);
}

TEST_CASE("a cell that went wrong on the device is put right from the files, and from changed ones never") {
  Rig rig;
  REQUIRE(rig.Map().ok());
  REQUIRE(rig.Activate().ok());
  rig.Spoil(5 * kMiB);
  CHECK(rig.arena->Verify(rig.model->sources())->refilled_cells == 1);
  CHECK(rig.HoldsItsFiles());
  // That a file was touched says nothing about its bytes once there is a digest.
  fs::last_write_time(rig.dir.Path("a"), fs::file_time_type::clock::now());
  rig.Spoil(5 * kMiB);
  CHECK(rig.arena->Verify(rig.model->sources())->refilled_cells == 1);
  CHECK(rig.HoldsItsFiles());
  rig.Rewrite();
  CHECK(rig.arena->Verify(rig.model->sources())->refilled_cells == 0);
  rig.Spoil(5 * kMiB);  // in the same cell
  const absl::Status refused = rig.arena->Verify(rig.model->sources()).status();
  INFO(refused.ToString());
  CHECK(ReasonOf(refused) == "FILE_CHANGED");
  CHECK(rig.arena->broken());
  CHECK(rig.Deactivate().ok());
}

TEST_CASE("a file that is cut while its pages are being locked is refused, and nothing stays locked") {
  Interposed interposed;
  Rig rig(256 * kKiB, interposed.driver);
  Interposed::on_register = [&rig] { fs::resize_file(rig.dir.Path("a"), 0); };
  const absl::Status refused = rig.Map();
  CHECK(ReasonOf(refused) == "FILE_CHANGED");
  CHECK(GetRefusal(refused)->file == rig.dir.Path("a"));
  CHECK(rig.device->registered_host_bytes() == 0);
}

TEST_CASE("what cannot be locked as a whole is refused with both figures, or given up, and nothing stays locked") {
  Interposed interposed;
  Rig rig(kMiB, interposed.driver);
  Interposed::left_to_register = 3;
  const absl::Status refused = rig.Map();
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK(ReasonOf(refused) == "PIN_LIMIT");
  CHECK(GetRefusal(refused)->needed_bytes == AlignUp(8 * kMiB + 333, kPage) + AlignUp(3 * kMiB + 5, kPage));
  CHECK(GetRefusal(refused)->available_bytes == 3 * kMiB);
  CHECK(rig.device->registered_host_bytes() == 0);
  Interposed::left_to_register = -1;
  std::vector<uint64_t> seen;
  rig.options.progress = [&seen](uint64_t bytes) {
    seen.push_back(bytes);
    return seen.size() < 2;
  };
  CHECK(ReasonOf(rig.Map()) == "CANCELLED");
  CHECK(seen == std::vector<uint64_t>{kMiB, 2 * kMiB});
  CHECK(rig.device->registered_host_bytes() == 0);
}

TEST_CASE("a device that locks no memory for reading only, and a file system that maps no files, are refused as such") {
  Interposed interposed;
  Interposed::read_only_pin = false;
  Rig rig(kFilePieceBytes, interposed.driver);
  CHECK(rig.Map().code() == absl::StatusCode::kFailedPrecondition);
  CHECK(ReasonOf(rig.Map()) == "NO_READONLY_PIN");
  const std::string path = "/sys/kernel/uevent_seqnum";
  const absl::Status refused = MappedFile::Map(Describe(path)).status();
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(ReasonOf(refused) == "NOT_MAPPABLE");
  CHECK(GetRefusal(refused)->file == path);
}

}  // namespace
}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
//
// Models of files of known content for tests of mirrors, and what their mirrors must hold.
#ifndef RESIDENCY_TESTS_MIRROR_MODELS_H_
#define RESIDENCY_TESTS_MIRROR_MODELS_H_

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "mechanisms/digest.h"
#include "mechanisms/mirror_read.h"
#include "tests/source_files.h"

namespace residency {

inline constexpr uint64_t kCellBytes = 2 * kMiB;

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

inline Model MakeModel(std::vector<SourceFile> files, const std::vector<std::vector<Range>>& components,
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
inline Bytes ExpectedImage(const std::vector<Range>& ranges) {
  Bytes image;
  for (const Range& range : ranges) {
    image.resize((image.size() + 255) / 256 * 256);
    const Bytes content = Content(range.file, range.file_offset, range.bytes);
    image.insert(image.end(), content.begin(), content.end());
  }
  image.resize((image.size() + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB));
  return image;
}

inline void CheckImage(const Mirror& mirror, const Model& model, uint32_t component_index, const Bytes& expected,
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

// One component's mirror, of a set.
inline absl::StatusOr<Mirror> ReadOne(const Model& model, uint32_t component_index, const MirrorOptions& options = {}) {
  auto set = ReadMirrors(model.layout, model.manifest, options);
  if (!set.ok()) return set.status();
  REQUIRE(set->mirrors.size() == model.layout.components.size());
  return std::move(set->mirrors[component_index]);
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

  absl::StatusOr<Mirror> Build(const MirrorOptions& options = {}) const { return ReadOne(model, 1, options); }
};

// Something that happens once, and that other threads wait for.
class Happening {
 public:
  void Say() {
    std::lock_guard lock(mutex_);
    happened_ = true;
    changed_.notify_all();
  }
  bool Await() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [this] { return happened_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
};

inline size_t MirrorMappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:residency-") != std::string::npos;
  return count;
}

}  // namespace residency

#endif  // RESIDENCY_TESTS_MIRROR_MODELS_H_

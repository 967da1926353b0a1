// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints spelled out by hand, byte for byte, for the tests of manifests. Headers are given as text, so that a test
// shows what is on disk and can write what no library would.
#ifndef RESIDENCY_TESTS_CHECKPOINT_FIXTURE_H_
#define RESIDENCY_TESTS_CHECKPOINT_FIXTURE_H_

#include <catch2/catch.hpp>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "mechanisms/manifest.h"
#include "mechanisms/refusal.h"
#include "tests/source_files.h"

namespace residency {

// The 8 bytes of a header's length.
inline std::string LengthPrefix(uint64_t length) {
  std::string prefix;
  for (int shift = 0; shift < 64; shift += 8) prefix.push_back(static_cast<char>(length >> shift));
  return prefix;
}

// A safetensors file with `header` as it stands and `data_bytes` bytes of data.
inline std::string Safetensors(std::string_view header, uint64_t data_bytes) {
  return LengthPrefix(header.size()) + std::string(header) + std::string(data_bytes, 'd');
}

// An entry of a header: "NAME":{"dtype":...}.
inline std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape, uint64_t begin,
                         uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// A file of U8 tensors of these names, of 1, 2, 3, ... bytes.
inline std::string SafetensorsOf(const std::vector<std::string>& names) {
  std::string header = "{";
  uint64_t end = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const uint64_t bytes = i + 1;
    header += (i == 0 ? "" : ",") + Entry(names[i], "U8", "[" + std::to_string(bytes) + "]", end, end + bytes);
    end += bytes;
  }
  return Safetensors(header + "}", end);
}

// A directory to build a checkpoint in.
class CheckpointDir {
 public:
  // Writes `contents` to `name` below the directory, which may contain folders, and returns its path.
  std::string Write(const std::string& name, std::string_view contents) {
    const std::string path = Path(name);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    // Some file systems wait for the disk when a file is emptied and written anew.
    std::filesystem::remove(path);
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
    file.close();
    REQUIRE(file.good());
    return path;
  }

  void Link(const std::string& name, const std::string& target) {
    std::filesystem::create_directories(std::filesystem::path(Path(name)).parent_path());
    std::filesystem::create_symlink(target, Path(name));
  }

  std::string Path(const std::string& name) const { return directory_.Path(name); }

 private:
  TempDir directory_;
};

inline Manifest ReadGood(const std::string& source, const std::vector<ComponentSource>& components = {}) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(source, components);
  INFO(manifest.status().ToString());
  REQUIRE(manifest.ok());
  return *manifest;
}

// What is wrong with `source`, and that the refusal is well formed.
inline Refusal ReadBad(const std::string& source, const std::vector<ComponentSource>& components = {}) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(source, components);
  REQUIRE_FALSE(manifest.ok());
  const std::optional<Refusal> refusal = GetRefusal(manifest.status());
  INFO(manifest.status().ToString());
  REQUIRE(refusal.has_value());
  const bool is_missing = refusal->reason == "NO_SUCH_FILE" || refusal->reason == "FILE_MISSING";
  CHECK(manifest.status().code() == (is_missing ? absl::StatusCode::kNotFound : absl::StatusCode::kInvalidArgument));
  CHECK(std::string(manifest.status().message()).find(refusal->file) != std::string::npos);
  CHECK(std::string(manifest.status().message()).find(refusal->tensor) != std::string::npos);
  return *refusal;
}

inline std::string MessageOf(const std::string& source, const std::vector<ComponentSource>& components = {}) {
  return std::string(ReadManifest(source, components).status().message());
}

// "component/tensor" of all tensors, in order.
inline std::vector<std::string> NamesOf(const Manifest& manifest) {
  std::vector<std::string> names;
  for (const ManifestComponent& component : manifest.components) {
    for (const ManifestTensor& tensor : component.tensors) names.push_back(component.name + "/" + tensor.name);
  }
  return names;
}

}  // namespace residency

#endif  // RESIDENCY_TESTS_CHECKPOINT_FIXTURE_H_

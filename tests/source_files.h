// SPDX-License-Identifier: Apache-2.0
//
// Files of known content for tests that read model files. Every byte follows from its position and a seed, so a test
// knows what it must find anywhere without having read it.
#ifndef RESIDENCY_TESTS_SOURCE_FILES_H_
#define RESIDENCY_TESTS_SOURCE_FILES_H_

#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "mechanisms/manifest.h"

namespace residency {

using Bytes = std::vector<std::byte>;

inline std::byte ByteAt(uint64_t position, uint64_t seed) {
  uint64_t value = (position + 1) * 6364136223846793005u + seed * 1442695040888963407u;
  return static_cast<std::byte>(value >> 37);
}

// Bytes [offset, offset + count) of the endless file `seed`.
inline Bytes Content(uint64_t seed, uint64_t offset, uint64_t count) {
  Bytes bytes(count);
  for (uint64_t i = 0; i < count; ++i) bytes[i] = ByteAt(offset + i, seed);
  return bytes;
}

// A directory that goes with the object.
class TempDir {
 public:
  TempDir() {
    const char* base = std::getenv("TEST_TMPDIR");
    std::string name = std::string(base != nullptr ? base : "/tmp") + "/residency-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline SourceFile Describe(const std::string& path) {
  struct stat now;
  REQUIRE(::stat(path.c_str(), &now) == 0);
  return {.path = path,
          .bytes = static_cast<uint64_t>(now.st_size),
          .device = now.st_dev,
          .inode = now.st_ino,
          .mtime_ns = int64_t{now.st_mtim.tv_sec} * 1'000'000'000 + now.st_mtim.tv_nsec};
}

// Writes the first `count` bytes of the endless file `seed` to `path`.
inline SourceFile WriteContent(const std::string& path, uint64_t seed, uint64_t count) {
  const Bytes bytes = Content(seed, 0, count);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  REQUIRE(file.good());
  return Describe(path);
}

// Descriptors that this process has open.
inline size_t OpenDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

}  // namespace residency

#endif  // RESIDENCY_TESTS_SOURCE_FILES_H_

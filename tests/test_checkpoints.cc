// SPDX-License-Identifier: Apache-2.0
#include "tests/test_checkpoints.h"

#include <openssl/sha.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

fs::path DataFolder() {
  if (const char* given = std::getenv("RESIDENCY_TEST_DATA"); given != nullptr && *given != '\0') return given;
  const fs::path self = fs::read_symlink("/proc/self/exe").parent_path().parent_path();
  for (const fs::path& top : {fs::current_path(), self}) {
    if (fs::exists(top / "tests/data/real/truth.json")) return top / "tests/data/real";
  }
  throw std::runtime_error("no tests/data/real here; RESIDENCY_TEST_DATA can name it");
}

// The truth has PyTorch's names.
std::string FormatName(const std::string& dtype) {
  static const std::map<std::string, std::string> names = {
      {"bfloat16", "BF16"}, {"float8_e4m3fn", "F8_E4M3"}, {"float16", "F16"}, {"float32", "F32"}, {"int64", "I64"}};
  return names.at(dtype);
}

// Bytes that no other tensor of any test has.
std::vector<char> RandomBytes(uint64_t bytes, std::mt19937_64& random) {
  std::vector<char> made(bytes);
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(&made[i], &word, std::min<uint64_t>(sizeof(word), bytes - i));
  }
  return made;
}

std::string Sha256(const std::vector<char>& bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

std::string Header(const std::vector<NamedBytes>& tensors) {
  nlohmann::json header;
  uint64_t offset = 0;
  for (const NamedBytes& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", "U8"}, {"shape", {tensor.bytes}}, {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  return header.dump();
}

}  // namespace

std::string RealCheckpoint(const std::string& folder) { return fs::absolute(DataFolder() / folder).string(); }

std::vector<TrueTensor> TrueTensors(const std::string& folder) {
  std::vector<TrueTensor> tensors;
  const auto truth = nlohmann::json::parse(std::ifstream(DataFolder() / "truth.json"));
  for (const auto& [path, entries] : truth.items()) {
    const std::vector<std::string> parts = absl::StrSplit(path, '/');
    if (parts.front() != folder) continue;
    for (const auto& [name, entry] : entries.items()) {
      tensors.push_back({.component = parts.size() > 2 ? parts[1] : "",
                         .name = name,
                         .dtype = FormatName(entry.at("dtype")),
                         .shape = entry.at("shape").get<std::vector<uint64_t>>(),
                         .bytes = entry.at("bytes"),
                         .sha256 = entry.at("sha256")});
    }
  }
  REQUIRE_FALSE(tensors.empty());
  return tensors;
}

Hashes TrueHashes(const std::string& folder) {
  const std::vector<TrueTensor> tensors = TrueTensors(folder);
  std::map<std::string, int> uses;
  for (const TrueTensor& tensor : tensors) ++uses[tensor.name];
  Hashes hashes;
  for (const TrueTensor& tensor : tensors) {
    const bool unique = uses[tensor.name] == 1;
    hashes[unique ? tensor.name : absl::StrCat(tensor.component, "/", tensor.name)] = tensor.sha256;
  }
  REQUIRE(hashes.size() == tensors.size());
  return hashes;
}

Hashes WriteNamedCheckpoint(const std::string& path, const std::vector<NamedBytes>& tensors, uint64_t seed) {
  const std::string header = Header(tensors);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (int shift = 0; shift < 64; shift += 8) file.put(static_cast<char>(uint64_t{header.size()} >> shift));
  file << header;
  std::mt19937_64 random(seed);
  Hashes hashes;
  for (const NamedBytes& tensor : tensors) {
    const std::vector<char> bytes = RandomBytes(tensor.bytes, random);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    hashes[tensor.name] = Sha256(bytes);
  }
  file.close();
  REQUIRE(file.good());
  return hashes;
}

void WriteSparseCheckpoint(const std::string& path, const std::vector<uint64_t>& tensor_bytes, uint64_t seed) {
  constexpr uint64_t kPageBytes = 4096;
  constexpr uint64_t kStrideBytes = 2 << 20;
  std::vector<NamedBytes> tensors;
  uint64_t all_bytes = 0;
  for (size_t i = 0; i < tensor_bytes.size(); ++i) {
    tensors.push_back({absl::StrCat("t", i), tensor_bytes[i]});
    all_bytes += tensor_bytes[i];
  }
  const std::string header = Header(tensors);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (int shift = 0; shift < 64; shift += 8) file.put(static_cast<char>(uint64_t{header.size()} >> shift));
  file << header;
  const uint64_t data_begin = 8 + header.size();
  std::mt19937_64 random(seed);
  for (uint64_t offset = 0; offset < all_bytes; offset += kStrideBytes) {
    const std::vector<char> page = RandomBytes(std::min(kPageBytes, all_bytes - offset), random);
    file.seekp(static_cast<std::streamoff>(data_begin + offset));
    file.write(page.data(), static_cast<std::streamsize>(page.size()));
  }
  file.close();
  REQUIRE(file.good());
  fs::resize_file(path, data_begin + all_bytes);
}

Hashes WriteCheckpoint(const std::string& path, const std::vector<uint64_t>& tensor_bytes, uint64_t seed) {
  std::vector<NamedBytes> tensors;
  for (size_t i = 0; i < tensor_bytes.size(); ++i) tensors.push_back({absl::StrCat("t", i), tensor_bytes[i]});
  return WriteNamedCheckpoint(path, tensors, seed);
}

}  // namespace residency

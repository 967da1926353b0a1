// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/file_kind.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/ascii.h"

namespace residency {
namespace {

constexpr uint64_t kLookedAtBytes = 256;

struct Beginning {
  std::string_view magic;
  std::string_view name;
  bool is_stand_in = false;
};

using namespace std::string_view_literals;

// Binary kinds, by the bytes that they begin with.
constexpr std::array<Beginning, 12> kBinaryKinds = {{
    {"version https://git-lfs"sv, "a Git LFS pointer (the weights were not downloaded; git lfs pull fetches them)"sv,
     true},
    {"GGUF"sv, "a GGUF file (describe its tensors in an explicit table, NAME.tensors.json)"sv},
    {"PK\x03\x04"sv, "a zip archive, as PyTorch writes for .bin and .pt (convert it to safetensors)"sv},
    {"\x80\x02"sv, "a Python pickle, as older PyTorch writes (convert it to safetensors)"sv},
    {"\x80\x03"sv, "a Python pickle (convert it to safetensors)"sv},
    {"\x80\x04"sv, "a Python pickle (convert it to safetensors)"sv},
    {"\x80\x05"sv, "a Python pickle (convert it to safetensors)"sv},
    {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file (convert it to safetensors)"sv},
    {"\x1f\x8b"sv, "a gzip archive"sv},
    {"\x28\xb5\x2f\xfd"sv, "a Zstandard archive"sv},
    {"\0\0\0\0\0\0\0\0"sv, "a file that begins with zeros (the download reserved the room and did not fill it)"sv},
    {"\x93NUMPY"sv, "a NumPy array (convert it to safetensors)"sv},
}};

// Texts, by what they begin with once space is taken off and letters are small.
constexpr std::array<Beginning, 5> kTextKinds = {{
    {"<!doctype"sv, "a web page (the download saved an error page)"sv, true},
    {"<html"sv, "a web page (the download saved an error page)"sv, true},
    {"<?xml"sv, "an XML text (the download saved an error reply)"sv, true},
    {"{\""sv, "a JSON text"sv},
    {"[{"sv, "a JSON text"sv},
}};

}  // namespace

std::optional<FileKind> FileKindOf(const RegularFile& file) {
  std::string begin(std::min(file.stat.bytes, kLookedAtBytes), '\0');
  if (!ReadAt(file, 0, begin.size(), begin.data()).ok()) return std::nullopt;
  for (const Beginning& kind : kBinaryKinds) {
    if (begin.compare(0, kind.magic.size(), kind.magic) == 0) return FileKind{kind.name, kind.is_stand_in};
  }
  absl::StripLeadingAsciiWhitespace(&begin);
  absl::AsciiStrToLower(&begin);
  for (const Beginning& kind : kTextKinds) {
    if (begin.compare(0, kind.magic.size(), kind.magic) == 0) return FileKind{kind.name, kind.is_stand_in};
  }
  return std::nullopt;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/safetensors_header.h"

#include <simdjson.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "mechanisms/file_kind.h"
#include "mechanisms/json_entry.h"
#include "mechanisms/refusal.h"
#include "mechanisms/regular_file.h"

namespace residency {
namespace {

constexpr uint64_t kPrefixBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

// A refusal for a file that does not even begin like the format: by what it really is, where that shows.
absl::Status RefuseBeginning(const RegularFile& file, std::string_view reason, std::string_view why) {
  const std::optional<FileKind> kind = FileKindOf(file);
  if (!kind.has_value()) return RefuseFile(reason, file.stat.path, "", why);
  return RefuseFile("NOT_A_CHECKPOINT", file.stat.path, "",
                    absl::StrFormat("not a safetensors file but %s", kind->name));
}

// The header's length, held against the format's limit and the file's end.
absl::StatusOr<uint64_t> ReadHeaderLength(const RegularFile& file) {
  if (file.stat.bytes == 0) return RefuseFile("HEADER_TOO_SMALL", file.stat.path, "", "the file is empty");
  if (file.stat.bytes < kPrefixBytes) {
    return RefuseBeginning(file, "HEADER_TOO_SMALL",
                           absl::StrFormat("%d bytes, fewer than the 8 of a header's length", file.stat.bytes));
  }
  unsigned char prefix[kPrefixBytes];
  if (absl::Status status = ReadAt(file, 0, kPrefixBytes, reinterpret_cast<char*>(prefix)); !status.ok()) {
    return status;
  }
  uint64_t length = 0;
  for (uint64_t i = 0; i < kPrefixBytes; ++i) length |= uint64_t{prefix[i]} << (8 * i);
  if (length > kMaxHeaderBytes) {
    return RefuseBeginning(file, "HEADER_TOO_LARGE",
                           absl::StrFormat("a header of %d bytes, the format's limit is %d", length, kMaxHeaderBytes));
  }
  // Not 8 + length > bytes, which wraps for a hostile length.
  if (length > file.stat.bytes - kPrefixBytes) {
    return RefuseBeginning(file, "TRUNCATED",
                           absl::StrFormat("a header of %d bytes in a file of %d bytes", length, file.stat.bytes));
  }
  return length;
}

absl::Status CheckMetadata(const std::string& path, simdjson::dom::element value) {
  // Shipped models have a null here; it means none.
  if (value.is_null()) return absl::OkStatus();
  simdjson::dom::object metadata;
  if (value.get_object().get(metadata) != simdjson::SUCCESS) {
    return RefuseFile("BAD_METADATA", path, "", "__metadata__ is no object");
  }
  for (const simdjson::dom::key_value_pair field : metadata) {
    if (!field.value.is_string()) {
      return RefuseFile("BAD_METADATA", path, "",
                        absl::StrFormat("the value of __metadata__'s %s is no string", NameForMessage(field.key)));
    }
  }
  return absl::OkStatus();
}

// data_offsets, still relative to the data section.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
};

absl::StatusOr<Range> RangeOf(const EntrySite& site, simdjson::dom::element value) {
  simdjson::dom::array offsets;
  if (value.get_array().get(offsets) != simdjson::SUCCESS || offsets.size() != 2) {
    return RefuseFile(site.reason, site.file, site.tensor, "data_offsets is no array of two numbers");
  }
  absl::StatusOr<uint64_t> begin = CountOf(site, "BAD_OFFSETS", "data_offsets' begin", offsets.at(0).value_unsafe());
  if (!begin.ok()) return begin.status();
  absl::StatusOr<uint64_t> end = CountOf(site, "BAD_OFFSETS", "data_offsets' end", offsets.at(1).value_unsafe());
  if (!end.ok()) return end.status();
  if (*begin > *end) {
    return RefuseFile("BAD_OFFSETS", site.file, site.tensor,
                      absl::StrFormat("data_offsets begin at %d and end before, at %d", *begin, *end));
  }
  return Range{*begin, *end};
}

// The three fields of an entry; keys that the format does not know are let pass.
struct EntryFields {
  std::optional<simdjson::dom::element> dtype;
  std::optional<simdjson::dom::element> shape;
  std::optional<simdjson::dom::element> data_offsets;
};

absl::StatusOr<EntryFields> FieldsOf(const EntrySite& site, simdjson::dom::object entry) {
  EntryFields fields;
  for (const simdjson::dom::key_value_pair field : entry) {
    std::optional<simdjson::dom::element>* slot = nullptr;
    if (field.key == "dtype") slot = &fields.dtype;
    if (field.key == "shape") slot = &fields.shape;
    if (field.key == "data_offsets") slot = &fields.data_offsets;
    if (slot == nullptr) continue;
    if (slot->has_value()) return FieldTwice(site, field.key);
    *slot = field.value;
  }
  if (!fields.dtype.has_value()) return FieldMissing(site, "dtype");
  if (!fields.shape.has_value()) return FieldMissing(site, "shape");
  if (!fields.data_offsets.has_value()) return FieldMissing(site, "data_offsets");
  return fields;
}

// One entry as a tensor whose offset is still relative to the data section.
absl::StatusOr<ManifestTensor> TensorOf(const std::string& path, std::string_view name, simdjson::dom::element value) {
  const EntrySite site{path, name, "BAD_HEADER"};
  if (absl::Status status = CheckNameLength(site, "its name", name); !status.ok()) return status;
  simdjson::dom::object entry;
  if (value.get_object().get(entry) != simdjson::SUCCESS) {
    return RefuseFile("BAD_HEADER", path, name, "its entry is no object");
  }
  absl::StatusOr<EntryFields> fields = FieldsOf(site, entry);
  if (!fields.ok()) return fields.status();
  absl::StatusOr<DType> dtype = DTypeOf(site, *fields->dtype);
  if (!dtype.ok()) return dtype.status();
  absl::StatusOr<std::vector<uint64_t>> shape = ShapeOf(site, *fields->shape);
  if (!shape.ok()) return shape.status();
  absl::StatusOr<Range> range = RangeOf(site, *fields->data_offsets);
  if (!range.ok()) return range.status();

  ManifestTensor tensor;
  tensor.name = name;
  tensor.dtype = *dtype;
  tensor.shape = std::move(*shape);
  tensor.file_offset = range->begin;
  tensor.bytes = range->end - range->begin;
  if (absl::Status status = CheckTensorBytes(site, tensor.dtype, tensor.shape, "data_offsets", tensor.bytes);
      !status.ok()) {
    return status;
  }
  return tensor;
}

absl::StatusOr<std::vector<ManifestTensor>> TensorsOf(const std::string& path, simdjson::dom::object header) {
  std::vector<ManifestTensor> tensors;
  tensors.reserve(header.size());
  bool metadata_seen = false;
  for (const simdjson::dom::key_value_pair field : header) {
    if (field.key == kMetadataKey) {
      if (std::exchange(metadata_seen, true)) {
        return RefuseFile("DUPLICATE_NAME", path, "", "__metadata__ is there twice");
      }
      if (absl::Status status = CheckMetadata(path, field.value); !status.ok()) return status;
      continue;
    }
    absl::StatusOr<ManifestTensor> tensor = TensorOf(path, field.key, field.value);
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(std::move(*tensor));
  }
  return tensors;
}

// The format's rule: sorted by offset, the tensors tile the data section from its first byte to the
// file's last. `tensors` are sorted.
absl::Status CheckTiling(const std::vector<ManifestTensor>& tensors, const std::string& path, uint64_t data_bytes) {
  uint64_t end = 0;
  for (const ManifestTensor& tensor : tensors) {
    if (tensor.file_offset != end) {
      return RefuseFile("BAD_OFFSETS", path, tensor.name,
                        tensor.file_offset > end
                            ? absl::StrFormat("begins at %d of the data, but what comes before it ends at %d",
                                              tensor.file_offset, end)
                            : absl::StrFormat("begins at %d of the data, inside another tensor that ends at %d",
                                              tensor.file_offset, end));
    }
    end += tensor.bytes;
  }
  if (end > data_bytes) {
    return RefuseFile(
        "TRUNCATED", path, tensors.back().name,
        absl::StrFormat("the tensors end at %d of the data, but the file has %d bytes of data", end, data_bytes));
  }
  if (end < data_bytes) {
    return RefuseFile("BAD_OFFSETS", path, "",
                      absl::StrFormat("%d bytes after the last tensor belong to nothing", data_bytes - end));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckUniqueNames(const std::vector<ManifestTensor>& tensors, const std::string& file) {
  // Sorted rather than hashed: no file can choose names that make it slow.
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const ManifestTensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return absl::OkStatus();
  return RefuseFile("DUPLICATE_NAME", file, *twice, "the name is there twice");
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path, std::string_view missing_reason) {
  absl::StatusOr<RegularFile> file = OpenRegularFile(path, missing_reason);
  if (!file.ok()) return file.status();
  absl::StatusOr<uint64_t> length = ReadHeaderLength(*file);
  if (!length.ok()) return length.status();
  simdjson::padded_string text(*length);
  if (absl::Status status = ReadAt(*file, kPrefixBytes, *length, text.data()); !status.ok()) return status;
  if (*length == 0 || text.data()[0] != '{') {
    return RefuseBeginning(*file, "BAD_HEADER", "the header does not begin with {");
  }
  JsonDocument document;
  if (absl::Status status = ParseJson(text, path, "BAD_HEADER", &document); !status.ok()) return status;
  simdjson::dom::object object;
  if (document.root.get_object().get(object) != simdjson::SUCCESS) {
    return RefuseFile("BAD_HEADER", path, "", "the header is no JSON object");
  }
  absl::StatusOr<std::vector<ManifestTensor>> tensors = TensorsOf(path, object);
  if (!tensors.ok()) return tensors.status();
  if (absl::Status status = CheckUniqueNames(*tensors, path); !status.ok()) return status;
  // Empty tensors share their offset with the tensor that follows, and come before it.
  std::stable_sort(tensors->begin(), tensors->end(), [](const ManifestTensor& a, const ManifestTensor& b) {
    return std::tie(a.file_offset, a.bytes) < std::tie(b.file_offset, b.bytes);
  });
  const uint64_t data_offset = kPrefixBytes + *length;
  if (absl::Status status = CheckTiling(*tensors, path, file->stat.bytes - data_offset); !status.ok()) return status;
  for (ManifestTensor& tensor : *tensors) tensor.file_offset += data_offset;
  return SafetensorsHeader{std::move(file->stat), std::move(*tensors)};
}

}  // namespace residency

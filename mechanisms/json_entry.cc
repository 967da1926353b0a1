// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/json_entry.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "mechanisms/file_kind.h"
#include "mechanisms/refusal.h"
#include "mechanisms/regular_file.h"

namespace residency {
namespace {

constexpr size_t kMaxShownDimensions = 8;

// A value as an error shows it: scalars as they are, the rest by their kind, so that it stays short.
std::string Shown(simdjson::dom::element value) {
  switch (value.type()) {
    case simdjson::dom::element_type::ARRAY:
      return "an array";
    case simdjson::dom::element_type::OBJECT:
      return "an object";
    case simdjson::dom::element_type::STRING:
      return absl::StrCat("\"", NameForMessage(value.get_string().value_unsafe()), "\"");
    default:
      return simdjson::minify(value);
  }
}

std::string ShownShape(std::span<const uint64_t> shape) {
  std::string shown = "[";
  for (size_t i = 0; i < std::min(shape.size(), kMaxShownDimensions); ++i) {
    absl::StrAppend(&shown, i == 0 ? "" : ", ", shape[i]);
  }
  return absl::StrCat(shown, shape.size() > kMaxShownDimensions ? ", ...]" : "]");
}

}  // namespace

absl::Status ParseJson(const simdjson::padded_string& text, const std::string& file, std::string_view reason,
                       JsonDocument* document) {
  const simdjson::error_code error = document->parser.parse(text).get(document->root);
  if (error == simdjson::SUCCESS) return absl::OkStatus();
  if (error == simdjson::MEMALLOC) {
    Refusal refusal;
    refusal.reason = "HOST_MEMORY";
    refusal.file = file;
    return Refuse(absl::StatusCode::kResourceExhausted, std::move(refusal),
                  absl::StrFormat("%s: no memory to parse %d bytes of JSON", file, text.size()));
  }
  if (error == simdjson::UTF8_ERROR) return RefuseFile(reason, file, "", "its JSON is not UTF-8");
  return RefuseFile(reason, file, "", absl::StrFormat("its JSON is broken: %s", simdjson::error_message(error)));
}

absl::Status ReadJsonFile(const std::string& path, std::string_view missing_reason, std::string_view reason,
                          JsonDocument* document) {
  absl::StatusOr<RegularFile> file = OpenRegularFile(path, missing_reason);
  if (!file.ok()) return file.status();
  if (file->stat.bytes > kMaxJsonBytes) {
    return RefuseFile(reason, path, "",
                      absl::StrFormat("%d bytes of JSON, the limit is %d", file->stat.bytes, kMaxJsonBytes));
  }
  if (file->stat.bytes == 0) return RefuseFile(reason, path, "", "the file is empty");
  simdjson::padded_string text(file->stat.bytes);
  if (absl::Status status = ReadAt(*file, 0, file->stat.bytes, text.data()); !status.ok()) return status;
  const absl::Status parsed = ParseJson(text, path, reason, document);
  if (!absl::IsInvalidArgument(parsed)) return parsed;
  const std::optional<FileKind> kind = FileKindOf(*file);
  if (!kind.has_value() || !kind->is_stand_in) return parsed;
  return RefuseFile(reason, path, "", absl::StrFormat("not JSON but %s", kind->name));
}

absl::StatusOr<simdjson::dom::element> TopField(const JsonDocument& document, const std::string& file,
                                                std::string_view reason, std::string_view key) {
  simdjson::dom::object top;
  if (document.root.get_object().get(top) != simdjson::SUCCESS) {
    return RefuseFile(reason, file, "", absl::StrFormat("no JSON object but %s", Shown(document.root)));
  }
  std::optional<simdjson::dom::element> found;
  for (const simdjson::dom::key_value_pair field : top) {
    if (field.key != key) continue;
    if (found.has_value()) return FieldTwice({file, "", reason}, key);
    found = field.value;
  }
  if (!found.has_value()) return FieldMissing({file, "", reason}, key);
  return *found;
}

absl::StatusOr<std::string_view> TextOf(const EntrySite& site, std::string_view field, simdjson::dom::element value) {
  std::string_view text;
  if (value.get_string().get(text) == simdjson::SUCCESS) return text;
  return RefuseFile(site.reason, site.file, site.tensor,
                    absl::StrFormat("%s is %s, not a string", field, Shown(value)));
}

absl::StatusOr<std::string_view> NameOf(const EntrySite& site, std::string_view field, simdjson::dom::element value) {
  absl::StatusOr<std::string_view> name = TextOf(site, field, value);
  if (!name.ok()) return name.status();
  if (absl::Status status = CheckNameLength(site, field, *name); !status.ok()) return status;
  return name;
}

absl::Status CheckNameLength(const EntrySite& site, std::string_view field, std::string_view name) {
  if (name.size() <= kMaxEntryNameBytes) return absl::OkStatus();
  return RefuseFile(site.reason, site.file, site.tensor,
                    absl::StrFormat("%s has %d bytes, the limit is %d", field, name.size(), kMaxEntryNameBytes));
}

absl::StatusOr<uint64_t> CountOf(const EntrySite& site, std::string_view reason, std::string_view field,
                                 simdjson::dom::element value) {
  uint64_t count = 0;
  if (value.get_uint64().get(count) == simdjson::SUCCESS) return count;
  return RefuseFile(reason, site.file, site.tensor,
                    absl::StrFormat("%s is %s, not a whole number of 0 or more", field, Shown(value)));
}

absl::StatusOr<DType> DTypeOf(const EntrySite& site, simdjson::dom::element value) {
  absl::StatusOr<std::string_view> name = TextOf(site, "dtype", value);
  if (!name.ok()) return name.status();
  const std::optional<DType> dtype = ParseDType(*name);
  if (dtype.has_value()) return *dtype;
  return RefuseFile("BAD_DTYPE", site.file, site.tensor,
                    absl::StrFormat("unknown dtype %s (names are case-sensitive)", Shown(value)));
}

absl::StatusOr<std::vector<uint64_t>> ShapeOf(const EntrySite& site, simdjson::dom::element value) {
  simdjson::dom::array dimensions;
  if (value.get_array().get(dimensions) != simdjson::SUCCESS) {
    return RefuseFile("BAD_SHAPE", site.file, site.tensor, absl::StrFormat("shape is %s, not an array", Shown(value)));
  }
  if (dimensions.size() > kMaxDimensions) {
    return RefuseFile("BAD_SHAPE", site.file, site.tensor,
                      absl::StrFormat("shape has %d dimensions, the limit is %d", dimensions.size(), kMaxDimensions));
  }
  std::vector<uint64_t> shape;
  shape.reserve(dimensions.size());
  for (const simdjson::dom::element dimension : dimensions) {
    absl::StatusOr<uint64_t> count = CountOf(site, "BAD_SHAPE", "a dimension of shape", dimension);
    if (!count.ok()) return count.status();
    shape.push_back(*count);
  }
  return shape;
}

absl::Status CheckTensorBytes(const EntrySite& site, DType dtype, std::span<const uint64_t> shape,
                              std::string_view field, uint64_t bytes) {
  const std::optional<uint64_t> needed = TensorBytes(dtype, shape);
  if (!needed.has_value()) {
    return RefuseFile(
        "BAD_SHAPE", site.file, site.tensor,
        absl::StrFormat("shape %s of %s passes 64 bits or ends inside a byte", ShownShape(shape), DTypeName(dtype)));
  }
  if (*needed == bytes) return absl::OkStatus();
  return RefuseFile("SIZE_MISMATCH", site.file, site.tensor,
                    absl::StrFormat("shape %s of %s is %d bytes, %s says %d", ShownShape(shape), DTypeName(dtype),
                                    *needed, field, bytes));
}

absl::Status FieldTwice(const EntrySite& site, std::string_view field) {
  return RefuseFile(site.reason, site.file, site.tensor, absl::StrFormat("%s is there twice", field));
}

absl::Status FieldMissing(const EntrySite& site, std::string_view field) {
  return RefuseFile(site.reason, site.file, site.tensor, absl::StrFormat("%s is missing", field));
}

}  // namespace residency

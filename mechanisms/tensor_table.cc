// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/tensor_table.h"

#include <simdjson.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "mechanisms/file_kind.h"
#include "mechanisms/json_entry.h"
#include "mechanisms/regular_file.h"
#include "mechanisms/safetensors_header.h"

namespace residency {
namespace {

constexpr char kReason[] = "BAD_TABLE";

enum Field { kName, kDType, kShape, kFile, kOffset, kBytes, kComponent, kFieldCount };
constexpr std::array<std::string_view, kFieldCount> kFieldNames = {"name",   "dtype", "shape",    "file",
                                                                   "offset", "bytes", "component"};
using Row = std::array<std::optional<simdjson::dom::element>, kFieldCount>;

class TableReader {
 public:
  TableReader(const std::string& path, FileTable* files) : path_(path), files_(*files) {}

  absl::StatusOr<std::vector<ManifestComponent>> Read(const JsonDocument& document) {
    absl::StatusOr<simdjson::dom::element> value = TopField(document, path_, kReason, "tensors");
    if (!value.ok()) return value.status();
    simdjson::dom::array rows;
    if (value->get_array().get(rows) != simdjson::SUCCESS) {
      return RefuseFile(kReason, path_, "", "tensors is no array");
    }
    for (const simdjson::dom::element row : rows) {
      if (absl::Status status = AddRow(row); !status.ok()) return status;
      ++row_count_;
    }
    for (ManifestComponent& component : components_) {
      if (absl::Status status = CheckUniqueNames(component.tensors, path_); !status.ok()) return status;
      std::stable_sort(component.tensors.begin(), component.tensors.end(),
                       [](const ManifestTensor& a, const ManifestTensor& b) {
                         return std::tie(a.file, a.file_offset) < std::tie(b.file, b.file_offset);
                       });
    }
    return std::move(components_);
  }

 private:
  struct KnownFile {
    uint32_t index = 0;
    uint64_t bytes = 0;
  };

  absl::Status AddRow(simdjson::dom::element value) {
    absl::StatusOr<Row> row = FieldsOf(value);
    if (!row.ok()) return row.status();
    const std::string row_name = absl::StrCat("#", row_count_);
    absl::StatusOr<std::string_view> name = NameOf({path_, row_name, kReason}, "name", *(*row)[kName]);
    if (!name.ok()) return name.status();
    const EntrySite site{path_, *name, kReason};

    ManifestTensor tensor;
    tensor.name = *name;
    if (absl::Status status = ReadTypeAndPlace(site, *row, &tensor); !status.ok()) return status;
    std::string_view component = "model";
    if ((*row)[kComponent].has_value()) {
      absl::StatusOr<std::string_view> named = TextOf(site, "component", *(*row)[kComponent]);
      if (!named.ok()) return named.status();
      if (named->empty()) return RefuseFile(kReason, path_, *name, "component is empty");
      component = *named;
    }
    ComponentNamed(component).tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  absl::StatusOr<Row> FieldsOf(simdjson::dom::element value) {
    const std::string row_name = absl::StrCat("#", row_count_);
    const EntrySite site{path_, row_name, kReason};
    simdjson::dom::object object;
    if (value.get_object().get(object) != simdjson::SUCCESS) {
      return RefuseFile(kReason, path_, row_name, "its entry is no object");
    }
    Row row;
    for (const simdjson::dom::key_value_pair field : object) {
      const auto known = std::find(kFieldNames.begin(), kFieldNames.end(), field.key);
      if (known == kFieldNames.end()) continue;
      std::optional<simdjson::dom::element>& slot = row[static_cast<size_t>(known - kFieldNames.begin())];
      if (slot.has_value()) return FieldTwice(site, field.key);
      slot = field.value;
    }
    for (size_t i = 0; i < kComponent; ++i) {
      if (!row[i].has_value()) return FieldMissing(site, kFieldNames[i]);
    }
    return row;
  }

  absl::Status ReadTypeAndPlace(const EntrySite& site, const Row& row, ManifestTensor* tensor) {
    absl::StatusOr<DType> dtype = DTypeOf(site, *row[kDType]);
    if (!dtype.ok()) return dtype.status();
    absl::StatusOr<std::vector<uint64_t>> shape = ShapeOf(site, *row[kShape]);
    if (!shape.ok()) return shape.status();
    absl::StatusOr<uint64_t> offset = CountOf(site, kReason, "offset", *row[kOffset]);
    if (!offset.ok()) return offset.status();
    absl::StatusOr<uint64_t> bytes = CountOf(site, kReason, "bytes", *row[kBytes]);
    if (!bytes.ok()) return bytes.status();
    if (absl::Status status = CheckTensorBytes(site, *dtype, *shape, "bytes", *bytes); !status.ok()) return status;
    absl::StatusOr<std::string_view> file_name = TextOf(site, "file", *row[kFile]);
    if (!file_name.ok()) return file_name.status();
    absl::StatusOr<KnownFile> file = FileNamed(site, *file_name);
    if (!file.ok()) return file.status();
    // Not offset + bytes > file, which could wrap.
    if (*offset > file->bytes || *bytes > file->bytes - *offset) {
      return RefuseFile("TRUNCATED", path_, site.tensor,
                        absl::StrFormat("%d bytes at %d of %s, which has %d bytes%s", *bytes, *offset,
                                        NameForMessage(*file_name), file->bytes, StandInForMessage(*file_name)));
    }
    tensor->dtype = *dtype;
    tensor->shape = std::move(*shape);
    tensor->file = file->index;
    tensor->file_offset = *offset;
    tensor->bytes = *bytes;
    return absl::OkStatus();
  }

  std::string PathOf(std::string_view name) const {
    return (std::filesystem::path(path_).parent_path() / std::string(name)).string();
  }

  // " and is KIND" for a file that is too short, where it is a stand-in for the real one.
  std::string StandInForMessage(std::string_view name) const {
    const absl::StatusOr<RegularFile> file = OpenRegularFile(PathOf(name), "FILE_MISSING");
    if (!file.ok()) return "";
    const std::optional<FileKind> kind = FileKindOf(*file);
    return kind.has_value() && kind->is_stand_in ? absl::StrFormat(" and is %s", kind->name) : "";
  }

  absl::StatusOr<KnownFile> FileNamed(const EntrySite& site, std::string_view name) {
    const auto known = file_by_name_.find(name);
    if (known != file_by_name_.end()) return known->second;
    if (name.empty()) return RefuseFile(kReason, path_, site.tensor, "file is empty");
    absl::StatusOr<RegularFile> file = OpenRegularFile(PathOf(name), "FILE_MISSING");
    if (!file.ok()) return MissedBy(file.status(), path_);
    absl::StatusOr<uint32_t> index = files_.Add(file->stat);
    if (!index.ok()) return index.status();
    return file_by_name_.emplace(name, KnownFile{*index, file->stat.bytes}).first->second;
  }

  ManifestComponent& ComponentNamed(std::string_view name) {
    const auto known = component_by_name_.find(name);
    if (known != component_by_name_.end()) return components_[known->second];
    component_by_name_.emplace(name, components_.size());
    components_.push_back({std::string(name), {}});
    return components_.back();
  }

  const std::string& path_;
  FileTable& files_;
  size_t row_count_ = 0;  // rows done, which names the row at hand
  std::vector<ManifestComponent> components_;
  std::map<std::string, size_t, std::less<>> component_by_name_;
  std::map<std::string, KnownFile, std::less<>> file_by_name_;
};

}  // namespace

absl::StatusOr<std::vector<ManifestComponent>> ReadTensorTable(const std::string& path, FileTable* files) {
  JsonDocument document;
  if (absl::Status status = ReadJsonFile(path, "NO_SUCH_FILE", kReason, &document); !status.ok()) return status;
  return TableReader(path, files).Read(document);
}

}  // namespace residency

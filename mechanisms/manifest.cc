// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/manifest.h"

#include <fnmatch.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "mechanisms/checkpoint_dir.h"
#include "mechanisms/file_table.h"
#include "mechanisms/refusal.h"
#include "mechanisms/regular_file.h"
#include "mechanisms/safetensors_header.h"
#include "mechanisms/tensor_table.h"

namespace residency {
namespace {

constexpr char kOnlyComponent[] = "model";

// What one source holds.
struct SourceContents {
  std::vector<ManifestComponent> components;
  bool may_alias = false;  // explicit tables may name a byte twice
};

absl::StatusOr<SourceContents> ReadFile(const std::string& path, FileTable* files) {
  SourceContents contents;
  if (absl::EndsWith(path, kTensorTableSuffix)) {
    absl::StatusOr<std::vector<ManifestComponent>> components = ReadTensorTable(path, files);
    if (!components.ok()) return components.status();
    contents.components = std::move(*components);
    contents.may_alias = true;
    return contents;
  }
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(path, "NO_SUCH_FILE");
  if (!header.ok()) return header.status();
  absl::StatusOr<uint32_t> file = files->Add(header->file);
  if (!file.ok()) return file.status();
  for (ManifestTensor& tensor : header->tensors) tensor.file = *file;
  contents.components.push_back({kOnlyComponent, std::move(header->tensors)});
  return contents;
}

absl::StatusOr<SourceContents> ReadSource(const std::string& path, FileTable* files) {
  absl::StatusOr<bool> is_directory = IsDirectory(path, "NO_SUCH_FILE");
  if (!is_directory.ok()) return is_directory.status();
  if (!*is_directory) return ReadFile(path, files);
  SourceContents contents;
  if (IsPipeline(path)) {
    absl::StatusOr<std::vector<ManifestComponent>> components = ReadPipeline(path, files);
    if (!components.ok()) return components.status();
    contents.components = std::move(*components);
    return contents;
  }
  absl::StatusOr<std::vector<ManifestTensor>> tensors = ReadCheckpointDir(path, files);
  if (!tensors.ok()) return tensors.status();
  contents.components.push_back({kOnlyComponent, std::move(*tensors)});
  return contents;
}

// All tensors of `contents` that `source` asks for, as one component.
absl::StatusOr<ManifestComponent> Select(const ComponentSource& source, SourceContents contents) {
  ManifestComponent selected;
  selected.name = source.name;
  for (ManifestComponent& component : contents.components) {
    for (ManifestTensor& tensor : component.tensors) {
      if (!source.glob.empty() && ::fnmatch(source.glob.c_str(), tensor.name.c_str(), 0) != 0) continue;
      selected.tensors.push_back(std::move(tensor));
    }
  }
  if (selected.tensors.empty()) {
    return RefuseFile("NO_MATCH", source.path, "",
                      absl::StrFormat("component %s: no tensor of it matches %s", NameForMessage(source.name),
                                      source.glob.empty() ? "(it has none)" : NameForMessage(source.glob)));
  }
  // The components of a pipeline may well have names in common.
  if (absl::Status status = CheckUniqueNames(selected.tensors, source.path); !status.ok()) return status;
  return selected;
}

// Puts a manifest together from its sources and holds up what ReadManifest promises across them.
class ManifestBuilder {
 public:
  absl::Status AddSource(const std::string& path) {
    absl::StatusOr<SourceContents> contents = ReadSource(path, &files_);
    if (!contents.ok()) return contents.status();
    for (ManifestComponent& component : contents->components) {
      if (absl::Status status = Add(std::move(component), contents->may_alias, path); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status AddComponent(const ComponentSource& source) {
    absl::StatusOr<SourceContents> contents = ReadSource(source.path, &files_);
    if (!contents.ok()) return contents.status();
    const bool may_alias = contents->may_alias;
    absl::StatusOr<ManifestComponent> selected = Select(source, std::move(*contents));
    if (!selected.ok()) return selected.status();
    return Add(std::move(*selected), may_alias, source.path);
  }

  absl::StatusOr<Manifest> Finish(const std::string& source) {
    manifest_.files = files_.Take();
    if (absl::Status status = CheckNothingTakenTwice(); !status.ok()) return status;
    uint64_t tensor_count = 0;
    bool has_bytes = false;
    for (const ManifestComponent& component : manifest_.components) {
      tensor_count += component.tensors.size();
      has_bytes |= std::any_of(component.tensors.begin(), component.tensors.end(),
                               [](const ManifestTensor& tensor) { return tensor.bytes > 0; });
    }
    if (!has_bytes) {
      return RefuseFile("EMPTY_MODEL", source, "", absl::StrFormat("%d tensors without a byte", tensor_count));
    }
    return std::move(manifest_);
  }

 private:
  absl::Status Add(ManifestComponent component, bool may_alias, const std::string& path) {
    if (component.name.empty()) return RefuseFile("BAD_COMPONENT", path, "", "a component without a name");
    if (component.name.size() > kMaxComponentNameBytes) {
      return RefuseFile("BAD_COMPONENT", path, "",
                        absl::StrFormat("component %s: its name has %d bytes, the limit is %d",
                                        NameForMessage(component.name), component.name.size(), kMaxComponentNameBytes));
    }
    if (names_.size() == kMaxComponents) {
      return RefuseFile("BAD_COMPONENT", path, "",
                        absl::StrFormat("component %s is one more than the limit of %d components",
                                        NameForMessage(component.name), kMaxComponents));
    }
    if (!names_.insert(component.name).second) {
      return RefuseFile("DUPLICATE_NAME", path, "",
                        absl::StrFormat("two components are called %s", NameForMessage(component.name)));
    }
    if (!may_alias) {
      for (const ManifestTensor& tensor : component.tensors) {
        if (tensor.bytes > 0) taken_.emplace_back(tensor.file, tensor.file_offset);
      }
    }
    manifest_.components.push_back(std::move(component));
    return absl::OkStatus();
  }

  // Refuses a tensor that two components have. Ranges of one header are disjoint, so two tensors share
  // bytes only where they are the same range.
  absl::Status CheckNothingTakenTwice() {
    std::sort(taken_.begin(), taken_.end());
    const auto twice = std::adjacent_find(taken_.begin(), taken_.end());
    if (twice == taken_.end()) return absl::OkStatus();
    const auto [file, offset] = *twice;
    for (const ManifestComponent& component : manifest_.components) {
      for (const ManifestTensor& tensor : component.tensors) {
        if (tensor.bytes == 0 || tensor.file != file || tensor.file_offset != offset) continue;
        return RefuseFile("DUPLICATE_NAME", manifest_.files[file].path, tensor.name,
                          absl::StrFormat("component %s and another one both take it", NameForMessage(component.name)));
      }
    }
    return absl::InternalError("a range taken by no component");
  }

  FileTable files_;
  Manifest manifest_;
  std::set<std::string> names_;
  std::vector<std::pair<uint32_t, uint64_t>> taken_;  // file and offset of each tensor that must not alias
};

}  // namespace

absl::StatusOr<Manifest> ReadManifest(const std::string& source, const std::vector<ComponentSource>& components) {
  if (source.empty() && components.empty()) {
    return Refuse(absl::StatusCode::kInvalidArgument, "NOT_A_CHECKPOINT", "neither a source nor a component is given");
  }
  ManifestBuilder builder;
  if (!source.empty()) {
    if (absl::Status status = builder.AddSource(source); !status.ok()) return status;
  }
  for (const ComponentSource& component : components) {
    if (absl::Status status = builder.AddComponent(component); !status.ok()) return status;
  }
  return builder.Finish(source.empty() ? components.front().path : source);
}

std::vector<LayoutComponent> ToLayoutComponents(const Manifest& manifest) {
  std::vector<LayoutComponent> components;
  components.reserve(manifest.components.size());
  for (const ManifestComponent& from : manifest.components) {
    LayoutComponent& to = components.emplace_back();
    to.name = from.name;
    to.tensors.reserve(from.tensors.size());
    for (const ManifestTensor& tensor : from.tensors) {
      LayoutTensor& placed = to.tensors.emplace_back();
      placed.name = tensor.name;
      placed.dtype = tensor.dtype;
      placed.shape = tensor.shape;
      placed.bytes = tensor.bytes;
    }
  }
  return components;
}

}  // namespace residency

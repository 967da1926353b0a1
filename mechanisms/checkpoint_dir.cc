// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/checkpoint_dir.h"

#include <simdjson.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "mechanisms/json_entry.h"
#include "mechanisms/regular_file.h"
#include "mechanisms/safetensors_header.h"
#include "mechanisms/weight_files.h"

namespace residency {
namespace {

constexpr char kBadIndex[] = "BAD_INDEX";
constexpr char kPipelineIndex[] = "model_index.json";
constexpr std::array<const char*, 5> kWeightlessClassEndings = {"Tokenizer", "TokenizerFast", "Scheduler", "Processor",
                                                                "FeatureExtractor"};

std::string Join(const std::string& directory, std::string_view name) {
  return (std::filesystem::path(directory) / std::string(name)).string();
}

// Whether `name` stays below the directory that it is relative to.
bool StaysInside(std::string_view name) {
  const std::filesystem::path path{std::string(name)};
  if (name.empty() || path.is_absolute()) return false;
  return std::none_of(path.begin(), path.end(), [](const std::filesystem::path& part) { return part == ".."; });
}

// Appends the tensors of one safetensors file.
absl::Status AppendFile(const std::string& path, std::string_view missing_reason, FileTable* files,
                        std::vector<ManifestTensor>* tensors) {
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(path, missing_reason);
  if (!header.ok()) return header.status();
  absl::StatusOr<uint32_t> file = files->Add(header->file);
  if (!file.ok()) return file.status();
  for (ManifestTensor& tensor : header->tensors) {
    tensor.file = *file;
    tensors->push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

// *.safetensors.index.json: which shard holds which tensor.
class ShardIndex {
 public:
  static absl::StatusOr<ShardIndex> Read(const std::string& path) {
    ShardIndex index(path);
    JsonDocument document;
    if (absl::Status status = ReadJsonFile(path, "FILE_MISSING", kBadIndex, &document); !status.ok()) return status;
    absl::StatusOr<simdjson::dom::element> weight_map = TopField(document, path, kBadIndex, "weight_map");
    if (!weight_map.ok()) return weight_map.status();
    simdjson::dom::object map;
    if (weight_map->get_object().get(map) != simdjson::SUCCESS) {
      return RefuseFile(kBadIndex, path, "", "weight_map is no object");
    }
    for (const simdjson::dom::key_value_pair field : map) {
      absl::StatusOr<std::string_view> shard = TextOf({path, field.key, kBadIndex}, "its shard", field.value);
      if (!shard.ok()) return shard.status();
      if (!StaysInside(*shard)) {
        return RefuseFile(kBadIndex, path, field.key,
                          absl::StrFormat("its shard %s is not a path inside the directory", NameForMessage(*shard)));
      }
      const std::string& kept_shard = *index.shards_.emplace(*shard).first;
      if (!index.shard_by_tensor_.emplace(field.key, kept_shard).second) {
        return RefuseFile(kBadIndex, path, field.key, "the index names it twice");
      }
    }
    return index;
  }

  // In order of their names, which is the order in which libraries number them.
  const std::set<std::string>& shards() const { return shards_; }

  // Holds the tensors that `shard` has, `count` of them from `tensors`, against those that it should have.
  absl::Status CheckShard(const std::string& shard, const std::string& shard_path, const ManifestTensor* tensors,
                          size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const auto known = shard_by_tensor_.find(tensors[i].name);
      if (known == shard_by_tensor_.end() || known->second != shard) {
        return RefuseFile(kBadIndex, shard_path, tensors[i].name,
                          absl::StrFormat("the shard holds it, but %s does not say so", path_));
      }
      shard_by_tensor_.erase(known);
    }
    return absl::OkStatus();
  }

  // To be called once all shards were checked.
  absl::Status CheckNothingLeft() const {
    if (shard_by_tensor_.empty()) return absl::OkStatus();
    const auto& [tensor, shard] = *shard_by_tensor_.begin();
    return RefuseFile(kBadIndex, path_, tensor,
                      absl::StrFormat("the index says that %s holds it, but it does not", NameForMessage(shard)));
  }

 private:
  explicit ShardIndex(const std::string& path) : path_(path) {}

  std::string path_;
  std::set<std::string> shards_;
  std::map<std::string, std::string, std::less<>> shard_by_tensor_;
};

absl::StatusOr<std::vector<ManifestTensor>> ReadShards(const std::string& directory, const std::string& index_name,
                                                       FileTable* files) {
  const std::string index_path = Join(directory, index_name);
  absl::StatusOr<ShardIndex> index = ShardIndex::Read(index_path);
  if (!index.ok()) return index.status();
  std::vector<ManifestTensor> tensors;
  for (const std::string& shard : index->shards()) {
    const std::string shard_path = Join(directory, shard);
    const size_t before = tensors.size();
    if (absl::Status status = AppendFile(shard_path, "FILE_MISSING", files, &tensors); !status.ok()) {
      return MissedBy(status, index_path);
    }
    if (absl::Status status = index->CheckShard(shard, shard_path, tensors.data() + before, tensors.size() - before);
        !status.ok()) {
      return status;
    }
  }
  if (absl::Status status = index->CheckNothingLeft(); !status.ok()) return status;
  return tensors;
}

absl::StatusOr<std::vector<ManifestTensor>> ReadWeights(const std::string& directory, const WeightFiles& weights,
                                                        FileTable* files) {
  if (!weights.indices.empty()) {
    absl::StatusOr<std::string> index = ChooseFile(directory, weights.indices, ".safetensors.index.json");
    if (!index.ok()) return index.status();
    return ReadShards(directory, *index, files);
  }
  absl::StatusOr<std::string> file = ChooseFile(directory, weights.safetensors, ".safetensors");
  if (!file.ok()) return file.status();
  std::vector<ManifestTensor> tensors;
  if (absl::Status status = AppendFile(Join(directory, *file), "FILE_MISSING", files, &tensors); !status.ok()) {
    return status;
  }
  return tensors;
}

absl::Status RefuseOtherFormat(const std::string& directory, const WeightFiles& weights) {
  return RefuseFile(
      "NOT_A_CHECKPOINT", directory, "",
      absl::StrFormat("no *.safetensors there, but weights in another format, %s; convert them or describe "
                      "them in an explicit table",
                      weights.others.front()));
}

bool HasNoWeightsByClass(std::string_view class_name) {
  return std::any_of(kWeightlessClassEndings.begin(), kWeightlessClassEndings.end(),
                     [&](std::string_view ending) { return class_name.ends_with(ending); });
}

// One folder that model_index.json names: appended to `components` where it has weights.
absl::Status AppendFolder(const std::string& directory, std::string_view folder, std::string_view class_name,
                          FileTable* files, std::vector<ManifestComponent>* components) {
  const std::string path = Join(directory, folder);
  absl::StatusOr<bool> is_directory = IsDirectory(path, "FILE_MISSING");
  if (!is_directory.ok()) {
    if (absl::IsNotFound(is_directory.status()) && HasNoWeightsByClass(class_name)) return absl::OkStatus();
    return MissedBy(is_directory.status(), kPipelineIndex);
  }
  if (!*is_directory) {
    return RefuseFile(kBadIndex, path, "", absl::StrFormat("%s names it as a folder, which it is not", kPipelineIndex));
  }
  absl::StatusOr<WeightFiles> weights = ListWeightFiles(path);
  if (!weights.ok()) return weights.status();
  if (!weights->HasSafetensors()) {
    return weights->others.empty() ? absl::OkStatus() : RefuseOtherFormat(path, *weights);
  }
  absl::StatusOr<std::vector<ManifestTensor>> tensors = ReadWeights(path, *weights, files);
  if (!tensors.ok()) return tensors.status();
  components->push_back({std::string(folder), std::move(*tensors)});
  return absl::OkStatus();
}

// Whether `value` is a pair of strings; the second of them goes to `class_name`.
bool IsLibraryAndClass(simdjson::dom::element value, std::string_view* class_name) {
  simdjson::dom::array pair;
  if (value.get_array().get(pair) != simdjson::SUCCESS || pair.size() != 2) return false;
  return pair.at(0).is_string() && pair.at(1).get_string().get(*class_name) == simdjson::SUCCESS;
}

}  // namespace

absl::StatusOr<std::vector<ManifestTensor>> ReadCheckpointDir(const std::string& path, FileTable* files) {
  absl::StatusOr<WeightFiles> weights = ListWeightFiles(path);
  if (!weights.ok()) return weights.status();
  if (weights->HasSafetensors()) return ReadWeights(path, *weights, files);
  if (!weights->others.empty()) return RefuseOtherFormat(path, *weights);
  return RefuseFile(
      "NOT_A_CHECKPOINT", path, "",
      absl::StrFormat("neither *.safetensors nor *.safetensors.index.json nor %s is there", kPipelineIndex));
}

bool IsPipeline(const std::string& path) {
  // A link to nothing counts: the pipeline then fails for the index that is missing.
  struct stat found;
  return ::lstat(Join(path, kPipelineIndex).c_str(), &found) == 0;
}

absl::StatusOr<std::vector<ManifestComponent>> ReadPipeline(const std::string& path, FileTable* files) {
  const std::string index_path = Join(path, kPipelineIndex);
  JsonDocument document;
  if (absl::Status status = ReadJsonFile(index_path, "FILE_MISSING", kBadIndex, &document); !status.ok()) return status;
  simdjson::dom::object index;
  if (document.root.get_object().get(index) != simdjson::SUCCESS) {
    return RefuseFile(kBadIndex, index_path, "", "it is no JSON object");
  }
  std::vector<ManifestComponent> components;
  std::set<std::string_view> seen;
  for (const simdjson::dom::key_value_pair field : index) {
    std::string_view class_name;
    if (!IsLibraryAndClass(field.value, &class_name)) continue;
    if (!seen.insert(field.key).second) {
      return RefuseFile(kBadIndex, index_path, "", absl::StrFormat("%s is there twice", NameForMessage(field.key)));
    }
    if (!StaysInside(field.key)) {
      return RefuseFile(kBadIndex, index_path, "",
                        absl::StrFormat("%s is not a path inside the directory", NameForMessage(field.key)));
    }
    if (absl::Status status = AppendFolder(path, field.key, class_name, files, &components); !status.ok()) {
      return status;
    }
  }
  if (components.empty()) {
    return RefuseFile("NOT_A_CHECKPOINT", path, "", "no folder that model_index.json names holds *.safetensors");
  }
  return components;
}

}  // namespace residency

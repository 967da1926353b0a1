// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/weight_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "mechanisms/refusal.h"
#include "mechanisms/regular_file.h"

namespace residency {
namespace {

// What the libraries call a model's weights when they have no reason for another name.
constexpr std::array<const char*, 3> kPlainStems = {"model", "diffusion_pytorch_model", "adapter_model"};
// training_args.bin and the like are no weights.
constexpr std::array<const char*, 2> kOtherPrefixes = {"pytorch_model", "diffusion_pytorch_model"};
constexpr std::array<const char*, 4> kOtherSuffixes = {".gguf", ".ckpt", ".pt", ".pth"};
constexpr size_t kMaxNamesShown = 8;

bool IsOtherWeights(const std::string& name) {
  const auto ends = [&](const char* suffix) { return absl::EndsWith(name, suffix); };
  const auto starts = [&](const char* prefix) { return absl::StartsWith(name, prefix); };
  if (std::any_of(kOtherSuffixes.begin(), kOtherSuffixes.end(), ends)) return true;
  return ends(".bin") && std::any_of(kOtherPrefixes.begin(), kOtherPrefixes.end(), starts);
}

std::string Listed(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMaxNamesShown);
  const std::string list = absl::StrJoin(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), ", ");
  return shown == names.size() ? list : absl::StrCat(list, " and ", names.size() - shown, " more");
}

}  // namespace

absl::StatusOr<WeightFiles> ListWeightFiles(const std::string& directory) {
  WeightFiles found;
  std::error_code error;
  std::filesystem::directory_iterator at(directory, error);
  for (const std::filesystem::directory_iterator end; !error && at != end; at.increment(error)) {
    std::string name = at->path().filename().string();
    // Some systems leave ._NAME beside each NAME.
    if (absl::StartsWith(name, ".")) continue;
    if (absl::EndsWith(name, ".safetensors.index.json")) {
      found.indices.push_back(std::move(name));
    } else if (absl::EndsWith(name, ".safetensors")) {
      found.safetensors.push_back(std::move(name));
    } else if (IsOtherWeights(name)) {
      found.others.push_back(std::move(name));
    }
  }
  if (error) {
    Refusal refusal;
    refusal.reason = "UNREADABLE";
    refusal.file = directory;
    const absl::Status status = ErrnoStatus(error.value(), absl::StrCat("list ", directory));
    return Refuse(status.code(), std::move(refusal), std::string(status.message()));
  }
  std::sort(found.indices.begin(), found.indices.end());
  std::sort(found.safetensors.begin(), found.safetensors.end());
  std::sort(found.others.begin(), found.others.end());
  return found;
}

absl::StatusOr<std::string> ChooseFile(const std::string& directory, const std::vector<std::string>& names,
                                       const std::string& suffix) {
  if (names.size() == 1) return names.front();
  for (const char* stem : kPlainStems) {
    const std::string plain = absl::StrCat(stem, suffix);
    const std::string variant_prefix = absl::StrCat(stem, ".");
    if (std::find(names.begin(), names.end(), plain) == names.end()) continue;
    if (std::all_of(names.begin(), names.end(),
                    [&](const std::string& name) { return absl::StartsWith(name, variant_prefix); })) {
      return plain;
    }
  }
  return RefuseFile(
      "NOT_A_CHECKPOINT", directory, "",
      absl::StrFormat("%d files end in %s and none of them is the one to take: %s%s", names.size(), suffix,
                      Listed(names), suffix == ".safetensors" ? "; shards need their *.safetensors.index.json" : ""));
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
//
// Which files of a directory hold a model's weights, by their names alone. Blocking file I/O, for workers.
#ifndef RESIDENCY_MECHANISMS_WEIGHT_FILES_H_
#define RESIDENCY_MECHANISMS_WEIGHT_FILES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace residency {

// Names of a directory's files, without the directory, sorted. Hidden files are left out.
struct WeightFiles {
  std::vector<std::string> indices;      // *.safetensors.index.json
  std::vector<std::string> safetensors;  // *.safetensors
  std::vector<std::string> others;       // weights in formats that we do not read

  bool HasSafetensors() const { return !indices.empty() || !safetensors.empty(); }
};

absl::StatusOr<WeightFiles> ListWeightFiles(const std::string& directory);

// The one of `names` to read: the only one, or the plain one among its variants, as ReadCheckpointDir
// says. `names` are not empty and all end in `suffix`. INVALID_ARGUMENT/NOT_A_CHECKPOINT.
absl::StatusOr<std::string> ChooseFile(const std::string& directory, const std::vector<std::string>& names,
                                       const std::string& suffix);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_WEIGHT_FILES_H_

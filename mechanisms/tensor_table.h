// SPDX-License-Identifier: Apache-2.0
//
// NAME.tensors.json, the explicit table: tensors in files of any format, for a model that is not in
// safetensors or shares bytes between tensors.
//
//   {"tensors": [{"name": "w", "dtype": "F32", "shape": [2, 3], "file": "weights.bin",
//                 "offset": 4096, "bytes": 24, "component": "transformer"}, ...]}
//
// "component" may be left out ("model" then); all others are required and keys beside them are let pass.
// A file's path is relative to the table's folder. Ranges may overlap. Blocking file I/O, for workers.
#ifndef RESIDENCY_MECHANISMS_TENSOR_TABLE_H_
#define RESIDENCY_MECHANISMS_TENSOR_TABLE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/file_table.h"
#include "mechanisms/manifest.h"

namespace residency {

inline constexpr char kTensorTableSuffix[] = ".tensors.json";

// The components in order of first mention. INVALID_ARGUMENT/BAD_TABLE where the table is not as above,
// NOT_FOUND/FILE_MISSING for a file that it names, TRUNCATED for a range past its file's end; else as
// ReadManifest.
absl::StatusOr<std::vector<ManifestComponent>> ReadTensorTable(const std::string& path, FileTable* files);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_TENSOR_TABLE_H_

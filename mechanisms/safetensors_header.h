// SPDX-License-Identifier: Apache-2.0
//
// The header of one safetensors file: 8 bytes of length, that many bytes of JSON, then the tensors' bytes
// end to end. Reads the header with pread and nothing else; a mapping would turn a file that shrinks into
// a SIGBUS. Blocking file I/O, for workers. Any thread.
#ifndef RESIDENCY_MECHANISMS_SAFETENSORS_HEADER_H_
#define RESIDENCY_MECHANISMS_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/manifest.h"

namespace residency {

// The format's own limit on the JSON.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  SourceFile file;
  std::vector<ManifestTensor> tensors;  // by offset; ManifestTensor::file is 0
};

// Refuses everything that the format forbids: see ReadManifest for the reasons. Where the file is really
// something else (a Git LFS pointer, a web page, a pickle, a zip archive, GGUF), the message says what.
// NOT_FOUND/`missing_reason`.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::string& path, std::string_view missing_reason);

// INVALID_ARGUMENT/DUPLICATE_NAME where two of `tensors`, all of `file`, have one name.
absl::Status CheckUniqueNames(const std::vector<ManifestTensor>& tensors, const std::string& file);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SAFETENSORS_HEADER_H_

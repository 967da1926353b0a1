// SPDX-License-Identifier: Apache-2.0
//
// The files of a manifest while it is being read: each path once, however many components draw on it.
#ifndef RESIDENCY_MECHANISMS_FILE_TABLE_H_
#define RESIDENCY_MECHANISMS_FILE_TABLE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/manifest.h"

namespace residency {

class FileTable {
 public:
  // The index of `file`, which is added where its path is new. FAILED_PRECONDITION/FILE_CHANGED where the path was
  // seen before and is another file or another state of it now.
  absl::StatusOr<uint32_t> Add(const SourceFile& file);

  std::vector<SourceFile> Take() { return std::move(files_); }

 private:
  std::vector<SourceFile> files_;
  std::map<std::string, uint32_t> index_by_path_;  // by the path without "." and doubled slashes
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_FILE_TABLE_H_

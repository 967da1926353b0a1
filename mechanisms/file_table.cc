// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/file_table.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {

absl::StatusOr<uint32_t> FileTable::Add(const SourceFile& file) {
  const std::string key = std::filesystem::path(file.path).lexically_normal().string();
  const auto [found, is_new] = index_by_path_.try_emplace(key, static_cast<uint32_t>(files_.size()));
  if (is_new) {
    files_.push_back(file);
    return found->second;
  }
  SourceFile now = file;
  now.path = files_[found->second].path;
  if (now == files_[found->second]) return found->second;
  Refusal refusal;
  refusal.reason = "FILE_CHANGED";
  refusal.file = file.path;
  return Refuse(absl::StatusCode::kFailedPrecondition, std::move(refusal),
                absl::StrCat(file.path, ": it changed while the model was read"));
}

}  // namespace residency

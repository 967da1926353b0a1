// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/file_change.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// What differs between the file as the manifest saw it and as it is, or "".
std::string Difference(const SourceFile& seen, const struct stat& now) {
  const int64_t mtime_ns = int64_t{now.st_mtim.tv_sec} * 1'000'000'000 + now.st_mtim.tv_nsec;
  if (seen.device != now.st_dev || seen.inode != now.st_ino) return "another file has its name";
  if (seen.bytes != static_cast<uint64_t>(now.st_size)) {
    return absl::StrCat("it had ", seen.bytes, " bytes and has ", now.st_size);
  }
  if (seen.mtime_ns != mtime_ns) return "it was written to";
  return "";
}

absl::Status Compare(const SourceFile& seen, const struct stat& now) {
  const std::string difference = Difference(seen, now);
  if (difference.empty()) return absl::OkStatus();
  return Refuse(absl::StatusCode::kFailedPrecondition, {.reason = "FILE_CHANGED", .file = seen.path},
                absl::StrCat(seen.path, " changed since it was registered: ", difference));
}

}  // namespace

absl::Status CheckUnchanged(const SourceFile& seen, int fd) {
  struct stat now;
  if (::fstat(fd, &now) != 0) return FileIsUnreadable(errno, "fstat", seen.path);
  return Compare(seen, now);
}

absl::Status CheckUnchanged(const SourceFile& seen) {
  struct stat now;
  if (::stat(seen.path.c_str(), &now) == 0) return Compare(seen, now);
  if (errno == ENOENT || errno == ENOTDIR) return FileIsMissing(seen.path);
  return FileIsUnreadable(errno, "stat", seen.path);
}

absl::Status FileIsMissing(const std::string& path) {
  return Refuse(absl::StatusCode::kNotFound, {.reason = "FILE_MISSING", .file = path},
                absl::StrCat(path, " is not there any more"));
}

absl::Status FileIsUnreadable(int error, const char* call, const std::string& path) {
  const absl::Status status = ErrnoStatus(error, absl::StrCat(call, " of ", path));
  return Refuse(status.code(), {.reason = "UNREADABLE", .file = path}, std::string(status.message()));
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// One read of more than this is cut by the kernel anyway (0x7ffff000 bytes).
constexpr uint64_t kMaxReadBytes = uint64_t{1} << 30;
// Errors travel in gRPC's trailing metadata, 8 KiB in all by default.
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxPathBytes = 1024;

// `text`, cut to `max_bytes` between two characters.
std::string_view Cut(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

std::string ForMessage(std::string_view text, size_t max_bytes) {
  const std::string_view cut = Cut(text, max_bytes);
  return absl::StrCat(absl::Utf8SafeCHexEscape(std::string(cut)), cut.size() < text.size() ? "..." : "");
}

std::string PathForMessage(std::string_view path) { return ForMessage(path, kMaxPathBytes); }

absl::Status RefuseErrno(int error, std::string_view call, const std::string& path) {
  const absl::Status status = ErrnoStatus(error, absl::StrFormat("%s %s", call, PathForMessage(path)));
  Refusal refusal;
  refusal.reason = "UNREADABLE";
  refusal.file = Cut(path, kMaxPathBytes);
  return Refuse(status.code(), std::move(refusal), std::string(status.message()));
}

absl::Status RefuseMissing(const std::string& path, std::string_view reason) {
  Refusal refusal;
  refusal.reason = reason;
  refusal.file = Cut(path, kMaxPathBytes);
  struct stat link;
  const bool is_link = ::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode);
  return Refuse(
      absl::StatusCode::kNotFound, std::move(refusal),
      absl::StrCat(PathForMessage(path), is_link ? ": a symbolic link to something that is not there" : ": not there"));
}

std::string_view KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISBLK(mode) || S_ISCHR(mode)) return "a device";
  return "something else";
}

absl::StatusOr<struct stat> StatPath(const std::string& path, std::string_view missing_reason) {
  // A NUL would end the path early and name another file than the caller meant.
  if (path.empty() || path.find('\0') != std::string::npos) return RefuseMissing(path.c_str(), missing_reason);
  struct stat found;
  if (::stat(path.c_str(), &found) == 0) return found;
  switch (errno) {
    case ENOENT:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return RefuseMissing(path, missing_reason);
    default:
      return RefuseErrno(errno, "stat", path);
  }
}

absl::Status CheckRegular(const struct stat& found, const std::string& path) {
  if (S_ISREG(found.st_mode)) return absl::OkStatus();
  return RefuseFile("NOT_A_CHECKPOINT", path, "", absl::StrFormat("%s, not a regular file", KindOf(found.st_mode)));
}

SourceFile ToSourceFile(const std::string& path, const struct stat& found) {
  SourceFile file;
  file.path = path;
  file.bytes = static_cast<uint64_t>(found.st_size);
  file.device = found.st_dev;
  file.inode = found.st_ino;
  file.mtime_ns = int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec;
  return file;
}

}  // namespace

absl::StatusOr<SourceFile> StatSourceFile(const std::string& path) {
  absl::StatusOr<struct stat> found = StatPath(path, "NO_SUCH_FILE");
  if (!found.ok()) return found.status();
  return ToSourceFile(path, *found);
}

absl::StatusOr<RegularFile> OpenRegularFile(const std::string& path, std::string_view missing_reason) {
  // Looked at before it is opened, because opening alone acts on some devices; and looked at again
  // through the descriptor, because the path may have been replaced in between. O_NONBLOCK is for that
  // gap, and means nothing to a regular file.
  absl::StatusOr<struct stat> before = StatPath(path, missing_reason);
  if (!before.ok()) return before.status();
  if (absl::Status status = CheckRegular(*before, path); !status.ok()) return status;
  RegularFile file;
  file.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.fd.valid()) {
    return errno == ENOENT ? RefuseMissing(path, missing_reason) : RefuseErrno(errno, "open", path);
  }
  struct stat found;
  if (::fstat(file.fd.get(), &found) != 0) return RefuseErrno(errno, "fstat", path);
  if (absl::Status status = CheckRegular(found, path); !status.ok()) return status;
  file.stat = ToSourceFile(path, found);
  return file;
}

absl::Status ReadAt(const RegularFile& file, uint64_t offset, uint64_t bytes, char* into) {
  while (bytes > 0) {
    const ssize_t got = ::pread(file.fd.get(), into, std::min(bytes, kMaxReadBytes), static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      return RefuseErrno(errno, "read", file.stat.path);
    }
    if (got == 0) {
      Refusal refusal;
      refusal.reason = "FILE_TRUNCATED";
      refusal.file = Cut(file.stat.path, kMaxPathBytes);
      return Refuse(absl::StatusCode::kDataLoss, std::move(refusal),
                    absl::StrFormat("%s: it ends at %d, but had %d bytes when it was opened",
                                    PathForMessage(file.stat.path), offset, file.stat.bytes));
    }
    into += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> IsDirectory(const std::string& path, std::string_view missing_reason) {
  absl::StatusOr<struct stat> found = StatPath(path, missing_reason);
  if (!found.ok()) return found.status();
  return S_ISDIR(found->st_mode);
}

std::string NameForMessage(std::string_view name) { return ForMessage(name, kMaxNameBytes); }

absl::Status RefuseFile(std::string_view reason, const std::string& file, std::string_view tensor,
                        std::string_view why) {
  Refusal refusal;
  refusal.reason = reason;
  refusal.file = Cut(file, kMaxPathBytes);
  refusal.tensor = Cut(tensor, kMaxNameBytes);
  const std::string message =
      tensor.empty() ? absl::StrFormat("%s: %s", PathForMessage(file), why)
                     : absl::StrFormat("%s: tensor %s: %s", PathForMessage(file), NameForMessage(tensor), why);
  return Refuse(absl::StatusCode::kInvalidArgument, std::move(refusal), message);
}

absl::Status MissedBy(const absl::Status& status, std::string_view namer) {
  std::optional<Refusal> refusal = GetRefusal(status);
  if (!absl::IsNotFound(status) || !refusal.has_value()) return status;
  return Refuse(status.code(), std::move(*refusal),
                absl::StrFormat("%s, but %s names it", status.message(), PathForMessage(namer)));
}

}  // namespace residency

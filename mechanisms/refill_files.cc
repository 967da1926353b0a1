// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refill_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

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

absl::Status Unreadable(int error, const char* call, const std::string& path) {
  const absl::Status status = ErrnoStatus(error, absl::StrCat(call, " of ", path));
  return Refuse(status.code(), {.reason = "UNREADABLE", .file = path}, std::string(status.message()));
}

absl::Status Compare(const SourceFile& seen, int fd) {
  struct stat now;
  if (::fstat(fd, &now) != 0) return Unreadable(errno, "fstat", seen.path);
  const std::string difference = Difference(seen, now);
  if (difference.empty()) return absl::OkStatus();
  return Refuse(absl::StatusCode::kFailedPrecondition, {.reason = "FILE_CHANGED", .file = seen.path},
                absl::StrCat(seen.path, " changed since it was registered: ", difference));
}

bool ClearFlags(int fd, int flags) {
  const int now = ::fcntl(fd, F_GETFL);
  return now >= 0 && ::fcntl(fd, F_SETFL, now & ~flags) == 0;
}

}  // namespace

RefillFiles::RefillFiles(std::span<const SourceFile> files, std::span<const ReadBlock> blocks, bool direct)
    : files_(files), states_(files.size()), direct_(direct) {
  for (const ReadBlock& block : blocks) ++states_[block.file].blocks_left;
}

absl::StatusOr<int> RefillFiles::Open(uint32_t file) {
  State& state = states_[file];
  if (state.fd.valid()) return state.fd.get();
  const SourceFile& source = files_[file];
  // Somebody may have put a pipe in the file's place, whose opening would wait for a writer.
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  bool direct = direct_;
  UniqueFd fd(::open(source.path.c_str(), kFlags | (direct ? O_DIRECT : 0)));
  if (!fd.valid() && errno == EINVAL && direct) {
    direct = false;
    fd = UniqueFd(::open(source.path.c_str(), kFlags));
  }
  if (!fd.valid() && errno == ENOENT) {
    return Refuse(absl::StatusCode::kNotFound, {.reason = "FILE_MISSING", .file = source.path},
                  absl::StrCat(source.path, " is not there any more"));
  }
  if (!fd.valid()) return Unreadable(errno, "open", source.path);
  if (absl::Status same = Compare(source, fd.get()); !same.ok()) return same;
  ClearFlags(fd.get(), O_NONBLOCK);
  state.direct = direct;
  state.fd = std::move(fd);
  return state.fd.get();
}

bool RefillFiles::StopDirect(uint32_t file) {
  State& state = states_[file];
  // Another worker's read may have been refused for the same reason before, so a file that is buffered by now says
  // nothing about the read at hand; the caller asks once for each read.
  if (!state.direct) return direct_;
  state.direct = false;
  return ClearFlags(state.fd.get(), O_DIRECT);
}

absl::Status RefillFiles::BlockDone(uint32_t file) {
  State& state = states_[file];
  if (--state.blocks_left > 0) return absl::OkStatus();
  const absl::Status same = Compare(files_[file], state.fd.get());
  ++(state.direct ? direct_files_ : buffered_files_);
  state.fd.reset();
  return same;
}

}  // namespace residency

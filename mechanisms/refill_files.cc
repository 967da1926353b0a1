// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refill_files.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "mechanisms/file_change.h"

namespace residency {
namespace {

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
  if (!fd.valid()) return errno == ENOENT ? FileIsMissing(source.path) : FileIsUnreadable(errno, "open", source.path);
  if (absl::Status same = CheckUnchanged(source, fd.get()); !same.ok()) return same;
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
  const absl::Status same = CheckUnchanged(files_[file], state.fd.get());
  ++(state.direct ? direct_files_ : buffered_files_);
  state.fd.reset();
  return same;
}

}  // namespace residency

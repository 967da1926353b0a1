// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "mechanisms/file_change.h"
#include "mechanisms/refusal.h"
#include "mechanisms/unique_fd.h"

namespace residency {

absl::StatusOr<MappedFile> MappedFile::Map(const SourceFile& file) {
  // Somebody may have put a pipe in the file's place, whose opening would wait for a writer.
  const UniqueFd fd(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return errno == ENOENT ? FileIsMissing(file.path) : FileIsUnreadable(errno, "open", file.path);
  if (absl::Status same = CheckUnchanged(file, fd.get()); !same.ok()) return same;
  void* address = ::mmap(nullptr, file.bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (address != MAP_FAILED) return MappedFile(file, HostMapping(static_cast<std::byte*>(address), file.bytes));
  if (errno != ENODEV) return FileIsUnreadable(errno, "mmap", file.path);
  return Refuse(absl::StatusCode::kFailedPrecondition, {.reason = "NOT_MAPPABLE", .file = file.path},
                absl::StrCat(file.path,
                             ": its file system does not map files into memory, which the host tier file "
                             "needs; the tier mirror reads it"));
}

absl::Status MappedFile::Pin(const Device& device, uint64_t offset, uint64_t bytes) {
  absl::StatusOr<HostRegistration> piece = device.RegisterHost(mapping_.address() + offset, bytes, Access::kReadOnly);
  if (!piece.ok()) {
    // The driver says nothing of files: a page that is beyond the end by now is some bad argument to it.
    const absl::Status changed = CheckUnchanged(file_);
    return changed.ok() ? piece.status() : changed;
  }
  pinned_.push_back(*std::move(piece));
  return absl::OkStatus();
}

uint64_t MappedFile::pinned_bytes() const {
  uint64_t sum = 0;
  for (const HostRegistration& piece : pinned_) sum += piece.bytes();
  return sum;
}

}  // namespace residency

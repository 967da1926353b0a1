// SPDX-License-Identifier: Apache-2.0
//
// A weight file mapped where it lies, and pages of it locked for the GPUs to read: the page cache's own, no copy.
//
// The processor never reads the mapping: a page that cannot be read, of a file that somebody truncates, would be a
// signal. The mapping is shared, never private: registering a private mapping of a file for reading spins in the
// kernel for ever. Locked pages stay what they are when the file is truncated or its name is given to another; what is
// written to the file in place shows in them.
//
// Threads: Map and Pin block and are for a worker; afterwards any.
#ifndef RESIDENCY_MECHANISMS_MAPPED_FILE_H_
#define RESIDENCY_MECHANISMS_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/manifest.h"
#include "mechanisms/mirror.h"

namespace residency {

class MappedFile {
 public:
  // Maps all of `file`, which has bytes.
  //  NOT_FOUND/FILE_MISSING it is not there any more; FAILED_PRECONDITION/FILE_CHANGED it is not the one in `file`;
  //  FAILED_PRECONDITION/NOT_MAPPABLE its file system maps no files; UNREADABLE, with the code of errno.
  static absl::StatusOr<MappedFile> Map(const SourceFile& file);

  MappedFile(MappedFile&&) noexcept = default;
  MappedFile& operator=(MappedFile&&) = delete;

  // Page-locks whole pages of it, none of them twice, for reading by every GPU; `device` outlives this. Reads from
  // disk what is not in memory. As Device::RegisterHost, or FILE_CHANGED and the like where that explains it.
  absl::Status Pin(const Device& device, uint64_t offset, uint64_t bytes);
  uint64_t pinned_bytes() const;

  // Where the file's first byte is.
  const std::byte* address() const { return mapping_.address(); }
  const SourceFile& file() const { return file_; }

 private:
  MappedFile(SourceFile file, HostMapping mapping) : file_(std::move(file)), mapping_(std::move(mapping)) {}

  SourceFile file_;
  HostMapping mapping_;
  std::vector<HostRegistration> pinned_;  // after mapping_, so that it goes first
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MAPPED_FILE_H_

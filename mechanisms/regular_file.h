// SPDX-License-Identifier: Apache-2.0
//
// Opening and reading a regular file without ever blocking on something else: a FIFO, a device, a socket
// or a directory under a model's name is refused, never opened for reading. Blocking file I/O, so it is
// for workers. Any thread.
#ifndef RESIDENCY_MECHANISMS_REGULAR_FILE_H_
#define RESIDENCY_MECHANISMS_REGULAR_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/manifest.h"
#include "mechanisms/unique_fd.h"

namespace residency {

struct RegularFile {
  UniqueFd fd;      // for reading
  SourceFile stat;  // of the descriptor, not of the path
};

// Opens `path`, links followed. NOT_FOUND with `missing_reason` where nothing is there,
// INVALID_ARGUMENT/NOT_A_CHECKPOINT where it is no regular file, UNREADABLE with the code of errno
// otherwise.
absl::StatusOr<RegularFile> OpenRegularFile(const std::string& path, std::string_view missing_reason);

// Fills `into` with the `bytes` bytes at `offset`, which the file had when it was opened. DATA_LOSS/FILE_TRUNCATED
// where it ends before that now, UNREADABLE with the code of errno otherwise.
absl::Status ReadAt(const RegularFile& file, uint64_t offset, uint64_t bytes, char* into);

// Whether there is a directory at `path`. NOT_FOUND with `missing_reason` where nothing is there.
absl::StatusOr<bool> IsDirectory(const std::string& path, std::string_view missing_reason);

// INVALID_ARGUMENT with `reason` about `file` and, unless it is empty, `tensor`. The message names both
// and says `why`; a name is escaped and, where it is very long, cut, so that a hostile one can neither
// forge a line of a log nor outgrow an error reply.
absl::Status RefuseFile(std::string_view reason, const std::string& file, std::string_view tensor,
                        std::string_view why);

// `status`, whose message goes on to say that `namer`, an index or a table, names the file where `status` is NOT_FOUND.
absl::Status MissedBy(const absl::Status& status, std::string_view namer);

// A name as RefuseFile puts it into a message.
std::string NameForMessage(std::string_view name);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_REGULAR_FILE_H_

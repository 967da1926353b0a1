// SPDX-License-Identifier: Apache-2.0
//
// Whether a file is still the one that a manifest was made of: by device, inode, size and time of the last write. What
// restores that time goes unseen here; digests are for that. Blocks as stat(2) does. Any thread.
#ifndef RESIDENCY_MECHANISMS_FILE_CHANGE_H_
#define RESIDENCY_MECHANISMS_FILE_CHANGE_H_

#include <string>

#include "absl/status/status.h"
#include "mechanisms/manifest.h"

namespace residency {

// FAILED_PRECONDITION/FILE_CHANGED with what differs: the file behind `fd` is not `seen`; UNREADABLE, with the code of
// errno.
absl::Status CheckUnchanged(const SourceFile& seen, int fd);

// The same of the file that has the path now; also NOT_FOUND/FILE_MISSING: none has.
absl::Status CheckUnchanged(const SourceFile& seen);

// NOT_FOUND/FILE_MISSING that names the file.
absl::Status FileIsMissing(const std::string& path);

// UNREADABLE, with the code of `error`, an errno: `call` failed on the file.
absl::Status FileIsUnreadable(int error, const char* call, const std::string& path);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_FILE_CHANGE_H_

// SPDX-License-Identifier: Apache-2.0
//
// The folder with the daemon's sockets, and the lock that keeps a second daemon out of it.
#ifndef RESIDENCY_DAEMON_RUNTIME_DIR_H_
#define RESIDENCY_DAEMON_RUNTIME_DIR_H_

#include <string>

#include "absl/status/statusor.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// /run/residency as root, else $XDG_RUNTIME_DIR/residency; empty where that is not set. A folder that anybody may make,
// as one in /tmp, would let another user put sockets there first.
std::string DefaultRuntimeDir();

// Makes `path` (and what is missing above it) and takes `path`/lock, which is held as long as the descriptor is open.
// INVALID_ARGUMENT/NO_RUNTIME_DIR: `path` is empty; ALREADY_EXISTS/RUNNING names the pid that holds it;
// INVALID_ARGUMENT/PATH_TOO_LONG where sockets in it would have names over 107 bytes; others as ErrnoStatus.
absl::StatusOr<UniqueFd> ClaimRuntimeDir(const std::string& path);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RUNTIME_DIR_H_

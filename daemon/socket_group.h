// SPDX-License-Identifier: Apache-2.0
//
// The group whose members may use the daemon: its sockets, and simulated cards, are theirs to open.
//
// It becomes the group of the process before anything is made, so that no file has another one, not even for a moment;
// a bind and a chown after it would leave that moment, and simulated memory is made at any time.
#ifndef RESIDENCY_DAEMON_SOCKET_GROUP_H_
#define RESIDENCY_DAEMON_SOCKET_GROUP_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace residency {

// The group of that name, else of that number. NOT_FOUND/NO_SUCH_GROUP.
absl::StatusOr<gid_t> ParseGroup(const std::string& text);

// `residency` for root where there is such a group, else the process's own.
absl::StatusOr<gid_t> DefaultSocketGroup();

// Makes `group` the one of this process; before it has threads. PERMISSION_DENIED/SOCKET_GROUP where it may not.
absl::Status TakeGroup(gid_t group);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_SOCKET_GROUP_H_

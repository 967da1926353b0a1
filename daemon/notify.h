// SPDX-License-Identifier: Apache-2.0
//
// Tells a service manager how the daemon does.
#ifndef RESIDENCY_DAEMON_NOTIFY_H_
#define RESIDENCY_DAEMON_NOTIFY_H_

#include <string_view>

namespace residency {

// Sends `state` ("READY=1", "STOPPING=1", "STATUS=...") to the socket that $NOTIFY_SOCKET names, as sd_notify(3)
// describes. Does nothing where there is none: the daemon was started by hand.
void NotifyManager(std::string_view state);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_NOTIFY_H_

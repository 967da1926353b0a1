// SPDX-License-Identifier: Apache-2.0
//
// Finds the daemon's sockets and connects to its service. Any thread.
#ifndef RESIDENCY_CLIENT_DIAL_H_
#define RESIDENCY_CLIENT_DIAL_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace residency {

// $RESIDENCY_RUNTIME_DIR, else $XDG_RUNTIME_DIR/residency where a socket is there, else /run/residency.
std::string DefaultRuntimeDir();

std::string GrpcSocketPath(const std::string& runtime_dir);
std::string PagesSocketPath(const std::string& runtime_dir);

// A channel to the service that is connected: the daemon has answered. NOT_FOUND/NO_SOCKET: nothing at the path;
// UNAVAILABLE/CONNECTION_REFUSED: a socket file that nobody listens on; PERMISSION_DENIED/SOCKET_PERMISSION;
// DEADLINE_EXCEEDED/NO_ANSWER: somebody listens and did not answer by `deadline`.
absl::StatusOr<std::shared_ptr<grpc::Channel>> DialDaemon(const std::string& runtime_dir, absl::Time deadline);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_DIAL_H_

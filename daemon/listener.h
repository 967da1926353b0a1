// SPDX-License-Identifier: Apache-2.0
//
// A listening Unix socket of the daemon. It accepts, asks the kernel who connected, and hands the connection
// on; gRPC's connections go through here too, because gRPC itself gives no credentials for Unix sockets.
// Everything on the decision loop.
#ifndef RESIDENCY_DAEMON_LISTENER_H_
#define RESIDENCY_DAEMON_LISTENER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/loop.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/unique_fd.h"

namespace residency {

class Listener {
 public:
  using Accepted = std::function<void(UniqueFd connection, const PeerIdentity& peer)>;

  // Listens at `path` with mode 0660 and the group of the process. Errors as ListenUnix. `loop` outlives the listener.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(Loop& loop, const std::string& path, int type,
                                                        Accepted accepted);
  // Closes the socket and removes its file.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

 private:
  Listener(Loop& loop, std::string path, UniqueFd socket, Accepted accepted)
      : loop_(loop), path_(std::move(path)), socket_(std::move(socket)), accepted_(std::move(accepted)) {}
  void Accept();

  Loop& loop_;
  const std::string path_;
  UniqueFd socket_;
  Accepted accepted_;
  uint64_t retry_timer_ = 0;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_LISTENER_H_

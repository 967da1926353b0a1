// SPDX-License-Identifier: Apache-2.0
//
// gRPC's connections and who is behind each. The daemon accepts them itself and gives gRPC the descriptor;
// gRPC then names the peer of a call "fd:N", which is looked up here. Everything on the decision loop.
#ifndef RESIDENCY_DAEMON_CONNECTIONS_H_
#define RESIDENCY_DAEMON_CONNECTIONS_H_

#include <grpcpp/server.h>

#include <map>
#include <optional>
#include <string>

#include "mechanisms/page_channel.h"
#include "mechanisms/unique_fd.h"

namespace residency {

class Connections {
 public:
  // Hands `connection` to `server`, which closes it when it is done.
  void Add(grpc::Server& server, UniqueFd connection, const PeerIdentity& peer);

  // Who makes a call whose ServerContext::peer() is `name`; nothing where that is no connection of ours.
  std::optional<PeerIdentity> Find(const std::string& name) const;

 private:
  std::map<int, PeerIdentity> peers_;
  int next_descriptor_ = 0;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_CONNECTIONS_H_

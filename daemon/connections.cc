// SPDX-License-Identifier: Apache-2.0
#include "daemon/connections.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Descriptor numbers of gRPC connections are taken in turn from the upper half of what the process may
// open, so that a number that gRPC has closed does not come back while a call of its old connection is
// still on its way to the loop.
struct Range {
  int first = 0;
  int last = 0;
};

Range ConnectionDescriptors() {
  rlimit limit{};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  const int top = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 65536));
  return {top / 2, top - 1};
}

}  // namespace

void Connections::Add(grpc::Server& server, UniqueFd connection, const PeerIdentity& peer) {
  const Range range = ConnectionDescriptors();
  if (next_descriptor_ < range.first || next_descriptor_ > range.last) next_descriptor_ = range.first;
  int number = fcntl(connection.get(), F_DUPFD_CLOEXEC, next_descriptor_);
  if (number < 0) number = fcntl(connection.get(), F_DUPFD_CLOEXEC, range.first);
  if (number < 0) {
    spdlog::warn("a connection of pid {} is refused: {}", peer.pid,
                 ErrnoStatus(errno, "duplicating its descriptor").ToString());
    return;
  }
  next_descriptor_ = number + 1;
  peers_.insert_or_assign(number, peer);
  grpc::AddInsecureChannelFromFd(&server, number);
}

std::optional<PeerIdentity> Connections::Find(const std::string& name) const {
  int number = -1;
  if (name.rfind("fd:", 0) != 0 || !absl::SimpleAtoi(name.substr(3), &number)) return std::nullopt;
  const auto found = peers_.find(number);
  if (found == peers_.end()) return std::nullopt;
  return found->second;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/listener.h"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Out of descriptors, accept fails at once and again; the connection waits in the backlog meanwhile.
constexpr absl::Duration kRetryAfterExhaustion = absl::Milliseconds(100);

// Then it is the turn of others: who connects without pause must not keep the loop here.
constexpr int kConnectionsInTurn = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(Loop& loop, const std::string& path, int type,
                                                         Accepted accepted) {
  auto socket = ListenUnix(path, type, 0660);
  if (!socket.ok()) return socket.status();
  std::unique_ptr<Listener> listener(new Listener(loop, path, *std::move(socket), std::move(accepted)));
  const auto status = loop.Watch(listener->socket_.get(), EPOLLIN, [raw = listener.get()](uint32_t) { raw->Accept(); });
  if (!status.ok()) return status;
  return listener;
}

Listener::~Listener() {
  loop_.CancelTimer(retry_timer_);
  loop_.Unwatch(socket_.get());
  (void)unlink(path_.c_str());
}

void Listener::Accept() {
  for (int i = 0; i < kConnectionsInTurn; ++i) {
    UniqueFd connection(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      spdlog::warn("accept on {}: {}", path_, ErrnoStatus(errno, "accept4").ToString());
      loop_.Unwatch(socket_.get());
      retry_timer_ = loop_.At(MonotonicNow() + kRetryAfterExhaustion,
                              [this] { (void)loop_.Watch(socket_.get(), EPOLLIN, [this](uint32_t) { Accept(); }); });
      return;
    }
    const auto peer = PeerCredentials(connection.get());
    if (!peer.ok()) {
      spdlog::warn("a connection to {} without credentials: {}", path_, peer.status().ToString());
      continue;
    }
    accepted_(std::move(connection), *peer);
  }
}

}  // namespace residency

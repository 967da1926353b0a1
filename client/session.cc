// SPDX-License-Identifier: Apache-2.0
#include "client/session.h"

#include <errno.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"
#include "proto/channel.pb.h"

namespace residency {
namespace {

constexpr size_t kMaxClientNameBytes = 64;

// A failure costs nothing now: if descriptors do run out later, that error names the limit.
void RaiseOpenFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

std::string PrintableName(std::string_view name) {
  std::string printable;
  for (const char c : name.substr(0, kMaxClientNameBytes)) printable.push_back(c >= ' ' && c <= '~' ? c : '?');
  return printable;
}

// Waits until `fd` is readable, or the deadline.
absl::Status AwaitReadable(int fd, absl::Time deadline) {
  while (true) {
    const int64_t left = std::clamp<int64_t>(absl::ToInt64Milliseconds(deadline - absl::Now()), 0, 1 << 30);
    pollfd poller{fd, POLLIN, 0};
    const int ready = poll(&poller, 1, static_cast<int>(left));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll of the page channel");
    if (ready == 0 && absl::Now() >= deadline) {
      return Refuse(absl::StatusCode::kDeadlineExceeded, "NO_ANSWER",
                    "the daemon took the connection of the page channel and does not answer");
    }
  }
}

absl::StatusOr<SessionTerms> ReadWelcome(std::string_view payload) {
  v1::DaemonPacket packet;
  if (!packet.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return Refuse(absl::StatusCode::kInternal, "PROTOCOL", "the daemon's first packet is not one of this protocol");
  }
  if (packet.has_refused()) {
    const v1::Refused& refused = packet.refused();
    return StatusFromText(refused.code(), refused.reason(), refused.message());
  }
  if (!packet.has_welcome()) {
    return Refuse(absl::StatusCode::kInternal, "PROTOCOL", "the daemon's first packet is not a Welcome");
  }
  const v1::Welcome& welcome = packet.welcome();
  return SessionTerms{welcome.session_id(), welcome.epoch(), welcome.driver(), welcome.sim_directory()};
}

}  // namespace

absl::Status StatusFromText(std::string_view code, std::string_view reason, std::string_view message) {
  absl::StatusCode parsed = absl::StatusCode::kUnknown;
  for (int value = 1; value <= static_cast<int>(absl::StatusCode::kUnauthenticated); ++value) {
    const auto candidate = static_cast<absl::StatusCode>(value);
    if (absl::StatusCodeToString(candidate) == code) parsed = candidate;
  }
  return Refuse(parsed, reason, message);
}

absl::StatusOr<Session> BeginSession(UniqueFd socket, std::string_view client_name, absl::Time deadline) {
  auto pidfd = OpenPidfd(getpid());
  if (!pidfd.ok()) return pidfd.status();
  Session session{PageChannel(std::move(socket)), {}};
  v1::ClientPacket hello;
  hello.mutable_hello()->set_protocol_version(kPageProtocolVersion);
  hello.mutable_hello()->set_client_name(PrintableName(client_name));
  const int descriptors[] = {pidfd->get()};
  if (auto status = session.channel.Send(hello.SerializeAsString(), descriptors); !status.ok()) return status;
  while (true) {
    auto packet = session.channel.Receive();
    if (!packet.ok()) return packet.status();
    if (packet->has_value()) {
      auto terms = ReadWelcome((*packet)->payload);
      if (!terms.ok()) return terms.status();
      session.terms = *std::move(terms);
      return session;
    }
    if (auto status = AwaitReadable(session.channel.fd(), deadline); !status.ok()) return status;
  }
}

absl::StatusOr<Session> OpenSession(const std::string& pages_socket, std::string_view client_name,
                                    absl::Time deadline) {
  RaiseOpenFileLimit();
  auto socket = ConnectUnix(pages_socket, SOCK_SEQPACKET, deadline);
  if (!socket.ok()) return socket.status();
  return BeginSession(*std::move(socket), client_name, deadline);
}

}  // namespace residency

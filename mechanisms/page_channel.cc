// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/page_channel.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

using absl::StatusCode;

// SCM_MAX_FD of Linux. Room for all that a peer can send, so that MSG_CTRUNC means one thing: our own limit.
constexpr size_t kMostDescriptorsInMessage = 253;

absl::Status HangUp() { return Refuse(StatusCode::kUnavailable, "HANG_UP", "the other side closed the page channel"); }

absl::Status CheckLimits(std::string_view payload, std::span<const int> descriptors) {
  // The receiver could not tell an empty packet from a hang-up.
  if (payload.empty()) return Refuse(StatusCode::kInvalidArgument, "EMPTY_PACKET", "a packet needs a payload");
  if (payload.size() > kMaxPacketBytes) {
    return Refuse(StatusCode::kInvalidArgument, "PACKET_TOO_LARGE",
                  absl::StrCat("a packet of ", payload.size(), " bytes; at most ", kMaxPacketBytes));
  }
  if (descriptors.size() > kMaxPacketDescriptors) {
    return Refuse(StatusCode::kInvalidArgument, "TOO_MANY_DESCRIPTORS",
                  absl::StrCat(descriptors.size(), " descriptors in a packet; at most ", kMaxPacketDescriptors));
  }
  return absl::OkStatus();
}

// Takes ownership of every descriptor that came with `message`.
std::vector<UniqueFd> TakeDescriptors(msghdr& message) {
  std::vector<UniqueFd> descriptors;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Refuse(StatusCode::kInvalidArgument, "BAD_PATH", "a socket needs a path without zero bytes");
  }
  if (path.size() >= sizeof(address.sun_path)) {
    return Refuse(StatusCode::kInvalidArgument, "PATH_TOO_LONG",
                  absl::StrCat(path, " has ", path.size(), " bytes; the path of a Unix socket has at most ",
                               sizeof(address.sun_path) - 1));
  }
  memcpy(address.sun_path, path.data(), path.size());
  return address;
}

int ConnectTo(int socket, const sockaddr_un& address) {
  return connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

// Leaves `path` free for bind: removes a socket file whose listener is gone.
absl::Status RemoveStaleSocket(const std::string& path, const sockaddr_un& address, int type) {
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoStatus(errno, absl::StrCat("lstat of ", path));
  }
  if (!S_ISSOCK(status.st_mode)) {
    return Refuse(StatusCode::kAlreadyExists, "NOT_A_SOCKET", absl::StrCat(path, " is there and is not a socket"));
  }
  UniqueFd probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return ErrnoStatus(errno, "socket");
  const int error = ConnectTo(probe.get(), address);
  if (error == EACCES) return ErrnoStatus(error, absl::StrCat("connect to ", path));
  if (error != ECONNREFUSED && error != ENOENT) {
    return Refuse(StatusCode::kAlreadyExists, "SOCKET_IN_USE", absl::StrCat("another process listens on ", path));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, absl::StrCat("unlink of ", path));
  return absl::OkStatus();
}

absl::Status ConnectError(int error, const std::string& path) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return Refuse(StatusCode::kNotFound, "NO_SOCKET", absl::StrCat("no socket at ", path));
    case ECONNREFUSED:
      return Refuse(StatusCode::kUnavailable, "CONNECTION_REFUSED", absl::StrCat("nobody listens on ", path));
    case EACCES:
    case EPERM:
      return Refuse(StatusCode::kPermissionDenied, "SOCKET_PERMISSION", absl::StrCat("no right to connect to ", path));
    case EAGAIN:
      return Refuse(StatusCode::kDeadlineExceeded, "CONNECT_TIMEOUT", absl::StrCat("nobody accepts on ", path));
    case EPROTOTYPE:
      return Refuse(StatusCode::kInvalidArgument, "WRONG_SOCKET_TYPE", absl::StrCat(path, " is of another type"));
    default:
      return ErrnoStatus(error, absl::StrCat("connect to ", path));
  }
}

// How long a blocking connect waits for room in the listener's backlog.
timeval ConnectTimeout(absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) return {};  // zero is the kernel's word for no limit
  return absl::ToTimeval(std::max(deadline - absl::Now(), absl::Milliseconds(1)));
}

}  // namespace

PageChannel::PageChannel(UniqueFd socket) : socket_(std::move(socket)) {}

absl::StatusOr<PageChannel::Attempt> PageChannel::TrySend(std::string_view payload, std::span<const int> descriptors) {
  iovec part{const_cast<char*>(payload.data()), payload.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxPacketDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  while (true) {
    if (sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return Attempt::kSent;
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return Attempt::kWouldBlock;
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return HangUp();
    if (errno == ETOOMANYREFS) {
      return Refuse(StatusCode::kResourceExhausted, "DESCRIPTOR_LIMIT",
                    "too many descriptors of this user are in flight; raise RLIMIT_NOFILE");
    }
    return ErrnoStatus(errno, "sendmsg on the page channel");
  }
}

absl::Status PageChannel::Enqueue(std::string_view payload, std::span<const int> descriptors) {
  if (queue_.size() >= kMaxQueuedPackets) {
    return Refuse(StatusCode::kResourceExhausted, "QUEUE_FULL",
                  absl::StrCat("the other side has not read ", queue_.size(), " packets"));
  }
  Packet packet{std::string(payload), {}};
  for (const int fd : descriptors) {
    UniqueFd duplicate(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!duplicate.valid() && errno == EMFILE) {
      return Refuse(StatusCode::kResourceExhausted, "DESCRIPTOR_LIMIT", "no descriptor left for a queued packet");
    }
    if (!duplicate.valid()) return ErrnoStatus(errno, "duplicating a descriptor for a queued packet");
    packet.descriptors.push_back(std::move(duplicate));
  }
  queue_.push_back(std::move(packet));
  return absl::OkStatus();
}

absl::Status PageChannel::Send(std::string_view payload, std::span<const int> descriptors) {
  if (absl::Status limits = CheckLimits(payload, descriptors); !limits.ok()) return limits;
  if (queue_.empty()) {
    absl::StatusOr<Attempt> attempt = TrySend(payload, descriptors);
    if (!attempt.ok()) return attempt.status();
    if (*attempt == Attempt::kSent) return absl::OkStatus();
  }
  return Enqueue(payload, descriptors);
}

absl::Status PageChannel::Flush() {
  while (!queue_.empty()) {
    const Packet& packet = queue_.front();
    std::vector<int> descriptors;
    for (const UniqueFd& fd : packet.descriptors) descriptors.push_back(fd.get());
    absl::StatusOr<Attempt> attempt = TrySend(packet.payload, descriptors);
    if (!attempt.ok()) return attempt.status();
    if (*attempt == Attempt::kWouldBlock) break;
    queue_.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Packet>> PageChannel::Receive() {
  char payload[kMaxPacketBytes];
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptorsInMessage * sizeof(int))];
  iovec part{payload, sizeof(payload)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t bytes;
  do {
    bytes = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // A peer that closed without reading everything leaves ECONNRESET, which is reported once and ahead of the packets
    // that it had sent before.
  } while (bytes < 0 && (errno == EINTR || errno == ECONNRESET));
  if (bytes < 0 && errno == EAGAIN) return std::nullopt;
  if (bytes < 0) return ErrnoStatus(errno, "recvmsg on the page channel");
  Packet packet{std::string(payload, bytes), TakeDescriptors(message)};
  if (bytes == 0) {
    refused_ = std::move(packet.descriptors);  // an empty packet, which ends the channel as a hang-up does
    return HangUp();
  }
  absl::Status refused;
  const size_t count = packet.descriptors.size();
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    refused = Refuse(StatusCode::kResourceExhausted, "DESCRIPTOR_LIMIT",
                     absl::StrCat("only ", count, " descriptors of a packet could be opened; raise RLIMIT_NOFILE"));
  } else if ((message.msg_flags & MSG_TRUNC) != 0) {
    refused = Refuse(StatusCode::kInvalidArgument, "PACKET_TOO_LARGE",
                     absl::StrCat("the other side sent a packet of over ", kMaxPacketBytes, " bytes"));
  } else if (count > kMaxPacketDescriptors) {
    refused = Refuse(
        StatusCode::kInvalidArgument, "TOO_MANY_DESCRIPTORS",
        absl::StrCat("the other side sent ", count, " descriptors in a packet; at most ", kMaxPacketDescriptors));
  }
  if (refused.ok()) return packet;
  refused_ = std::move(packet.descriptors);
  return refused;
}

UniqueFd PageChannel::TakeSocket() {
  queue_.clear();
  return std::move(socket_);
}

absl::Status CreditWindow::OnSent() {
  if (!CanSend()) {
    return Refuse(StatusCode::kFailedPrecondition, "NO_CREDIT",
                  absl::StrCat(unacknowledged_, " packets with descriptors are not acknowledged yet"));
  }
  ++unacknowledged_;
  return absl::OkStatus();
}

absl::Status CreditWindow::OnAcknowledged() {
  if (unacknowledged_ == 0) {
    return Refuse(StatusCode::kInvalidArgument, "NOTHING_TO_ACKNOWLEDGE",
                  "an acknowledgement came for a packet that was not sent");
  }
  --unacknowledged_;
  return absl::OkStatus();
}

absl::StatusOr<PeerIdentity> PeerCredentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return ErrnoStatus(errno, "SO_PEERCRED");
  }
  return PeerIdentity{credentials.pid, credentials.uid, credentials.gid};
}

absl::StatusOr<UniqueFd> OpenPidfd(pid_t pid) {
  // By number, as the C library has no wrapper for it everywhere. The kernel makes it close-on-exec.
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (pidfd.valid()) return pidfd;
  if (errno == ESRCH) return Refuse(StatusCode::kNotFound, "NO_SUCH_PROCESS", absl::StrCat("no process ", pid));
  return ErrnoStatus(errno, absl::StrCat("pidfd_open of ", pid));
}

absl::StatusOr<pid_t> PidOfPidfd(int pidfd) {
  const absl::Status not_a_pidfd =
      Refuse(StatusCode::kInvalidArgument, "NOT_A_PIDFD", absl::StrCat("descriptor ", pidfd, " is no pidfd"));
  UniqueFd info(open(absl::StrCat("/proc/self/fdinfo/", pidfd).c_str(), O_RDONLY | O_CLOEXEC));
  if (!info.valid() && errno == ENOENT) return not_a_pidfd;
  if (!info.valid()) return ErrnoStatus(errno, "open of /proc/self/fdinfo");
  char text[4096];
  const ssize_t bytes = read(info.get(), text, sizeof(text));
  if (bytes < 0) return ErrnoStatus(errno, "read of /proc/self/fdinfo");
  for (absl::string_view line : absl::StrSplit(absl::string_view(text, bytes), '\n')) {
    int pid = 0;
    if (absl::ConsumePrefix(&line, "Pid:") && absl::SimpleAtoi(line, &pid)) return pid;
  }
  return not_a_pidfd;
}

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, mode_t mode) {
  absl::StatusOr<sockaddr_un> address = AddressOf(path);
  if (!address.ok()) return address.status();
  if (absl::Status removed = RemoveStaleSocket(path, *address, type); !removed.ok()) return removed;
  UniqueFd listener(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return ErrnoStatus(errno, "socket");
  // bind gives the file the mode of the socket less the umask, so it is never wider than asked. chmod then adds what
  // the umask took. A temporary name and a rename would do too, but leave that name in every listing of sockets.
  if (fchmod(listener.get(), mode) != 0) return ErrnoStatus(errno, "fchmod of a socket");
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) {
    return ErrnoStatus(errno, absl::StrCat("bind to ", path));
  }
  if (chmod(path.c_str(), mode) != 0) return ErrnoStatus(errno, absl::StrCat("chmod of ", path));
  if (listen(listener.get(), SOMAXCONN) != 0) return ErrnoStatus(errno, absl::StrCat("listen on ", path));
  return listener;
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, int type, absl::Time deadline) {
  absl::StatusOr<sockaddr_un> address = AddressOf(path);
  if (!address.ok()) return address.status();
  UniqueFd connection(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!connection.valid()) return ErrnoStatus(errno, "socket");
  // A Unix socket connects at once or waits for the backlog; it has no connection in progress to poll for.
  int error;
  do {
    const timeval timeout = ConnectTimeout(deadline);
    if (setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
      return ErrnoStatus(errno, "SO_SNDTIMEO");
    }
    error = ConnectTo(connection.get(), *address);
  } while (error == EINTR);
  if (error != 0) return ConnectError(error, path);
  const timeval no_timeout{};
  if (setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &no_timeout, sizeof(no_timeout)) != 0 ||
      fcntl(connection.get(), F_SETFL, O_RDWR | O_NONBLOCK) != 0) {
    return ErrnoStatus(errno, "making a socket non-blocking");
  }
  return connection;
}

}  // namespace residency

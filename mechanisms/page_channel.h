// SPDX-License-Identifier: Apache-2.0
//
// The transport of the page channel: packets over a SOCK_SEQPACKET Unix socket, each an opaque payload and up to 64
// descriptors. Both ends use it. Beside it, what both ends need of Unix sockets: listening, connecting, and knowing the
// process on the other side. No call here blocks, but for ConnectUnix.
//
// One PageChannel is for one thread at a time (the daemon's loop, the client's reader thread).
#ifndef RESIDENCY_MECHANISMS_PAGE_CHANNEL_H_
#define RESIDENCY_MECHANISMS_PAGE_CHANNEL_H_

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/unique_fd.h"

namespace residency {

inline constexpr uint64_t kMaxPacketBytes = uint64_t{64} << 10;
// Linux takes 253 in one message. 64 keep a packet of cells, and what a client must hold open to take it, small.
inline constexpr uint64_t kMaxPacketDescriptors = 64;
inline constexpr uint64_t kMaxQueuedPackets = 1024;
// A descriptor in flight holds device memory, so few may be.
inline constexpr uint32_t kMaxUnacknowledgedPackets = 2;

struct Packet {
  std::string payload;
  std::vector<UniqueFd> descriptors;  // close-on-exec
};

class PageChannel {
 public:
  // `socket` is a connected SOCK_SEQPACKET socket, blocking or not.
  explicit PageChannel(UniqueFd socket);
  PageChannel(PageChannel&&) = default;
  PageChannel& operator=(PageChannel&&) = default;

  // Sends a packet after those sent before. OK: sent, or queued until Flush because the peer reads slowly.
  // `descriptors` stay the caller's and may be closed at once (a queued packet holds duplicates). Errors:
  //  INVALID_ARGUMENT/EMPTY_PACKET, PACKET_TOO_LARGE (over kMaxPacketBytes), TOO_MANY_DESCRIPTORS: the caller's
  //  mistake; UNAVAILABLE/HANG_UP: the peer is gone; RESOURCE_EXHAUSTED/QUEUE_FULL: the peer does not read,
  //  kMaxQueuedPackets wait already; RESOURCE_EXHAUSTED/DESCRIPTOR_LIMIT: too many descriptors of this user are in
  //  flight, or none left to duplicate.
  // After UNAVAILABLE or RESOURCE_EXHAUSTED the channel is of no more use, as a packet is missing.
  absl::Status Send(std::string_view payload, std::span<const int> descriptors = {});

  // Sends what is queued, as far as it goes. Call it when the socket is writable. Errors as Send.
  absl::Status Flush();

  // Whether packets are queued: watch the socket for writability as long as this is so.
  bool wants_write() const { return !queue_.empty(); }

  // The next packet; nothing where none has come yet. Errors, each of which ends the channel:
  //  UNAVAILABLE/HANG_UP: the peer closed, everything it sent before has been received;
  //  RESOURCE_EXHAUSTED/DESCRIPTOR_LIMIT: this process may not open the descriptors that came;
  //  INVALID_ARGUMENT/PACKET_TOO_LARGE, TOO_MANY_DESCRIPTORS: the peer does not keep to the limits.
  absl::StatusOr<std::optional<Packet>> Receive();
  // The descriptors of the packet that Receive refused. They go with the channel otherwise; but closing a descriptor of
  // somebody else's making can take long, so a loop closes them elsewhere.
  std::vector<UniqueFd> TakeRefused() { return std::move(refused_); }

  // For poll; borrowed.
  int fd() const { return socket_.get(); }
  // Takes the socket out of the channel, e.g. to hand it to the keeper; queued packets are dropped.
  UniqueFd TakeSocket();

 private:
  enum class Attempt { kSent, kWouldBlock };
  absl::StatusOr<Attempt> TrySend(std::string_view payload, std::span<const int> descriptors);
  absl::Status Enqueue(std::string_view payload, std::span<const int> descriptors);

  UniqueFd socket_;
  std::deque<Packet> queue_;
  std::vector<UniqueFd> refused_;
};

// Accounts for packets with descriptors that the peer has not acknowledged. Pure; the sender of descriptors asks it.
class CreditWindow {
 public:
  explicit CreditWindow(uint32_t limit = kMaxUnacknowledgedPackets) : limit_(limit) {}

  bool CanSend() const { return unacknowledged_ < limit_; }
  uint32_t unacknowledged() const { return unacknowledged_; }
  // FAILED_PRECONDITION/NO_CREDIT where CanSend is false; nothing is counted then.
  absl::Status OnSent();
  // INVALID_ARGUMENT/NOTHING_TO_ACKNOWLEDGE where more come back than went out: the peer is broken.
  absl::Status OnAcknowledged();

 private:
  uint32_t limit_;
  uint32_t unacknowledged_ = 0;
};

// Who connected: as of the time of connect (or of listen, seen from the connecting side).
struct PeerIdentity {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;

  bool operator==(const PeerIdentity&) const = default;
};
absl::StatusOr<PeerIdentity> PeerCredentials(int socket);

// A descriptor that becomes readable when the process ends. NOT_FOUND/NO_SUCH_PROCESS.
absl::StatusOr<UniqueFd> OpenPidfd(pid_t pid);
// The process behind a pidfd: its pid, 0 where it is not visible in this pid namespace, -1 once it is dead and reaped.
// INVALID_ARGUMENT/NOT_A_PIDFD for any other descriptor.
absl::StatusOr<pid_t> PidOfPidfd(int pidfd);

// A listening, non-blocking socket of `type` (SOCK_SEQPACKET, SOCK_STREAM) at `path`, whose file has exactly `mode`
// whatever the umask and never, not even for a moment, more than that. A socket file that nobody listens on is
// replaced.
//  INVALID_ARGUMENT/BAD_PATH, PATH_TOO_LONG: empty, over 107 bytes;
//  ALREADY_EXISTS/SOCKET_IN_USE: somebody listens there (who sees a connection come and go, as this is how one knows);
//  ALREADY_EXISTS/NOT_A_SOCKET: something else is there, which is left alone; others as ErrnoStatus.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, mode_t mode);

// A connected, non-blocking socket of `type`. Waits until `deadline` where the listener's backlog is full.
//  INVALID_ARGUMENT/BAD_PATH, PATH_TOO_LONG, WRONG_SOCKET_TYPE: the path as above; a socket of another type;
//  NOT_FOUND/NO_SOCKET: nothing at `path`; UNAVAILABLE/CONNECTION_REFUSED: a file that nobody listens on;
//  PERMISSION_DENIED/SOCKET_PERMISSION: its mode, or a folder's; DEADLINE_EXCEEDED/CONNECT_TIMEOUT: nobody accepts.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, int type, absl::Time deadline);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_PAGE_CHANNEL_H_

// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/page_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

using absl::StatusCode;

struct SocketPair {
  SocketPair() {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    left = UniqueFd(fds[0]);
    right = UniqueFd(fds[1]);
  }
  UniqueFd left, right;
};

struct Channels {
  SocketPair sockets;
  PageChannel left{std::move(sockets.left)};
  PageChannel right{std::move(sockets.right)};
};

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    const char* root = getenv("TEST_TMPDIR");
    // Bazel's folder can be too deep for the path of a socket.
    path_ = absl::StrCat(root != nullptr && strlen(root) < 60 ? root : "/tmp", "/channel.XXXXXX");
    REQUIRE(mkdtemp(path_.data()) != nullptr);
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A memfd of `text`, to be recognised on the other side.
UniqueFd FileOf(const std::string& text) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  REQUIRE(write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  return fd;
}

std::string TextOf(int fd) {
  char text[256];
  const ssize_t bytes = pread(fd, text, sizeof(text), 0);
  return std::string(text, bytes < 0 ? 0 : bytes);
}

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

std::string Outcome(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), "/", ReasonOf(status));
}

// Runs `body` in a child; its result is the exit status.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(body());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

absl::Time Soon() { return absl::Now() + absl::Milliseconds(50); }
mode_t ModeOf(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 ? status.st_mode & 07777 : 0;
}

// Sends what Send refuses, so that the receiver's own checks are met.
void SendRaw(int socket, size_t payload_bytes, const std::vector<int>& fds) {
  std::string payload(payload_bytes, 'x');
  iovec part{payload.data(), payload.size()};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  REQUIRE(sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(payload_bytes));
}

TEST_CASE("A channel without packets has nothing to receive") {
  Channels channels;
  absl::StatusOr<std::optional<Packet>> packet = channels.left.Receive();
  REQUIRE(packet.ok());
  CHECK_FALSE(packet->has_value());
}

TEST_CASE("Packets arrive whole and in order, in both directions") {
  Channels channels;
  const std::string binary("\0\xff\n", 3);
  REQUIRE(channels.left.Send("first").ok());
  REQUIRE(channels.left.Send(binary).ok());
  REQUIRE(channels.right.Send("answer").ok());
  CHECK((*channels.right.Receive())->payload == "first");
  CHECK((*channels.right.Receive())->payload == binary);
  CHECK((*channels.left.Receive())->payload == "answer");
}

TEST_CASE("64 descriptors come with one packet, in order, and are closed on exec") {
  Channels channels;
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  for (int i = 0; i < 64; ++i) {
    files.push_back(FileOf(absl::StrCat("cell ", i)));
    fds.push_back(files.back().get());
  }
  REQUIRE(channels.left.Send("cells", fds).ok());
  files.clear();
  const Packet packet = std::move(**channels.right.Receive());
  CHECK(packet.payload == "cells");
  REQUIRE(packet.descriptors.size() == 64);
  for (int i = 0; i < 64; ++i) {
    CHECK(TextOf(packet.descriptors[i].get()) == absl::StrCat("cell ", i));
    CHECK((fcntl(packet.descriptors[i].get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
}

TEST_CASE("What is over a limit is refused before anything is sent") {
  Channels channels;
  const UniqueFd file = FileOf("x");
  CHECK(Outcome(channels.left.Send("")) == "INVALID_ARGUMENT/EMPTY_PACKET");
  CHECK(Outcome(channels.left.Send(std::string(65537, 'x'))) == "INVALID_ARGUMENT/PACKET_TOO_LARGE");
  CHECK(Outcome(channels.left.Send("x", std::vector<int>(65, file.get()))) == "INVALID_ARGUMENT/TOO_MANY_DESCRIPTORS");
  CHECK_FALSE(channels.right.Receive()->has_value());
  REQUIRE(channels.left.Send(std::string(65536, 'x')).ok());
  CHECK((*channels.right.Receive())->payload == std::string(65536, 'x'));
}

TEST_CASE("A peer that does not keep to the limits is noticed, and none of its descriptors stays open") {
  SocketPair sockets;
  PageChannel channel(std::move(sockets.left));
  const UniqueFd file = FileOf("x");
  const int before = OpenDescriptors();
  SendRaw(sockets.right.get(), 65537, {file.get()});
  CHECK(Outcome(channel.Receive().status()) == "INVALID_ARGUMENT/PACKET_TOO_LARGE");
  CHECK(channel.TakeRefused().size() == 1);
  SendRaw(sockets.right.get(), 1, std::vector<int>(65, file.get()));
  CHECK(Outcome(channel.Receive().status()) == "INVALID_ARGUMENT/TOO_MANY_DESCRIPTORS");
  SendRaw(sockets.right.get(), 1, std::vector<int>(253, file.get()));
  CHECK(Outcome(channel.Receive().status()) == "INVALID_ARGUMENT/TOO_MANY_DESCRIPTORS");
  CHECK(channel.TakeRefused().size() == 253);
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("A process that may not open the descriptors of a packet is told so and keeps none of them") {
  Channels channels;
  const UniqueFd file = FileOf("x");
  REQUIRE(channels.left.Send("cells", std::vector<int>(64, file.get())).ok());
  const int before = OpenDescriptors();
  const int child = InChild([&] {
    const rlimit limit{static_cast<rlim_t>(before + 20), static_cast<rlim_t>(before + 20)};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
    if (Outcome(channels.right.Receive().status()) != "RESOURCE_EXHAUSTED/DESCRIPTOR_LIMIT") return 2;
    channels.right.TakeRefused();
    return OpenDescriptors() == before ? 0 : 3;
  });
  CHECK(child == 0);
}

TEST_CASE("A hang-up is told after the packets that came before it") {
  Channels channels;
  REQUIRE(channels.left.Send("last words").ok());
  SECTION("the peer has read everything") {}
  SECTION("the peer has left a packet unread, which Linux reports as a reset first") {
    REQUIRE(channels.right.Send("unread").ok());
  }
  { const UniqueFd closed = channels.left.TakeSocket(); }
  CHECK((*channels.right.Receive())->payload == "last words");
  CHECK(Outcome(channels.right.Receive().status()) == "UNAVAILABLE/HANG_UP");
  CHECK(Outcome(channels.right.Send("to nobody")) == "UNAVAILABLE/HANG_UP");
}

TEST_CASE("A peer that reads slowly gets queued packets in order, with their descriptors") {
  Channels channels;
  const std::string padding(30'000, '.');
  int sent = 0;
  while (!channels.left.wants_write()) REQUIRE(channels.left.Send(absl::StrCat(sent++, " ", padding)).ok());
  {
    // The queued packet has to hold the descriptor by itself.
    const UniqueFd file = FileOf("queued");
    const int fd = file.get();
    REQUIRE(channels.left.Send(absl::StrCat(sent++, " "), std::span(&fd, 1)).ok());
  }
  REQUIRE(channels.left.Flush().ok());
  CHECK(channels.left.wants_write());
  std::string text;
  for (int i = 0; i < sent; ++i) {
    absl::StatusOr<std::optional<Packet>> packet = channels.right.Receive();
    REQUIRE(packet.ok());
    REQUIRE(packet->has_value());
    REQUIRE((*packet)->payload.substr(0, (*packet)->payload.find(' ')) == std::to_string(i));
    if (!(*packet)->descriptors.empty()) text = TextOf((*packet)->descriptors[0].get());
    REQUIRE(channels.left.Flush().ok());
  }
  CHECK(text == "queued");
  CHECK_FALSE(channels.left.wants_write());
}

TEST_CASE("A peer that does not read at all fills the queue, and no further") {
  Channels channels;
  absl::Status status;
  uint64_t sent = 0;
  while (status.ok() && sent < 100'000) {
    status = channels.left.Send("tick");
    sent += status.ok();
  }
  CHECK(Outcome(status) == "RESOURCE_EXHAUSTED/QUEUE_FULL");
  uint64_t received = 0;
  while (channels.right.Receive()->has_value()) {
    ++received;
    REQUIRE(channels.left.Flush().ok());
  }
  CHECK(received == sent);
  CHECK(received > 1024);
}

TEST_CASE("Queued descriptors are closed with the channel") {
  const int before = OpenDescriptors();
  {
    Channels channels;
    const UniqueFd file = FileOf("x");
    const int fd = file.get();
    while (!channels.left.wants_write()) REQUIRE(channels.left.Send(std::string(60'000, '.'), std::span(&fd, 1)).ok());
    CHECK(OpenDescriptors() > before + 3);
  }
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("At most two packets with descriptors go unacknowledged, and none is acknowledged twice") {
  CreditWindow window;
  CHECK(Outcome(window.OnAcknowledged()) == "INVALID_ARGUMENT/NOTHING_TO_ACKNOWLEDGE");
  CHECK(window.OnSent().ok());
  CHECK(window.CanSend());
  CHECK(window.OnSent().ok());
  CHECK_FALSE(window.CanSend());
  CHECK(Outcome(window.OnSent()) == "FAILED_PRECONDITION/NO_CREDIT");
  CHECK(window.unacknowledged() == 2);
  CHECK(window.OnAcknowledged().ok());
  CHECK(window.CanSend());
  CHECK(window.OnAcknowledged().ok());
  CHECK_FALSE(window.OnAcknowledged().ok());
  CHECK(window.unacknowledged() == 0);
}

TEST_CASE("Both ends of a connection learn who the other is") {
  TemporaryDirectory directory;
  const std::string path = directory.File("s");
  const UniqueFd listener = ListenUnix(path, SOCK_SEQPACKET, 0600).value();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    absl::StatusOr<UniqueFd> connection = ConnectUnix(path, SOCK_SEQPACKET, absl::Now() + absl::Seconds(10));
    if (!connection.ok()) _exit(1);
    absl::StatusOr<PeerIdentity> peer = PeerCredentials(connection->get());
    const bool right = peer.ok() && *peer == PeerIdentity{getppid(), getuid(), getgid()};
    char byte;
    pollfd entry{connection->get(), POLLIN, 0};
    poll(&entry, 1, 10'000);
    if (read(connection->get(), &byte, 1) < 0) _exit(2);
    _exit(right ? 0 : 3);
  }
  pollfd entry{listener.get(), POLLIN, 0};
  REQUIRE(poll(&entry, 1, 10'000) == 1);
  UniqueFd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(PeerCredentials(connection.get()).value() == PeerIdentity{child, getuid(), getgid()});
  connection.reset();
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("A pidfd names its process while it lives, and -1 afterwards") {
  CHECK(PidOfPidfd(OpenPidfd(getpid())->get()).value() == getpid());
  int pipe_ends[2];
  REQUIRE(pipe2(pipe_ends, O_CLOEXEC) == 0);
  UniqueFd hold(pipe_ends[1]);
  const UniqueFd wait_end(pipe_ends[0]);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    hold.reset();
    char byte;
    _exit(read(wait_end.get(), &byte, 1) == 0 ? 0 : 1);
  }
  const UniqueFd pidfd = OpenPidfd(child).value();
  CHECK((fcntl(pidfd.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(PidOfPidfd(pidfd.get()).value() == child);
  pollfd entry{pidfd.get(), POLLIN, 0};
  CHECK(poll(&entry, 1, 0) == 0);
  hold.reset();
  CHECK(poll(&entry, 1, 10'000) == 1);
  REQUIRE(waitpid(child, nullptr, 0) == child);
  CHECK(PidOfPidfd(pidfd.get()).value() == -1);
  CHECK(Outcome(OpenPidfd(child).status()) == "NOT_FOUND/NO_SUCH_PROCESS");
}

TEST_CASE("A descriptor of another kind is no pidfd") {
  const UniqueFd event(eventfd(0, EFD_CLOEXEC));
  CHECK(Outcome(PidOfPidfd(event.get()).status()) == "INVALID_ARGUMENT/NOT_A_PIDFD");
  CHECK(Outcome(PidOfPidfd(-1).status()) == "INVALID_ARGUMENT/NOT_A_PIDFD");
}

TEST_CASE("A listening socket has its mode whatever the umask") {
  TemporaryDirectory directory;
  for (const mode_t umask_value : {0000, 0022, 0077, 0777}) {
    for (const mode_t mode : {0600, 0660, 0666}) {
      const std::string path = directory.File(absl::StrCat(umask_value, "-", mode));
      const mode_t old = umask(umask_value);
      const bool listens = ListenUnix(path, SOCK_STREAM, mode).ok();
      umask(old);
      CHECK(listens);
      CHECK(ModeOf(path) == mode);
    }
  }
}

TEST_CASE("A listening socket never has more than its mode, not even while it is made") {
  TemporaryDirectory directory;
  const std::string path = directory.File("s");
  const mode_t old = umask(0);
  std::atomic<bool> done{false};
  std::atomic<int> looks{0}, too_wide{0};
  std::thread observer([&] {
    while (!done) {
      const mode_t mode = ModeOf(path);
      looks += mode != 0;
      too_wide += (mode & ~mode_t{0600}) != 0;
    }
  });
  int failures = 0;
  for (int i = 0; i < 2000 || (looks == 0 && i < 2'000'000); ++i)
    failures += !ListenUnix(path, SOCK_SEQPACKET, 0600).ok();
  done = true;
  observer.join();
  umask(old);
  CHECK(failures == 0);
  CHECK(looks > 0);
  CHECK(too_wide == 0);
}

TEST_CASE("A socket file that nobody listens on is replaced; a live one, or a plain file, is left alone") {
  TemporaryDirectory directory;
  const std::string path = directory.File("s");
  UniqueFd first = ListenUnix(path, SOCK_SEQPACKET, 0600).value();
  CHECK(Outcome(ListenUnix(path, SOCK_SEQPACKET, 0600).status()) == "ALREADY_EXISTS/SOCKET_IN_USE");
  CHECK(Outcome(ListenUnix(path, SOCK_STREAM, 0600).status()) == "ALREADY_EXISTS/SOCKET_IN_USE");
  first.reset();
  const absl::StatusOr<UniqueFd> second = ListenUnix(path, SOCK_SEQPACKET, 0640);
  REQUIRE(second.ok());
  CHECK(ModeOf(path) == 0640);
  CHECK(ConnectUnix(path, SOCK_SEQPACKET, Soon()).ok());
  const std::string file = directory.File("file");
  const UniqueFd plain(open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  CHECK(Outcome(ListenUnix(file, SOCK_SEQPACKET, 0600).status()) == "ALREADY_EXISTS/NOT_A_SOCKET");
  CHECK(std::filesystem::is_regular_file(file));
  CHECK(ListenUnix(directory.File("absent/s"), SOCK_STREAM, 0600).status().code() == StatusCode::kNotFound);
}

TEST_CASE("A path of 107 bytes is the longest") {
  TemporaryDirectory directory;
  const std::string base = directory.File("");
  const std::string longest = base + std::string(107 - base.size(), 'x');
  const UniqueFd listener = ListenUnix(longest, SOCK_STREAM, 0600).value();
  CHECK(ConnectUnix(longest, SOCK_STREAM, Soon()).ok());
  CHECK(Outcome(ListenUnix(longest + "x", SOCK_STREAM, 0600).status()) == "INVALID_ARGUMENT/PATH_TOO_LONG");
  CHECK(Outcome(ConnectUnix(longest + "x", SOCK_STREAM, Soon()).status()) == "INVALID_ARGUMENT/PATH_TOO_LONG");
  CHECK(Outcome(ListenUnix("", SOCK_STREAM, 0600).status()) == "INVALID_ARGUMENT/BAD_PATH");
}

TEST_CASE("A connection that cannot be made says why") {
  TemporaryDirectory directory;
  const std::string path = directory.File("s");
  CHECK(Outcome(ConnectUnix(path, SOCK_SEQPACKET, Soon()).status()) == "NOT_FOUND/NO_SOCKET");
  UniqueFd listener = ListenUnix(path, SOCK_SEQPACKET, 0600).value();
  CHECK(Outcome(ConnectUnix(path, SOCK_STREAM, Soon()).status()) == "INVALID_ARGUMENT/WRONG_SOCKET_TYPE");
  if (getuid() == 0) {
    // Root passes every mode, so somebody else has to ask.
    REQUIRE(chmod(directory.File("").c_str(), 0755) == 0);
    CHECK(InChild([&] {
            if (setuid(65534) != 0) return 1;
            const absl::Status status = ConnectUnix(path, SOCK_SEQPACKET, Soon()).status();
            return Outcome(status) == "PERMISSION_DENIED/SOCKET_PERMISSION" ? 0 : 2;
          }) == 0);
  } else {
    REQUIRE(chmod(path.c_str(), 0) == 0);
    CHECK(Outcome(ConnectUnix(path, SOCK_SEQPACKET, Soon()).status()) == "PERMISSION_DENIED/SOCKET_PERMISSION");
    REQUIRE(chmod(path.c_str(), 0600) == 0);
  }
  listener.reset();
  CHECK(Outcome(ConnectUnix(path, SOCK_SEQPACKET, Soon()).status()) == "UNAVAILABLE/CONNECTION_REFUSED");
}

TEST_CASE("A listener that does not accept costs its clients their deadline and no more") {
  TemporaryDirectory directory;
  const std::string path = directory.File("s");
  const UniqueFd listener = ListenUnix(path, SOCK_SEQPACKET, 0600).value();
  REQUIRE(listen(listener.get(), 0) == 0);
  std::vector<UniqueFd> connections;
  absl::Status status;
  while (status.ok() && connections.size() < 100) {
    absl::StatusOr<UniqueFd> connection = ConnectUnix(path, SOCK_SEQPACKET, Soon());
    status = connection.status();
    if (connection.ok()) connections.push_back(std::move(*connection));
  }
  CHECK(Outcome(status) == "DEADLINE_EXCEEDED/CONNECT_TIMEOUT");
  REQUIRE_FALSE(connections.empty());
  CHECK((fcntl(connections[0].get(), F_GETFL) & O_NONBLOCK) != 0);
  CHECK((fcntl(connections[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
}

}  // namespace
}  // namespace residency

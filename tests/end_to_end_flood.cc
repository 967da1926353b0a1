// SPDX-License-Identifier: Apache-2.0
//
// Clients that send nonsense, or far too much, on the page channel of a daemon that serves others meanwhile.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/refusal.h"
#include "proto/channel.pb.h"
#include "tests/daemon_rig.h"
#include "tests/process_counts.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

PageChannel Connect(const DaemonRig& rig) {
  auto socket = ConnectUnix(rig.runtime_dir() + "/pages.sock", SOCK_SEQPACKET, absl::Now() + kPatience);
  REQUIRE(socket.ok());
  return PageChannel(*std::move(socket));
}

v1::ClientPacket Hello() {
  v1::ClientPacket packet;
  packet.mutable_hello()->set_protocol_version(1);
  packet.mutable_hello()->set_client_name("flood");
  return packet;
}

v1::ClientPacket ReleasedOf(uint64_t lease) {
  v1::ClientPacket packet;
  packet.mutable_released()->set_lease_id(lease);
  packet.mutable_released()->add_cells(0);
  return packet;
}

// The next packet; nothing at the end of the connection.
std::optional<v1::DaemonPacket> Receive(PageChannel& channel) {
  pollfd ready{.fd = channel.fd(), .events = POLLIN, .revents = 0};
  REQUIRE(poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1);
  auto packet = channel.Receive();
  if (!packet.ok() || !packet->has_value()) return std::nullopt;
  v1::DaemonPacket message;
  REQUIRE(message.ParseFromString((*packet)->payload));
  return message;
}

void Greet(PageChannel& channel) {
  const UniqueFd pidfd = *OpenPidfd(getpid());
  const int descriptor = pidfd.get();
  REQUIRE(channel.Send(Hello().SerializeAsString(), {&descriptor, 1}).ok());
  const auto answer = Receive(channel);
  REQUIRE(answer.has_value());
  REQUIRE(answer->has_welcome());
}

// The reason with which the session ends, which it must.
std::string ReasonOfEnd(PageChannel& channel) {
  const auto refused = Receive(channel);
  if (!refused.has_value()) return "no reason";
  if (!refused->has_refused()) return "no refusal";
  CHECK_FALSE(Receive(channel).has_value());
  return refused->refused().reason();
}

// Sends what PageChannel would refuse to send.
void SendRaw(const PageChannel& channel, const std::string& payload, const std::vector<int>& descriptors) {
  iovec part{const_cast<char*>(payload.data()), payload.size()};
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  REQUIRE(sendmsg(channel.fd(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(payload.size()));
}

// A daemon whose one model has one client, which looks on.
struct Scene {
  DaemonRig rig{{"--cell_bytes", "2MiB"}};
  Hashes truth = WriteCheckpoint(rig.Path("one.safetensors"), {5 * kMiB, 257}, 31);
  ReaderClient witness = Attached();
  Json status = rig.Status();
  ProcessCounts counts = SettledCountsOf(rig.daemon().pid());

  ReaderClient Attached() {
    rig.Do({"register", "one", rig.Path("one.safetensors")});
    return ReaderClient(rig, "one");
  }
  void CheckUnharmed() {
    CHECK(witness.Ask("hash").at("sha256") == truth);
    const Json now = rig.Status();
    CHECK(now.at("models")[0].at("leases").size() == 1);
    CHECK(now.at("devices")[0].at("broker_bytes") == status.at("devices")[0].at("broker_bytes"));
    rig.AwaitFree(status.at("devices")[0].at("free_bytes"));
    CHECK(SettledCountsOf(rig.daemon().pid()).descriptors == counts.descriptors);
  }
};

TEST_CASE("What breaks the protocol ends the session that sent it with its reason, and leaves nothing") {
  Scene scene;
  const UniqueFd file(memfd_create("x", MFD_CLOEXEC));
  const UniqueFd pidfd = *OpenPidfd(getpid());
  const uint64_t witness_lease = scene.status.at("models")[0].at("leases")[0].at("id");
  struct Attack {
    std::string name;
    std::function<void(PageChannel&)> attack;
    std::string reason;
  };
  const std::vector<Attack> attacks = {
      {"an oversize packet", [](PageChannel& c) { SendRaw(c, std::string(65537, 'x'), {}); }, "PACKET_TOO_LARGE"},
      {"an oversize packet with descriptors",
       [&](PageChannel& c) { SendRaw(c, std::string(70000, 'x'), std::vector<int>(9, file.get())); },
       "PACKET_TOO_LARGE"},
      {"65 descriptors", [&](PageChannel& c) { SendRaw(c, "x", std::vector<int>(65, file.get())); },
       "TOO_MANY_DESCRIPTORS"},
      {"253 descriptors", [&](PageChannel& c) { SendRaw(c, "x", std::vector<int>(253, file.get())); },
       "TOO_MANY_DESCRIPTORS"},
      {"two pidfds",
       [&](PageChannel& c) {
         SendRaw(c, Hello().SerializeAsString(), {pidfd.get(), pidfd.get()});
       },
       "BAD_HELLO"},
      {"no pidfd", [&](PageChannel& c) { SendRaw(c, Hello().SerializeAsString(), {file.get()}); }, "BAD_HELLO"},
      {"a descriptor where none belongs",
       [&](PageChannel& c) {
         Greet(c);
         SendRaw(c, ReleasedOf(7).SerializeAsString(), {file.get()});
       },
       "PROTOCOL"},
      {"an acknowledgement of what was not sent",
       [](PageChannel& c) {
         Greet(c);
         v1::ClientPacket packet;
         packet.mutable_cells_mapped()->set_lease_id(1);
         REQUIRE(c.Send(packet.SerializeAsString()).ok());
       },
       "NOTHING_TO_ACKNOWLEDGE"},
      {"another session's lease",
       [&](PageChannel& c) {
         Greet(c);
         REQUIRE(c.Send(ReleasedOf(witness_lease).SerializeAsString()).ok());
       },
       "PROTOCOL"},
      {"a failure of another session's lease",
       [&](PageChannel& c) {
         Greet(c);
         v1::ClientPacket packet;
         packet.mutable_lease_failed()->set_lease_id(witness_lease);
         REQUIRE(c.Send(packet.SerializeAsString()).ok());
       },
       "PROTOCOL"},
  };
  for (const Attack& attack : attacks) {
    INFO(attack.name);
    PageChannel channel = Connect(scene.rig);
    attack.attack(channel);
    CHECK(ReasonOfEnd(channel) == attack.reason);
  }
  scene.CheckUnharmed();
}

TEST_CASE("Random bytes, and packets that were cut off, end sessions and nothing else") {
  Scene scene;
  std::mt19937_64 random(77);
  for (int i = 0; i < 300; ++i) {
    PageChannel channel = Connect(scene.rig);
    if (i % 2 == 1) Greet(channel);
    std::string bytes(1 + random() % (i % 10 == 0 ? 65536 : 40), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    REQUIRE(channel.Send(bytes).ok());
    // What happens to be a packet may be about a lease that is not there, and is ignored then; the next one is not.
    (void)channel.Send("\xff\xff\xff");
    INFO(i);
    CHECK_FALSE(ReasonOfEnd(channel).empty());
  }
  const UniqueFd pidfd = *OpenPidfd(getpid());
  const int descriptor = pidfd.get();
  const std::string hello = Hello().SerializeAsString();
  for (size_t length = 1; length < hello.size(); ++length) {
    PageChannel channel = Connect(scene.rig);
    REQUIRE(channel.Send(hello.substr(0, length), {&descriptor, 1}).ok());
    // One cut falls between two fields: it leaves a Hello without a name, which is none the worse.
    const auto answer = Receive(channel);
    REQUIRE(answer.has_value());
    CHECK((answer->has_refused() || answer->has_welcome()));
  }
  scene.CheckUnharmed();
}

TEST_CASE("Floods of connections and packets keep nobody waiting, and a connection without a Hello ends by itself") {
  Scene scene;
  PageChannel silent = Connect(scene.rig);
  const absl::Time opened = absl::Now();
  // Nobody else is slowed down by `flood`.
  const auto serves = [&](const std::function<void()>& flood) {
    std::atomic<bool> stop{false};
    std::thread flooder([&] {
      while (!stop) flood();
    });
    const absl::Time start = absl::Now();
    for (int i = 0; i < 3; ++i) {
      const Outcome attached = scene.rig.Ctl({"attach", "one"});
      CHECK(attached.exit_status == 0);
    }
    // Three processes, each of which makes a context where there is a real card.
    CHECK(absl::Now() - start < absl::Seconds(OnSim() ? 6 : 30));
    stop = true;
    flooder.join();
  };
  {
    INFO("packets without end");
    PageChannel channel = Connect(scene.rig);
    Greet(channel);
    const std::string packet = ReleasedOf(uint64_t{1} << 40).SerializeAsString();
    serves([&] { (void)send(channel.fd(), packet.data(), packet.size(), MSG_NOSIGNAL); });
    CHECK(channel.Send(packet).ok());
  }
  {
    INFO("connections that come and go");
    const UniqueFd pidfd = *OpenPidfd(getpid());
    const int descriptor = pidfd.get();
    const std::string hello = Hello().SerializeAsString();
    std::atomic<int> connections{0};
    serves([&] {
      auto socket = ConnectUnix(scene.rig.runtime_dir() + "/pages.sock", SOCK_SEQPACKET, absl::Now() + kPatience);
      if (!socket.ok()) return;
      PageChannel channel(*std::move(socket));
      (void)channel.Send(hello, {&descriptor, 1});
      ++connections;
    });
    CHECK(connections > 100);
  }
  {
    INFO("connections that stay");
    std::vector<PageChannel> channels;
    for (int i = 0; i < 200; ++i) channels.push_back(Connect(scene.rig));
    CHECK(ReasonOfEnd(channels.back()) == "SESSION_LIMIT");
    ReaderClient another(scene.rig, "one");
    CHECK(another.Ask("hash").at("sha256") == scene.truth);
  }
  CHECK(ReasonOfEnd(silent) == "BAD_HELLO");
  CHECK(absl::Now() - opened >= absl::Seconds(5));
  scene.rig.Await("only the witness is left",
                  [](const Json& status) { return status["models"][0]["leases"].size() == 1; });
  scene.CheckUnharmed();
}

}  // namespace
}  // namespace residency

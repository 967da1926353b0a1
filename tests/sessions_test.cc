// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side of the page channel against clients that keep to the protocol, and clients that do not.
#include "daemon/sessions.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <future>
#include <stdexcept>

#include "mechanisms/refusal.h"

namespace residency {
namespace {

class Rig {
 public:
  Rig() : loop_(*Loop::Start("test")) {
    OnLoop([this] {
      sessions_ = std::make_unique<Sessions>(*loop_, DaemonIdentity{"epoch", "sim", "/sim"},
                                             [this](const Event& event) { events_.push_back(event); });
    });
  }
  ~Rig() {
    loop_->Stop();
    sessions_.reset();
  }

  void OnLoop(std::function<void()> task) {
    std::promise<void> done;
    loop_->Post([&] {
      task();
      done.set_value();
    });
    done.get_future().wait();
  }
  Sessions& sessions() { return *sessions_; }

  // A client's end of a new connection.
  PageChannel Connect() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
    OnLoop([&] { sessions_->Add(UniqueFd(ends[0]), {getpid(), getuid(), getgid()}); });
    return PageChannel(UniqueFd(ends[1]));
  }

  // The events so far, once there are at least `count`.
  std::vector<Event> Events(size_t count) {
    for (int i = 0; i < 1000; ++i) {
      std::vector<Event> copy;
      OnLoop([&] { copy = events_; });
      if (copy.size() >= count) return copy;
      poll(nullptr, 0, 5);
    }
    throw std::runtime_error("the events did not come");
  }

 private:
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Sessions> sessions_;
  std::vector<Event> events_;
};

void Send(PageChannel& channel, const v1::ClientPacket& packet, std::vector<int> descriptors = {}) {
  REQUIRE(channel.Send(packet.SerializeAsString(), descriptors).ok());
}

struct Received {
  v1::DaemonPacket message;
  std::vector<UniqueFd> descriptors;
};

// The next packet; throws at a hang-up or after 5 s.
Received Receive(PageChannel& channel) {
  pollfd ready{.fd = channel.fd(), .events = POLLIN};
  if (poll(&ready, 1, 5000) != 1) throw std::runtime_error("no packet came");
  auto packet = channel.Receive();
  if (!packet.ok()) throw std::runtime_error(packet.status().ToString());
  Received received;
  if (!received.message.ParseFromString((*packet)->payload)) throw std::runtime_error("no DaemonPacket");
  received.descriptors = std::move((*packet)->descriptors);
  return received;
}

bool NothingComes(PageChannel& channel) {
  pollfd ready{.fd = channel.fd(), .events = POLLIN};
  return poll(&ready, 1, 50) == 0;
}

v1::ClientPacket Hello() {
  v1::ClientPacket packet;
  packet.mutable_hello()->set_protocol_version(1);
  packet.mutable_hello()->set_client_name("tester");
  return packet;
}

// Introduces itself; the session's name on the wire.
std::string Greet(PageChannel& channel) {
  const UniqueFd pidfd = *OpenPidfd(getpid());
  Send(channel, Hello(), {pidfd.get()});
  const Received welcome = Receive(channel);
  REQUIRE(welcome.message.has_welcome());
  CHECK(welcome.message.welcome().session_id().size() == 16);
  CHECK(welcome.message.welcome().driver() == "sim");
  return welcome.message.welcome().session_id();
}

std::vector<CellToSend> MakeCells(uint32_t count) {
  std::vector<CellToSend> cells;
  for (uint32_t i = 0; i < count; ++i) {
    cells.push_back({i, i * uint64_t{4096}, 4096, std::make_shared<const UniqueFd>(memfd_create("cell", MFD_CLOEXEC))});
  }
  return cells;
}

// Acknowledges a Cells packet.
void Acknowledge(PageChannel& channel, const v1::Cells& cells) {
  v1::ClientPacket packet;
  v1::CellsMapped& mapped = *packet.mutable_cells_mapped();
  mapped.set_lease_id(cells.lease_id());
  mapped.set_generation(cells.generation());
  for (const v1::Cell& cell : cells.cells()) mapped.add_cells(cell.index());
  Send(channel, packet);
}

// Grants lease 1 of the one session, and takes the client's packet for it.
void Grant(Rig& rig, PageChannel& channel, const std::string& wire_id) {
  rig.OnLoop([&] {
    v1::LeaseGranted grant;
    grant.set_lease_id(1);
    grant.set_model("m");
    const SessionId session = *rig.sessions().Find(wire_id, {getpid(), getuid(), getgid()});
    rig.sessions().GrantLease(session, grant);
  });
  const Received granted = Receive(channel);
  REQUIRE(granted.message.has_lease_granted());
  REQUIRE(granted.descriptors.size() == 1);
  CHECK(UseWordMapping::Map(granted.descriptors[0].get()).ok());
}

// The reason with which the daemon refuses, and hangs up.
std::string RefusedWith(PageChannel& channel) {
  const Received refused = Receive(channel);
  REQUIRE(refused.message.has_refused());
  pollfd ready{.fd = channel.fd(), .events = POLLIN};
  REQUIRE(poll(&ready, 1, 5000) == 1);
  CHECK(ReasonOf(channel.Receive().status()) == "HANG_UP");
  return refused.message.refused().reason();
}

TEST_CASE("A session belongs to the process and user that opened it") {
  Rig rig;
  PageChannel channel = rig.Connect();
  const std::string wire_id = Greet(channel);
  const auto opened = std::get<SessionOpened>(rig.Events(1).at(0));
  CHECK(opened.pid == getpid());
  CHECK(opened.client == "tester");
  rig.OnLoop([&] {
    CHECK(rig.sessions().Find(wire_id, {getpid(), getuid(), getgid()}).ok());
    CHECK(ReasonOf(rig.sessions().Find(wire_id, {getpid() + 1, getuid(), getgid()}).status()) == "SESSION_OWNER");
    CHECK(ReasonOf(rig.sessions().Find(wire_id, {getpid(), getuid() + 1, getgid()}).status()) == "SESSION_OWNER");
    CHECK(ReasonOf(rig.sessions().Find("guess", {getpid(), getuid(), getgid()}).status()) == "NO_SUCH_SESSION");
  });
  channel.TakeSocket().reset();
  CHECK(std::holds_alternative<SessionEnded>(rig.Events(2).at(1)));
}

TEST_CASE("At most two packets of cells are on their way unacknowledged, and each has at most 64") {
  Rig rig;
  PageChannel channel = rig.Connect();
  const std::string wire_id = Greet(channel);
  Grant(rig, channel, wire_id);
  rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(200)); });
  std::vector<v1::Cells> packets;
  for (int i = 0; i < 2; ++i) {
    const Received received = Receive(channel);
    CHECK(received.descriptors.size() == 64);
    packets.push_back(received.message.cells());
  }
  CHECK(NothingComes(channel));
  rig.OnLoop([&] { CHECK(rig.sessions().mapped_bytes(LeaseId{1}) == 0); });
  Acknowledge(channel, packets[0]);
  packets.push_back(Receive(channel).message.cells());
  CHECK(NothingComes(channel));
  Acknowledge(channel, packets[1]);
  packets.push_back(Receive(channel).message.cells());
  CHECK(packets[3].cells_size() == 8);
  CHECK(packets[3].last());
  CHECK_FALSE(packets[2].last());
  Acknowledge(channel, packets[2]);
  CHECK(rig.Events(1).size() == 1);  // not mapped until the last one is
  Acknowledge(channel, packets[3]);
  const auto mapped = std::get<LeaseMapped>(rig.Events(2).at(1));
  CHECK(mapped.lease == LeaseId{1});
  CHECK(mapped.generation == 1);
  rig.OnLoop([&] { CHECK(rig.sessions().mapped_bytes(LeaseId{1}) == 200 * 4096); });
}

TEST_CASE("What was sent of a generation while it was filled is not sent again, and the last packet says so") {
  Rig rig;
  PageChannel channel = rig.Connect();
  Grant(rig, channel, Greet(channel));
  std::vector<CellToSend> first = MakeCells(5);
  first.resize(3);
  rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, first, /*last=*/false); });
  const Received early = Receive(channel);
  CHECK(early.message.cells().cells_size() == 3);
  CHECK_FALSE(early.message.cells().last());
  Acknowledge(channel, early.message.cells());
  SECTION("with what is left") {
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(5)); });
    const Received rest = Receive(channel);
    REQUIRE(rest.message.cells().cells_size() == 2);
    CHECK(rest.message.cells().cells(0).index() == 3);
    CHECK(rest.message.cells().last());
    CHECK(rig.Events(1).size() == 1);
    Acknowledge(channel, rest.message.cells());
  }
  SECTION("with nothing where nothing is left") {
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(3)); });
    const Received rest = Receive(channel);
    CHECK(rest.message.cells().cells_size() == 0);
    CHECK(rest.message.cells().last());
    Acknowledge(channel, rest.message.cells());
  }
  CHECK(std::get<LeaseMapped>(rig.Events(2).at(1)).generation == 1);
}

TEST_CASE("A generation that is being sent is asked back once what is on its way was acknowledged") {
  Rig rig;
  PageChannel channel = rig.Connect();
  Grant(rig, channel, Greet(channel));
  v1::ClientPacket released;
  released.mutable_released()->set_lease_id(1);
  released.mutable_released()->set_generation(1);
  SECTION("with the packets that wait for the client left here") {
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(200), /*last=*/false); });
    std::vector<v1::Cells> packets;
    for (int i = 0; i < 2; ++i) packets.push_back(Receive(channel).message.cells());
    rig.OnLoop([&] {
      rig.sessions().Revoke(LeaseId{1}, 1);
      rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(201));
    });
    Acknowledge(channel, packets[0]);
    CHECK(NothingComes(channel));
    Acknowledge(channel, packets[1]);
    for (const v1::Cells& cells : packets) {
      for (const v1::Cell& cell : cells.cells()) released.mutable_released()->add_cells(cell.index());
    }
  }
  SECTION("also before any of it was sent") {
    rig.OnLoop([&] {
      rig.sessions().BeginCells(LeaseId{1}, 1);
      rig.sessions().Revoke(LeaseId{1}, 1);
      rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(2), /*last=*/false);
    });
  }
  CHECK(Receive(channel).message.revoke().generation() == 1);
  Send(channel, released);
  CHECK(std::get<LeaseReleased>(rig.Events(2).at(1)).generation == 1);
  CHECK(NothingComes(channel));
  // The next one comes whole.
  rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 2, MakeCells(3)); });
  CHECK(Receive(channel).message.cells().cells_size() == 3);
}

TEST_CASE("Cells that were released piece by piece are all gone with the last one") {
  Rig rig;
  PageChannel channel = rig.Connect();
  Grant(rig, channel, Greet(channel));
  rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(3)); });
  Acknowledge(channel, Receive(channel).message.cells());
  rig.Events(2);
  v1::ClientPacket packet;
  packet.mutable_released()->set_lease_id(1);
  packet.mutable_released()->set_generation(1);
  packet.mutable_released()->add_cells(0);
  packet.mutable_released()->add_cells(1);
  Send(channel, packet);
  packet.mutable_released()->clear_cells();
  packet.mutable_released()->add_cells(2);
  Send(channel, packet);
  const std::vector<Event> events = rig.Events(4);
  CHECK(events.size() == 4);
  CHECK(std::get<LeaseReleasing>(events[2]).lease == LeaseId{1});
  CHECK(std::get<LeaseReleased>(events[3]).lease == LeaseId{1});
  rig.OnLoop([&] { CHECK(rig.sessions().mapped_bytes(LeaseId{1}) == 0); });
}

TEST_CASE("Whoever waits for a lease's cells sees them go piece by piece, and all of them with the client") {
  Rig rig;
  PageChannel channel = rig.Connect();
  Grant(rig, channel, Greet(channel));
  rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(3)); });
  Acknowledge(channel, Receive(channel).message.cells());
  rig.Events(2);
  const auto held = std::make_shared<HeldCells>();
  rig.OnLoop([&] { rig.sessions().ShowHeld(LeaseId{1}, held); });
  CHECK(held->IsHeld(2));
  v1::ClientPacket packet;
  packet.mutable_released()->set_lease_id(1);
  packet.mutable_released()->set_generation(1);
  packet.mutable_released()->add_cells(0);
  Send(channel, packet);
  rig.Events(3);
  CHECK_FALSE(held->IsHeld(0));
  CHECK(held->IsHeld(1));
  SECTION("that says so") {
    packet.mutable_released()->set_cells(0, 1);
    packet.mutable_released()->add_cells(2);
    Send(channel, packet);
    CHECK(std::holds_alternative<LeaseReleased>(rig.Events(4).at(3)));
  }
  SECTION("that says it has none, as it could not map") {
    v1::ClientPacket failed;
    failed.mutable_lease_failed()->set_lease_id(1);
    Send(channel, failed);
    CHECK(std::holds_alternative<LeaseFailed>(rig.Events(4).at(3)));
  }
  SECTION("whose lease ends") {
    rig.OnLoop([&] { rig.sessions().EndLease(LeaseId{1}, "UNLOADED", ""); });
  }
  CHECK_FALSE(held->any());
}

TEST_CASE("A generation is released once it was acknowledged, and an older answer changes nothing") {
  Rig rig;
  PageChannel channel = rig.Connect();
  Grant(rig, channel, Greet(channel));
  v1::ClientPacket packet;
  packet.mutable_released()->set_lease_id(1);
  packet.mutable_released()->add_cells(0);
  SECTION("before it was acknowledged") {
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(1)); });
    Receive(channel);
    packet.mutable_released()->set_generation(1);
    Send(channel, packet);
    CHECK(RefusedWith(channel) == "PROTOCOL");
  }
  SECTION("an older one") {
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 2, MakeCells(1)); });
    Acknowledge(channel, Receive(channel).message.cells());
    packet.mutable_released()->set_generation(1);
    Send(channel, packet);
    CHECK(NothingComes(channel));
    rig.OnLoop([&] { CHECK(rig.sessions().mapped_bytes(LeaseId{1}) == 4096); });
  }
}

TEST_CASE("A client that hangs up with cells mapped is not taken for one that is gone") {
  Rig rig;
  PageChannel channel = rig.Connect();
  Grant(rig, channel, Greet(channel));
  rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(1)); });
  Acknowledge(channel, Receive(channel).message.cells());
  rig.Events(2);
  channel.TakeSocket().reset();
  CHECK(std::holds_alternative<SessionHungUp>(rig.Events(3).at(2)));
  CHECK(rig.Events(3).size() == 3);  // its process, this one, lives
}

TEST_CASE("Who breaks the protocol is told how and loses its session, and nobody else's") {
  Rig rig;
  PageChannel other = rig.Connect();
  Greet(other);
  PageChannel channel = rig.Connect();
  std::string expected = "PROTOCOL";
  SECTION("a wrong version") {
    v1::ClientPacket hello = Hello();
    hello.mutable_hello()->set_protocol_version(99);
    Send(channel, hello);
    expected = "PROTOCOL_VERSION";
  }
  SECTION("a Hello without a pidfd") {
    Send(channel, Hello());
    expected = "BAD_HELLO";
  }
  SECTION("a Hello with somebody else's pidfd") {
    const UniqueFd parent = *OpenPidfd(getppid());
    Send(channel, Hello(), {parent.get()});
    expected = "BAD_HELLO";
  }
  SECTION("a Hello with a descriptor that is no pidfd") {
    const UniqueFd file(memfd_create("x", MFD_CLOEXEC));
    Send(channel, Hello(), {file.get()});
    expected = "BAD_HELLO";
  }
  SECTION("a name that is not printable") {
    v1::ClientPacket hello = Hello();
    hello.mutable_hello()->set_client_name("a\nb");
    const UniqueFd pidfd = *OpenPidfd(getpid());
    Send(channel, hello, {pidfd.get()});
    expected = "BAD_HELLO";
  }
  SECTION("anything before Hello") {
    v1::ClientPacket packet;
    packet.mutable_released();
    Send(channel, packet);
  }
  SECTION("a second Hello") {
    Greet(channel);
    Send(channel, Hello());
  }
  SECTION("descriptors with a packet that takes none") {
    Greet(channel);
    v1::ClientPacket packet;
    packet.mutable_released()->set_lease_id(1);
    const UniqueFd file(memfd_create("x", MFD_CLOEXEC));
    Send(channel, packet, {file.get(), file.get()});
  }
  SECTION("no message at all") { REQUIRE(channel.Send("\xff\xff\xff").ok()); }
  SECTION("an acknowledgement of nothing") {
    Greet(channel);
    v1::ClientPacket packet;
    packet.mutable_cells_mapped()->set_lease_id(1);
    Send(channel, packet);
    expected = "NOTHING_TO_ACKNOWLEDGE";
  }
  SECTION("an acknowledgement of other cells") {
    Grant(rig, channel, Greet(channel));
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(2)); });
    v1::Cells cells = Receive(channel).message.cells();
    cells.mutable_cells(1)->set_index(7);
    Acknowledge(channel, cells);
  }
  SECTION("an acknowledgement of the same cells in another generation") {
    Grant(rig, channel, Greet(channel));
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(2)); });
    v1::Cells cells = Receive(channel).message.cells();
    cells.set_generation(2);
    Acknowledge(channel, cells);
  }
  SECTION("a release of what it does not hold") {
    Grant(rig, channel, Greet(channel));
    rig.OnLoop([&] { rig.sessions().SendCells(LeaseId{1}, 1, MakeCells(2)); });
    Acknowledge(channel, Receive(channel).message.cells());
    v1::ClientPacket packet;
    packet.mutable_released()->set_lease_id(1);
    packet.mutable_released()->set_generation(1);
    packet.mutable_released()->add_cells(2);
    Send(channel, packet);
  }
  SECTION("a release of a lease before any of its cells was sent") {
    Grant(rig, channel, Greet(channel));
    v1::ClientPacket packet;
    packet.mutable_released()->set_lease_id(1);
    Send(channel, packet);
  }
  CHECK(RefusedWith(channel) == expected);
  CHECK(NothingComes(other));
}

// A connected TCP socket whose last close waits for `linger_seconds`, as its peer reads nothing of what it was sent.
struct LingeringSocket {
  UniqueFd peer;
  UniqueFd socket;
};

LingeringSocket MakeLingeringSocket(int linger_seconds) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  LingeringSocket made{.peer = UniqueFd(), .socket = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  const bool listens = bind(listener.get(), generic, length) == 0 && listen(listener.get(), 1) == 0 &&
                       getsockname(listener.get(), generic, &length) == 0;
  if (!listens || connect(made.socket.get(), generic, length) != 0) throw std::runtime_error("no TCP on loopback");
  made.peer = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const linger lingers{.l_onoff = 1, .l_linger = linger_seconds};
  (void)setsockopt(made.socket.get(), SOL_SOCKET, SO_LINGER, &lingers, sizeof(lingers));
  const std::vector<char> bytes(1 << 20);
  while (send(made.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  return made;
}

TEST_CASE("A descriptor whose close takes long, sent in place of any other, holds nobody else up") {
  Rig rig;
  PageChannel channel = rig.Connect();
  LingeringSocket lingering = MakeLingeringSocket(5);
  const int descriptor = lingering.socket.get();
  std::vector<std::pair<std::string, std::vector<int>>> packets;
  v1::ClientPacket released;
  released.mutable_released();
  SECTION("as the pidfd of a Hello") { packets = {{Hello().SerializeAsString(), {descriptor}}}; }
  SECTION("with a packet that takes none") {
    Greet(channel);
    packets = {{released.SerializeAsString(), {descriptor}}};
  }
  SECTION("with no message") { packets = {{"\xff", {descriptor}}}; }
  SECTION("behind what ended the session, never read") {
    packets = {{"\xff", {}}, {Hello().SerializeAsString(), {descriptor}}};
  }
  // On the loop, so that it reads nothing before the sender's own descriptor is closed: the last close is its affair.
  rig.OnLoop([&] {
    for (const auto& [payload, descriptors] : packets) (void)channel.Send(payload, descriptors);
    lingering.socket.reset();
  });
  const absl::Time start = MonotonicNow();
  (void)RefusedWith(channel);
  PageChannel other = rig.Connect();
  Greet(other);
  CHECK(MonotonicNow() - start < absl::Seconds(2));
  // A close that no longer waits, so that the process ends soon.
  lingering.peer.reset();
}

TEST_CASE("A process opens 64 page channels and no more, until one of them ends") {
  Rig rig;
  std::vector<PageChannel> channels;
  for (int i = 0; i < 64; ++i) {
    channels.push_back(rig.Connect());
    if (i % 2 == 0) Greet(channels.back());
  }
  PageChannel refused = rig.Connect();
  CHECK(RefusedWith(refused) == "SESSION_LIMIT");
  rig.Events(32);
  channels.pop_back();
  channels.pop_back();
  // The last but one had said Hello: its end is told.
  rig.Events(33);
  PageChannel fresh = rig.Connect();
  Greet(fresh);
}

TEST_CASE("A client that never reads loses its session once its queue is full, and its lease with it") {
  Rig rig;
  PageChannel channel = rig.Connect();
  const std::string wire_id = Greet(channel);
  PageChannel other = rig.Connect();
  Greet(other);
  rig.Events(2);
  rig.OnLoop([&] {
    const SessionId session = *rig.sessions().Find(wire_id, {getpid(), getuid(), getgid()});
    // Each grant and each end of a lease is a packet; the socket takes a few hundred, the queue 1,024.
    for (uint64_t lease = 1; lease <= 2000; ++lease) {
      v1::LeaseGranted grant;
      grant.set_lease_id(lease);
      rig.sessions().GrantLease(session, grant);
      if (rig.sessions().Word(LeaseId{lease}) != nullptr) rig.sessions().EndLease(LeaseId{lease}, "RELEASED", "");
    }
  });
  CHECK(std::holds_alternative<SessionEnded>(rig.Events(3).at(2)));
  CHECK(NothingComes(other));
}

TEST_CASE("A packet about another session's lease ends the session that sent it") {
  Rig rig;
  PageChannel owner = rig.Connect();
  Grant(rig, owner, Greet(owner));
  PageChannel thief = rig.Connect();
  Greet(thief);
  v1::ClientPacket packet;
  packet.mutable_released()->set_lease_id(1);
  packet.mutable_released()->add_cells(0);
  Send(thief, packet);
  CHECK(RefusedWith(thief) == "PROTOCOL");
  CHECK(NothingComes(owner));
}

}  // namespace
}  // namespace residency

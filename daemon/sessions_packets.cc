// SPDX-License-Identifier: Apache-2.0
//
// What clients say on the page channel, packet by packet.
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "daemon/sessions.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr uint32_t kProtocolVersion = 1;
constexpr size_t kMaxClientNameBytes = 64;

absl::Status ProtocolError(std::string_view message) {
  return Refuse(absl::StatusCode::kInvalidArgument, "PROTOCOL", message);
}

std::string RandomSessionId() {
  std::string id(16, '\0');
  // 16 bytes come whole and without waiting once the kernel's pool is up, which it is when a daemon starts.
  while (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
  }
  return id;
}

}  // namespace

// What is left in `packet.descriptors` afterwards is the client's, to be closed.
absl::Status Sessions::Handle(Session& session, Packet& packet) {
  v1::ClientPacket message;
  if (!message.ParseFromString(packet.payload)) return ProtocolError("a packet is no ClientPacket");
  if (session.wire_id.empty() != message.has_hello()) return ProtocolError("Hello comes first, and once");
  if (!message.has_hello() && !packet.descriptors.empty()) {
    return ProtocolError(absl::StrCat(packet.descriptors.size(), " descriptors came with a packet that takes none"));
  }
  switch (message.packet_case()) {
    case v1::ClientPacket::kHello:
      return OnHello(session, message.hello(), packet.descriptors);
    case v1::ClientPacket::kCellsMapped:
      return OnCellsMapped(session, message.cells_mapped());
    case v1::ClientPacket::kReleased:
      return OnReleased(session, message.released());
    case v1::ClientPacket::kLeaseFailed:
      return OnLeaseFailed(session, message.lease_failed());
    case v1::ClientPacket::PACKET_NOT_SET:
      break;
  }
  return ProtocolError("a packet of a kind that this version does not know");
}

absl::Status Sessions::OnHello(Session& session, const v1::Hello& hello, std::vector<UniqueFd>& descriptors) {
  if (hello.protocol_version() != kProtocolVersion) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VERSION",
                  absl::StrCat("the client speaks version ", hello.protocol_version(),
                               " of the page channel, this daemon ", kProtocolVersion));
  }
  const std::string& name = hello.client_name();
  if (name.size() > kMaxClientNameBytes ||
      !std::all_of(name.begin(), name.end(), [](unsigned char c) { return absl::ascii_isprint(c); })) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_HELLO", "the client's name is too long or not printable");
  }
  if (descriptors.size() != 1) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_HELLO", "Hello comes with one descriptor, a pidfd");
  }
  const auto pid = PidOfPidfd(descriptors[0].get());
  if (!pid.ok() || *pid != session.peer.pid) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_HELLO",
                  absl::StrCat("the descriptor is no pidfd of the client's own pid ", session.peer.pid));
  }
  session.pidfd = std::move(descriptors[0]);
  if (auto status = loop_.Watch(session.pidfd.get(), EPOLLIN, [this, id = session.id](uint32_t) { End(id); });
      !status.ok()) {
    return status;
  }
  loop_.CancelTimer(session.hello_timer);
  session.wire_id = RandomSessionId();
  by_wire_id_.emplace(session.wire_id, session.id);
  v1::DaemonPacket packet;
  v1::Welcome& welcome = *packet.mutable_welcome();
  welcome.set_session_id(session.wire_id);
  welcome.set_epoch(identity_.epoch);
  welcome.set_driver(identity_.driver);
  welcome.set_sim_directory(identity_.sim_directory);
  tell_(SessionOpened{session.id, session.peer.pid, session.peer.uid, name});
  return Send(session, packet);
}

absl::StatusOr<Sessions::Lease*> Sessions::LeaseOf(Session& session, LeaseId id) {
  const auto lease = leases_.find(id);
  // Ended meanwhile: the client's packet crossed our LeaseEnded.
  if (lease == leases_.end()) return nullptr;
  if (lease->second.session != session.id) {
    return ProtocolError(absl::StrCat("lease ", id.value, " belongs to another session"));
  }
  return &lease->second;
}

absl::Status Sessions::OnCellsMapped(Session& session, const v1::CellsMapped& mapped) {
  if (auto status = session.credit.OnAcknowledged(); !status.ok()) return status;
  PacketInFlight packet = std::move(session.in_flight.front());
  session.in_flight.pop_front();
  const LeaseId id{mapped.lease_id()};
  if (id != packet.lease || mapped.generation() != packet.generation ||
      !std::equal(mapped.cells().begin(), mapped.cells().end(), packet.cells.begin(), packet.cells.end())) {
    return ProtocolError("CellsMapped does not answer the oldest Cells");
  }
  auto lease = LeaseOf(session, id);
  if (!lease.ok()) return lease.status();
  if (*lease != nullptr) {
    for (size_t i = 0; i < packet.cells.size(); ++i) (*lease)->mapped[packet.cells[i]] = packet.bytes[i];
    (*lease)->packets -= 1;
    if ((*lease)->revoke_waits && (*lease)->packets == 0) SendRevoke(session, id, **lease);
    if (packet.last) tell_(LeaseMapped{id, packet.generation});
  }
  Pump(session);
  return absl::OkStatus();
}

absl::Status Sessions::OnReleased(Session& session, const v1::Released& released) {
  const LeaseId id{released.lease_id()};
  auto lease = LeaseOf(session, id);
  if (!lease.ok()) return lease.status();
  if (*lease == nullptr) return absl::OkStatus();
  // The answer to a Revoke that was taken back and given again.
  if (released.generation() < (*lease)->generation) return absl::OkStatus();
  // Nothing was sent yet where the generation is 0.
  if (released.generation() > (*lease)->generation || (*lease)->packets > 0 || released.generation() == 0) {
    return ProtocolError(absl::StrCat("generation ", released.generation(), " of lease ", id.value,
                                      " was released before it was all acknowledged"));
  }
  std::set<uint32_t> cells;
  for (uint32_t cell : released.cells()) {
    if (!(*lease)->held.contains(cell) || !cells.insert(cell).second) {
      return ProtocolError(absl::StrCat("cell ", cell, " of lease ", id.value, " was released, but not held"));
    }
  }
  LetGo(**lease, cells);
  if ((*lease)->held.empty()) {
    tell_(LeaseReleased{id, released.generation()});
  } else if (!cells.empty()) {
    tell_(LeaseReleasing{id, released.generation()});
  }
  return absl::OkStatus();
}

absl::Status Sessions::OnLeaseFailed(Session& session, const v1::LeaseFailed& failed) {
  const LeaseId id{failed.lease_id()};
  auto lease = LeaseOf(session, id);
  if (!lease.ok()) return lease.status();
  if (*lease == nullptr) return absl::OkStatus();
  LetGo(**lease, std::set<uint32_t>((*lease)->held));
  const absl::Status status =
      Refuse(absl::StatusCode::kAborted, failed.reason().empty() ? "LEASE_FAILED" : failed.reason(),
             absl::StrCat("pid ", session.peer.pid, " could not map: ", failed.message()));
  spdlog::warn("lease {} failed: {}", id.value, absl::CEscape(status.message()));
  tell_(LeaseFailed{id, status, /*by_client=*/true});
  return absl::OkStatus();
}

}  // namespace residency

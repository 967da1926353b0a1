// SPDX-License-Identifier: Apache-2.0
#include "daemon/sessions.h"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr absl::Duration kHelloDeadline = absl::Seconds(5);
constexpr int kMaxSessionsOfProcess = 64;
// Then it is the turn of others; the loop comes back for what is left.
constexpr int kPacketsInTurn = 64;

v1::DaemonPacket RefusedPacket(const absl::Status& why) {
  v1::DaemonPacket packet;
  packet.mutable_refused()->set_code(absl::StatusCodeToString(why.code()));
  packet.mutable_refused()->set_reason(ReasonOf(why));
  packet.mutable_refused()->set_message(std::string(why.message()));
  return packet;
}

}  // namespace

Sessions::Sessions(Loop& loop, DaemonIdentity identity, std::function<void(const Event&)> tell)
    : loop_(loop), identity_(std::move(identity)), tell_(std::move(tell)) {}

Sessions::~Sessions() {
  for (auto& [id, session] : sessions_) {
    loop_.CancelTimer(session.hello_timer);
    if (!session.hung_up) loop_.Unwatch(session.channel.fd());
    if (session.pidfd.valid()) loop_.Unwatch(session.pidfd.get());
  }
}

void Sessions::Add(UniqueFd connection, const PeerIdentity& peer) {
  const auto of_process = std::count_if(sessions_.begin(), sessions_.end(),
                                        [&](const auto& entry) { return entry.second.peer.pid == peer.pid; });
  // A process of a pid namespace that cannot be seen from here has pid 0, as have all of them.
  if (peer.pid != 0 && of_process >= kMaxSessionsOfProcess) {
    const absl::Status why = Refuse(absl::StatusCode::kResourceExhausted, "SESSION_LIMIT",
                                    absl::StrCat("pid ", peer.pid, " has ", of_process, " page channels already"));
    PageChannel channel(std::move(connection));
    (void)channel.Send(RefusedPacket(why).SerializeAsString());
    return closer_.CloseConnection(channel.TakeSocket());
  }
  const SessionId id{next_session_++};
  Session& session =
      sessions_
          .emplace(
              id,
              Session{.id = id, .peer = peer, .channel = PageChannel(std::move(connection)), .credit = CreditWindow()})
          .first->second;
  session.hello_timer = loop_.At(MonotonicNow() + kHelloDeadline, [this, id] {
    HangUp(id, Refuse(absl::StatusCode::kDeadlineExceeded, "BAD_HELLO", "no Hello came in time"));
  });
  WatchChannel(session);
}

absl::StatusOr<SessionId> Sessions::Find(const std::string& wire_id, const PeerIdentity& peer) const {
  const auto found = by_wire_id_.find(wire_id);
  if (found == by_wire_id_.end()) {
    return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_SESSION",
                  "the session is not known here; open the page channel first");
  }
  const PeerIdentity& owner = sessions_.at(found->second).peer;
  if (owner.pid != peer.pid || owner.uid != peer.uid) {
    return Refuse(absl::StatusCode::kPermissionDenied, "SESSION_OWNER",
                  absl::StrCat("the session belongs to pid ", owner.pid, " of uid ", owner.uid,
                               ", the call came from pid ", peer.pid, " of uid ", peer.uid));
  }
  return found->second;
}

// ---- Receiving. ----

void Sessions::WatchChannel(Session& session) {
  const uint32_t events = EPOLLIN | (session.channel.wants_write() ? EPOLLOUT : 0u);
  const auto status =
      loop_.Watch(session.channel.fd(), events, [this, id = session.id](uint32_t ready) { OnReadable(id, ready); });
  if (!status.ok()) spdlog::error("session {}: {}", session.id.value, status.ToString());
}

void Sessions::OnReadable(SessionId id, uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    Session& session = sessions_.at(id);
    if (auto status = session.channel.Flush(); !status.ok()) return HangUp(id, status);
    if (!session.channel.wants_write()) WatchChannel(session);
  }
  for (int i = 0; i < kPacketsInTurn; ++i) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end() || found->second.hung_up) return;
    auto packet = found->second.channel.Receive();
    if (!packet.ok()) {
      closer_.Close(found->second.channel.TakeRefused());
      return HangUp(id, packet.status());
    }
    if (!packet->has_value()) return;
    const absl::Status status = Handle(found->second, **packet);
    closer_.Close(std::move((*packet)->descriptors));
    if (!status.ok()) return HangUp(id, status);
  }
}

// ---- Sending. ----

absl::Status Sessions::Send(Session& session, const v1::DaemonPacket& packet, std::span<const int> descriptors) {
  const bool wrote_before = session.channel.wants_write();
  if (auto status = session.channel.Send(packet.SerializeAsString(), descriptors); !status.ok()) return status;
  if (session.channel.wants_write() != wrote_before) WatchChannel(session);
  return absl::OkStatus();
}

void Sessions::GrantLease(SessionId id, const v1::LeaseGranted& grant) {
  const auto session = sessions_.find(id);
  if (session == sessions_.end() || session->second.hung_up) return;
  auto page = MakeUseWordPage();
  auto mapping = page.ok() ? UseWordMapping::Map(page->get()) : absl::StatusOr<UseWordMapping>(page.status());
  if (!mapping.ok()) {
    loop_.Post([this, id, status = mapping.status()] { HangUp(id, status); });
    return;
  }
  const UseWord word = mapping->word();
  const LeaseId lease{grant.lease_id()};
  const int descriptor = page->get();
  leases_.emplace(lease, Lease{.session = id, .page = *std::move(page), .mapping = *std::move(mapping), .word = word});
  session->second.leases.insert(lease);
  v1::DaemonPacket packet;
  *packet.mutable_lease_granted() = grant;
  if (auto status = Send(session->second, packet, {&descriptor, 1}); !status.ok()) {
    loop_.Post([this, id, status] { HangUp(id, status); });
  }
}

void Sessions::BeginCells(LeaseId id, uint64_t generation) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end() || lease->second.generation >= generation) return;
  lease->second.generation = generation;
  lease->second.sent.clear();
}

void Sessions::SendCells(LeaseId id, uint64_t generation, const std::vector<CellToSend>& all, bool last) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  Session& session = sessions_.at(lease->second.session);
  BeginCells(id, generation);
  const bool over = lease->second.generation != generation || lease->second.revoked_generation == generation;
  if (session.hung_up || over) return;
  std::vector<CellToSend> cells;
  for (const CellToSend& cell : all) {
    if (lease->second.sent.insert(cell.index).second) cells.push_back(cell);
  }
  if (cells.empty() && !last) return;
  size_t next = 0;
  // Where nothing is left to send, one empty packet opens the word.
  do {
    QueuedCells queued;
    queued.what.lease = id;
    queued.what.generation = generation;
    v1::Cells& message = *queued.packet.mutable_cells();
    message.set_lease_id(id.value);
    message.set_generation(generation);
    for (; next < cells.size() && queued.descriptors.size() < kMaxPacketDescriptors; ++next) {
      v1::Cell& cell = *message.add_cells();
      cell.set_index(cells[next].index);
      cell.set_device_offset(cells[next].device_offset);
      cell.set_bytes(cells[next].bytes);
      queued.descriptors.push_back(std::move(cells[next].descriptor));
      queued.what.cells.push_back(cells[next].index);
      queued.what.bytes.push_back(cells[next].bytes);
    }
    queued.what.last = last && next == cells.size();
    message.set_last(queued.what.last);
    lease->second.packets += 1;
    session.queued.push_back(std::move(queued));
  } while (next < cells.size());
  Pump(session);
}

void Sessions::Pump(Session& session) {
  while (!session.queued.empty() && session.credit.CanSend()) {
    QueuedCells queued = std::move(session.queued.front());
    session.queued.pop_front();
    const auto lease = leases_.find(queued.what.lease);
    if (lease == leases_.end()) continue;
    std::vector<int> descriptors;
    for (const auto& descriptor : queued.descriptors) descriptors.push_back(descriptor->get());
    lease->second.held.insert(queued.what.cells.begin(), queued.what.cells.end());
    absl::Status status = session.credit.OnSent();
    if (status.ok()) status = Send(session, queued.packet, descriptors);
    session.in_flight.push_back(std::move(queued.what));
    if (!status.ok()) {
      loop_.Post([this, id = session.id, status] { HangUp(id, status); });
      return;
    }
  }
}

void Sessions::Revoke(LeaseId id, uint64_t generation) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  Session& session = sessions_.at(lease->second.session);
  if (session.hung_up) return;
  lease->second.revoked_generation = generation;
  lease->second.packets -= static_cast<uint32_t>(
      std::erase_if(session.queued, [&](const QueuedCells& queued) { return queued.what.lease == id; }));
  lease->second.revoke_waits = lease->second.packets > 0;
  if (!lease->second.revoke_waits) SendRevoke(session, id, lease->second);
}

void Sessions::SendRevoke(Session& session, LeaseId id, Lease& lease) {
  lease.revoke_waits = false;
  v1::DaemonPacket packet;
  packet.mutable_revoke()->set_lease_id(id.value);
  packet.mutable_revoke()->set_generation(lease.revoked_generation);
  if (auto status = Send(session, packet); !status.ok()) {
    loop_.Post([this, session_id = session.id, status] { HangUp(session_id, status); });
  }
}

void Sessions::EndLease(LeaseId id, const std::string& reason, const std::string& message) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  const auto session = sessions_.find(lease->second.session);
  LetGo(lease->second, std::set<uint32_t>(lease->second.held));
  leases_.erase(lease);
  if (session == sessions_.end()) return;
  session->second.leases.erase(id);
  std::erase_if(session->second.queued, [&](const QueuedCells& queued) { return queued.what.lease == id; });
  if (session->second.hung_up) return;
  v1::DaemonPacket packet;
  packet.mutable_lease_ended()->set_lease_id(id.value);
  packet.mutable_lease_ended()->set_reason(reason);
  packet.mutable_lease_ended()->set_message(message);
  if (auto status = Send(session->second, packet); !status.ok()) {
    loop_.Post([this, session_id = session->first, status] { HangUp(session_id, status); });
  }
}

void Sessions::ShowHeld(LeaseId id, std::shared_ptr<HeldCells> held) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  held->Hold(lease->second.held);
  lease->second.shown = std::move(held);
}

// The client has `cells` no more, all of which it held.
void Sessions::LetGo(Lease& lease, const std::set<uint32_t>& cells) {
  if (lease.shown != nullptr) lease.shown->LetGo(cells);
  for (uint32_t cell : cells) {
    lease.held.erase(cell);
    lease.mapped.erase(cell);
  }
  if (lease.held.empty()) lease.shown.reset();
}

UseWord* Sessions::Word(LeaseId lease) {
  const auto found = leases_.find(lease);
  return found == leases_.end() ? nullptr : &found->second.word;
}

uint64_t Sessions::mapped_bytes(LeaseId lease) const {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return 0;
  uint64_t total_bytes = 0;
  for (const auto& [cell, bytes] : found->second.mapped) total_bytes += bytes;
  return total_bytes;
}

// ---- The end. ----

void Sessions::HangUp(SessionId id, const absl::Status& why) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.hung_up) return;
  Session& session = found->second;
  if (ReasonOf(why) != "HANG_UP") {
    spdlog::warn("session {} of pid {} ends: {}", id.value, session.peer.pid, why.ToString());
    // Told if it can be told; the session ends in any case.
    (void)session.channel.Send(RefusedPacket(why).SerializeAsString());
  }
  loop_.CancelTimer(session.hello_timer);
  loop_.Unwatch(session.channel.fd());
  closer_.CloseConnection(session.channel.TakeSocket());
  session.hung_up = true;
  session.queued.clear();
  const bool may_hold_cells = std::any_of(session.leases.begin(), session.leases.end(),
                                          [this](LeaseId lease) { return !leases_.at(lease).held.empty(); });
  if (!may_hold_cells) return End(id);
  // Its process lives, perhaps, with cells mapped; they are its until the pidfd says that it is gone.
  tell_(SessionHungUp{id});
}

void Sessions::End(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  loop_.CancelTimer(session.hello_timer);
  if (!session.hung_up) {
    loop_.Unwatch(session.channel.fd());
    closer_.CloseConnection(session.channel.TakeSocket());
  }
  if (session.pidfd.valid()) loop_.Unwatch(session.pidfd.get());
  const bool was_open = !session.wire_id.empty();
  by_wire_id_.erase(session.wire_id);
  for (LeaseId id : session.leases) {
    Lease& lease = leases_.at(id);
    LetGo(lease, std::set<uint32_t>(lease.held));
    leases_.erase(id);
  }
  sessions_.erase(found);
  if (was_open) tell_(SessionEnded{id});
}

}  // namespace residency

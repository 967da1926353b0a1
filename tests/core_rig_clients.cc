// SPDX-License-Identifier: Apache-2.0
//
// The rig's clients: what a client process and the daemon's sessions do, without the socket between them.
#include <sys/stat.h>

#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"
#include "tests/core_rig.h"

namespace residency {
namespace {

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(value.status().ToString());
  return *std::move(value);
}

void Must(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

uint64_t InodeOfFile(int fd) {
  struct stat file;
  if (fstat(fd, &file) != 0) throw std::runtime_error("fstat");
  return file.st_ino;
}

}  // namespace

// ---- The processes. ----

SessionId CoreRig::Connect() {
  const SessionId session{next_session_++};
  clients_[session];
  Feed(SessionOpened{session, static_cast<int64_t>(1000 + session.value), 0, "client"});
  return session;
}

void CoreRig::Kill(SessionId session, bool heard) {
  Client& client = clients_.at(session);
  if (client.dead) return;
  client.dead = true;
  for (auto& [id, lease] : client.leases) LetGo(lease);
  client.leases.clear();
  client.inbox.clear();
  if (!heard) client.outbox.clear();
  client.outbox.push_back(SessionEnded{session});
}

void CoreRig::HangUp(SessionId session) {
  Client& client = clients_.at(session);
  if (client.dead || std::exchange(client.hung_up, true)) return;
  client.inbox.clear();
  client.outbox.push_back(SessionHungUp{session});
}

void CoreRig::FailNextMapping(SessionId session) { clients_.at(session).fails_next = true; }

bool CoreRig::Enter(SessionId session, LeaseId id) {
  Client& client = clients_.at(session);
  ClientLease& lease = client.leases.at(id);
  if (lease.uses > 0) {
    Word(lease).EnterNested();
  } else if (Word(lease).Enter(absl::InfinitePast()) != EnterResult::kEntered) {
    // Backing out may have been what a revocation waited for.
    TryTake(client, lease);
    return false;
  }
  ++lease.uses;
  return true;
}

void CoreRig::Leave(SessionId session, LeaseId id) {
  Client& client = clients_.at(session);
  ClientLease& lease = client.leases.at(id);
  --lease.uses;
  Word(lease).Leave();
  TryTake(client, lease);
}

bool CoreRig::DeliverPacket(SessionId to) {
  const auto found = clients_.find(to);
  if (found == clients_.end() || found->second.inbox.empty() || found->second.paused) return false;
  Client& client = found->second;
  Packet packet = std::move(client.inbox.front());
  client.inbox.pop_front();
  if (packet.kind == Packet::Kind::kGranted) {
    ClientLease& lease = client.leases[packet.lease];
    lease.id = packet.lease;
    lease.model = packet.model;
    lease.checkpoint = packet.checkpoint;
    lease.page = Must(UseWordMapping::Map(packet.page.get()));
    lease.span = Must(truth_->Reserve(packet.checkpoint->layout().span_bytes));
    return true;
  }
  const auto lease = client.leases.find(packet.lease);
  if (lease == client.leases.end()) return true;
  switch (packet.kind) {
    case Packet::Kind::kCells:
      OnCells(client, lease->second, std::move(packet));
      break;
    case Packet::Kind::kRevoke:
      // Also of a generation of which no cell has come.
      if (packet.generation < lease->second.generation) break;
      lease->second.generation = packet.generation;
      lease->second.revoke_pending = true;
      TryTake(client, lease->second);
      break;
    case Packet::Kind::kEnded:
      // Of a model that could not be read whole a client may have been sent some.
      if (lease->second.open && !lease->second.cells.empty())
        complaint_ = absl::StrCat("lease ", packet.lease.value, " ended with its cells");
      LetGo(lease->second);
      client.leases.erase(lease);
      break;
    case Packet::Kind::kGranted:
      break;
  }
  return true;
}

void CoreRig::OnCells(Client& client, ClientLease& lease, Packet packet) {
  if (std::exchange(lease.generation, packet.generation) != packet.generation && !lease.cells.empty()) {
    complaint_ = absl::StrCat("lease ", lease.id.value, " was sent a generation before it let the other one go");
  }
  if (std::exchange(client.fails_next, false)) {
    client.outbox.push_back(LeaseFailed{lease.id, absl::AbortedError("no room for the mapping"), /*by_client=*/true});
    LetGo(lease);
    client.leases.erase(lease.id);
    return;
  }
  for (const CellToSend& cell : packet.cells) {
    if (lease.cells.contains(cell.index)) complaint_ = absl::StrCat("lease ", lease.id.value, " was sent cells it has");
    const CUdeviceptr address = lease.span.get() + cell.device_offset;
    CellMemory memory = Must(truth_->Import(cell.descriptor->get(), cell.bytes));
    Must(truth_->Map(address, memory));
    Must(truth_->SetAccess(address, cell.bytes, Access::kReadOnly));
    lease.cells[cell.index] = {std::move(memory), InodeOfFile(cell.descriptor->get())};
  }
  if (!packet.last) {
    early_cells_ += packet.cells.size();
    return;
  }
  ++mapped_by_clients_;
  lease.open = true;
  Word(lease).Open();
  client.outbox.push_back(LeaseMapped{lease.id, lease.generation});
}

void CoreRig::TryTake(Client& client, ClientLease& lease) {
  if (!lease.revoke_pending || client.hung_up) return;
  const TakeResult result = Word(lease).TryTake();
  if (result == TakeResult::kInUse) return;
  lease.revoke_pending = false;
  if (result == TakeResult::kOpen) return;
  // The first piece is one cell, the second the others.
  if (lease.cells.size() > 1) {
    const auto first = lease.cells.begin();
    UnmapCell(lease, first->first);
    lease.cells.erase(first);
    lease.releasing = true;
    client.outbox.push_back(LeaseReleasing{lease.id, lease.generation});
    return;
  }
  lease.open = false;
  LetGo(lease);
  client.outbox.push_back(LeaseReleased{lease.id, lease.generation});
}

bool CoreRig::WorkClient(SessionId session) {
  const auto found = clients_.find(session);
  if (found == clients_.end() || found->second.hung_up || found->second.paused) return false;
  for (auto& [id, lease] : found->second.leases) {
    if (!std::exchange(lease.releasing, false)) continue;
    lease.open = false;
    LetGo(lease);
    found->second.outbox.push_back(LeaseReleased{lease.id, lease.generation});
    return true;
  }
  return false;
}

// What the daemon knows that clients have of a model that gives its cells.
std::shared_ptr<HeldCells> CoreRig::HeldOf(ModelId giver) const {
  const auto held = std::make_shared<HeldCells>();
  for (const auto& [session, client] : clients_) {
    for (const auto& [id, lease] : client.leases) {
      std::set<uint32_t> cells;
      for (const auto& [cell, mapped] : lease.cells) cells.insert(cell);
      if (lease.model == giver) held->Hold(cells);
    }
  }
  return held;
}

void CoreRig::UnmapCell(const ClientLease& lease, uint32_t cell) {
  const LayoutCell& place = lease.checkpoint->layout().cells[cell];
  Must(truth_->Unmap(lease.span.get() + place.device_offset, place.bytes));
}

void CoreRig::LetGo(ClientLease& lease) {
  for (const auto& [cell, mapped] : lease.cells) UnmapCell(lease, cell);
  lease.cells.clear();
  lease.releasing = false;
}

// ---- The daemon's side. ----

CoreRig::Client* CoreRig::ClientOf(LeaseId lease) {
  const auto found = daemon_leases_.find(lease);
  if (found == daemon_leases_.end()) return nullptr;
  const auto client = clients_.find(found->second.session);
  return client == clients_.end() || client->second.dead || client->second.hung_up ? nullptr : &client->second;
}

void CoreRig::Do(const GrantLease& effect) {
  const auto client = clients_.find(effect.session);
  if (client == clients_.end()) return;
  UniqueFd page = Must(MakeUseWordPage());
  daemon_leases_[effect.lease] = {effect.session, Must(UseWordMapping::Map(page.get()))};
  if (ClientOf(effect.lease) == nullptr) return;
  client->second.inbox.push_back({.kind = Packet::Kind::kGranted,
                                  .lease = effect.lease,
                                  .model = effect.model,
                                  .checkpoint = models_.at(effect.model).checkpoint,
                                  .page = std::move(page)});
}

void CoreRig::Do(const SendCells& effect) {
  const auto record = arbiter_->records().leases.find(effect.lease);
  if (record == arbiter_->records().leases.end()) return;
  Work([this, effect, id = record->second.model]() -> Answer {
    LiveModel& model = models_.at(id);
    auto cells = memory_->Export(*model.arena, model.checkpoint->layout());
    if (!cells.ok()) {
      return [effect, status = cells.status()]() -> Event { return LeaseFailed{effect.lease, status}; };
    }
    NoteInodes(model, *cells);
    PushCells({effect.lease, effect.generation}, *cells, /*last=*/true);
    return nullptr;
  });
}

void CoreRig::NoteInodes(const LiveModel& model, const std::vector<CellToSend>& cells) {
  for (const CellToSend& cell : cells) {
    const auto handle = truth_->HandleAt(model.arena->address() + cell.device_offset);
    if (handle.ok()) inodes_[*handle] = InodeOfFile(cell.descriptor->get());
  }
}

// As the daemon's sessions do: no cell twice in a generation, none of one that was revoked.
void CoreRig::PushCells(const CellReader& reader, const std::vector<CellToSend>& cells, bool last) {
  Client* client = ClientOf(reader.lease);
  if (client == nullptr) return;
  DaemonLease& lease = daemon_leases_.at(reader.lease);
  if (lease.revoked_generation == reader.generation) return;
  if (std::exchange(lease.generation, reader.generation) != reader.generation) lease.cells.clear();
  Packet packet{.kind = Packet::Kind::kCells, .lease = reader.lease, .generation = reader.generation, .last = last};
  for (const CellToSend& cell : cells) {
    if (lease.cells.insert(cell.index).second) packet.cells.push_back(cell);
  }
  client->inbox.push_back(std::move(packet));
}

void CoreRig::Do(const CloseUseWords& effect) {
  UseWordsClosed event{.model = effect.model};
  std::vector<LeaseId> closed;
  for (LeaseId lease : effect.leases) {
    const auto found = daemon_leases_.find(lease);
    if (found == daemon_leases_.end()) continue;
    UseWord word = found->second.page->word();
    const CloseResult result = effect.only_if_idle ? word.CloseIfIdle() : word.Close();
    if (result == CloseResult::kInUse) event.in_use.push_back(lease);
    if (result == CloseResult::kClosed) closed.push_back(lease);
  }
  if (!event.in_use.empty()) {
    for (LeaseId lease : closed) (void)daemon_leases_.at(lease).page->word().Cancel();
  }
  Feed(event);
}

void CoreRig::Do(const ReopenUseWords& effect) {
  UseWordsReopened event{.model = effect.model};
  for (LeaseId lease : effect.leases) {
    const auto found = daemon_leases_.find(lease);
    if (found == daemon_leases_.end()) continue;
    if (found->second.page->word().Cancel() == CancelResult::kTaken) event.taken.push_back(lease);
  }
  Feed(event);
}

void CoreRig::Do(const CloseAndRevoke& effect) {
  const auto found = daemon_leases_.find(effect.lease);
  if (found != daemon_leases_.end()) (void)found->second.page->word().Close();
  Do(RevokeLease{effect.lease, effect.generation});
}

void CoreRig::Do(const RevokeLease& effect) {
  if (Client* client = ClientOf(effect.lease)) {
    daemon_leases_.at(effect.lease).revoked_generation = effect.generation;
    client->inbox.push_back({.kind = Packet::Kind::kRevoke, .lease = effect.lease, .generation = effect.generation});
  }
}

void CoreRig::Do(const EndLease& effect) {
  Client* client = ClientOf(effect.lease);
  daemon_leases_.erase(effect.lease);
  if (client != nullptr) client->inbox.push_back({.kind = Packet::Kind::kEnded, .lease = effect.lease});
}

}  // namespace residency

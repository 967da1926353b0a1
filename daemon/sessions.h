// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side of the page channel (channel.proto): who is connected, which lease's cells are on their
// way, and what clients said of them. It tells the core in events and decides nothing. A client that breaks the
// protocol loses its session; nobody else notices. Everything on the decision loop.
#ifndef RESIDENCY_DAEMON_SESSIONS_H_
#define RESIDENCY_DAEMON_SESSIONS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/closer.h"
#include "daemon/events.h"
#include "daemon/ids.h"
#include "daemon/loop.h"
#include "mechanisms/held_cells.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/use_word.h"
#include "proto/channel.pb.h"

namespace residency {

// What every client is told in its Welcome.
struct DaemonIdentity {
  std::string epoch;
  std::string driver;
  std::string sim_directory;
};

// A cell on its way to clients. The descriptor is a duplicate, so what the arena does meanwhile is its own
// affair; it is closed once the last client has it.
struct CellToSend {
  uint32_t index = 0;
  uint64_t device_offset = 0;
  uint64_t bytes = 0;
  std::shared_ptr<const UniqueFd> descriptor;
};

class Sessions {
 public:
  Sessions(Loop& loop, DaemonIdentity identity, std::function<void(const Event&)> tell);
  ~Sessions();

  // A new connection: it has kHelloDeadline to introduce itself. A process that has 64 already is
  // refused (RESOURCE_EXHAUSTED/SESSION_LIMIT), lest it leave no descriptors for others.
  void Add(UniqueFd connection, const PeerIdentity& peer);

  // The session that the wire's 128 bits name; PERMISSION_DENIED/SESSION_OWNER where it is not one of
  // `peer`'s process and user, NOT_FOUND/NO_SUCH_SESSION.
  absl::StatusOr<SessionId> Find(const std::string& wire_id, const PeerIdentity& peer) const;

  // Effects of the core. A lease or session that is gone makes them do nothing; a session for which there are no
  // descriptors or memory left ends.
  void GrantLease(SessionId session, const v1::LeaseGranted& grant);
  // A generation of which cells will come, so that it can be revoked before the first one does.
  void BeginCells(LeaseId lease, uint64_t generation);
  // Some cells of the generation, or, with `last`, all of them, of which those are left out that were sent. Nothing
  // where it was revoked, or another one began.
  void SendCells(LeaseId lease, uint64_t generation, const std::vector<CellToSend>& cells, bool last = true);
  // Once the client has acknowledged what is on its way to it; what is not yet, stays here.
  void Revoke(LeaseId lease, uint64_t generation);
  void EndLease(LeaseId lease, const std::string& reason, const std::string& message);

  // Adds what the lease's client may have mapped to `held`, and takes it off as the client lets it go, or goes itself.
  // For as long as the generation lasts; one follower at a time.
  void ShowHeld(LeaseId lease, std::shared_ptr<HeldCells> held);

  // The use word of a lease, or nullptr.
  UseWord* Word(LeaseId lease);
  // What the client acknowledged to have mapped.
  uint64_t mapped_bytes(LeaseId lease) const;

 private:
  struct PacketInFlight {
    LeaseId lease;
    uint64_t generation = 0;
    std::vector<uint32_t> cells;
    std::vector<uint64_t> bytes;  // of each
    bool last = false;
  };
  struct QueuedCells {
    PacketInFlight what;
    v1::DaemonPacket packet;
    std::vector<std::shared_ptr<const UniqueFd>> descriptors;
  };
  struct Session {
    SessionId id;
    PeerIdentity peer;
    std::string wire_id;  // empty until Hello
    PageChannel channel;
    UniqueFd pidfd;
    CreditWindow credit;
    std::deque<QueuedCells> queued;
    std::deque<PacketInFlight> in_flight;
    std::set<LeaseId> leases;
    uint64_t hello_timer = 0;
    bool hung_up = false;
  };
  struct Lease {
    SessionId session;
    UniqueFd page;
    UseWordMapping mapping;
    UseWord word;
    uint64_t generation = 0;              // begun last
    uint64_t revoked_generation = 0;      // asked back last
    bool revoke_waits = false;            // for acknowledgements
    uint32_t packets = 0;                 // of the generation that are not acknowledged yet
    std::set<uint32_t> sent;              // cells of the generation that are on their way, or were
    std::shared_ptr<HeldCells> shown;     // where `held` is shown, too
    std::set<uint32_t> held;              // cells that the client may have mapped: sent, and not released
    std::map<uint32_t, uint64_t> mapped;  // bytes of the cells acknowledged
  };

  void OnReadable(SessionId id, uint32_t events);
  absl::Status Handle(Session& session, Packet& packet);
  absl::Status OnHello(Session& session, const v1::Hello& hello, std::vector<UniqueFd>& descriptors);
  absl::Status OnCellsMapped(Session& session, const v1::CellsMapped& mapped);
  absl::Status OnReleased(Session& session, const v1::Released& released);
  absl::Status OnLeaseFailed(Session& session, const v1::LeaseFailed& failed);
  absl::StatusOr<Lease*> LeaseOf(Session& session, LeaseId lease);
  void Pump(Session& session);
  static void LetGo(Lease& lease, const std::set<uint32_t>& cells);
  void SendRevoke(Session& session, LeaseId id, Lease& lease);
  absl::Status Send(Session& session, const v1::DaemonPacket& packet, std::span<const int> descriptors = {});
  void WatchChannel(Session& session);
  void HangUp(SessionId id, const absl::Status& why);
  void End(SessionId id);

  Loop& loop_;
  const DaemonIdentity identity_;
  const std::function<void(const Event&)> tell_;
  std::map<SessionId, Session> sessions_;
  std::map<std::string, SessionId> by_wire_id_;
  std::map<LeaseId, Lease> leases_;
  Closer closer_;
  uint64_t next_session_ = 1;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_SESSIONS_H_

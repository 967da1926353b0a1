// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side for page_channel_fuzz: Sessions on a loop, and in the core's place a record of what was granted and
// sent, which every event is held against. As the core does, it gives orders while an event is being told.
#ifndef RESIDENCY_TESTS_FUZZ_PAGE_CHANNEL_RIG_H_
#define RESIDENCY_TESTS_FUZZ_PAGE_CHANNEL_RIG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/events.h"
#include "daemon/loop.h"
#include "daemon/sessions.h"
#include "mechanisms/page_channel.h"

namespace residency {

// What the core does on the spot when a client has let a lease go.
enum class OnLet { kNothing, kEnd, kSendAgain };

class PageChannelRig {
 public:
  explicit PageChannelRig(OnLet on_let);
  ~PageChannelRig() { Stop(); }
  // Ends Sessions.
  void Stop();

  // A client's end of a new connection, as the process itself.
  UniqueFd Connect();
  // Runs `task` on the loop, to its end.
  void OnLoop(const std::function<void()>& task);
  // Returns once Sessions has taken and handled all that was sent through `socket`.
  void Settle(int socket);

  // Orders of the core, on the loop. Those that the core would not give in the lease's state are left out.
  bool Grant(uint64_t lease, const std::string& wire_id);
  void SendCells(uint64_t lease, uint32_t count);
  void Revoke(uint64_t lease);
  void End(uint64_t lease, const std::string& reason, const std::string& message = "");
  void CloseAndReopen(uint64_t lease);

  bool IsOpen(const std::string& wire_id);
  bool IsLive(uint64_t lease);
  // The client has let the cells go that it had; what on_let says was done then.
  bool WasLet(uint64_t lease);

 private:
  enum class State { kGranted, kGranting, kLive, kRevoking, kLet };
  struct Lease {
    SessionId session;
    State state = State::kGranted;
    uint64_t generation = 0;
    uint32_t cells = 0;
    bool was_let = false;
  };
  struct Session {
    bool hung_up = false;
  };

  void Tell(const Event& event);
  Lease& Known(LeaseId lease);
  // Any other event is none of the page channel's.
  template <typename T>
  void On(const T&);
  void On(const SessionOpened& event);
  void On(const SessionHungUp& event);
  void On(const SessionEnded& event);
  void On(const LeaseMapped& event);
  void On(const LeaseReleasing& event);
  void On(const LeaseReleased& event);
  void On(const LeaseFailed& event);

  const OnLet on_let_;
  std::unique_ptr<Sessions> sessions_;
  std::map<SessionId, Session> open_;
  std::map<LeaseId, Lease> leases_;
  std::set<uint64_t> granted_;  // ever: the core names no two leases alike
};

// Open descriptors of this process.
size_t CountDescriptors();

}  // namespace residency

#endif  // RESIDENCY_TESTS_FUZZ_PAGE_CHANNEL_RIG_H_

// SPDX-License-Identifier: Apache-2.0
//
// The client's end of a session, and its one thread: reads the packets of the page channel, maps and unmaps the cells
// of all leases, answers the daemon. Knows nothing of gRPC.
//
// Threads: the reader thread alone touches the channel, the devices' address ranges and the life of a LeaseRecord;
// users see records through Claim, Retire and StopStatus, which lock. No driver call is made under the lock.
//
// Invariants:
//  1. A record lives until the daemon has ended its lease (or hung up) and no handle (Claim) of it is left, and while
//     anybody is inside its word.
//  2. Cells are unmapped only after the word was taken and the device work of past uses was waited for.
//  3. Every Cells packet gets one CellsMapped with the same cells, also where they are not wanted any more, because the
//     daemon counts the packets under way. What says that they are not mapped is LeaseFailed before it, Released behind
//     it, or the end of the lease.
#ifndef RESIDENCY_CLIENT_READER_H_
#define RESIDENCY_CLIENT_READER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/lease_pages.h"
#include "mechanisms/device.h"
#include "mechanisms/driver.h"
#include "mechanisms/page_channel.h"
#include "proto/channel.pb.h"

namespace residency {

// A thread that waits in Retire for a lease to be over. Under Reader's lock.
struct RetireWaiter {
  bool done = false;      // nothing of the lease is left here, and the daemon has ended it
  bool outlived = false;  // a use is still under way: no use in waiting
};

// What the reader knows of one lease.
struct LeaseRecord {
  const uint64_t id;
  const std::string model;
  // nullptr where the grant failed: `failure` says why. Set before the record is visible.
  std::unique_ptr<LeasePages> pages;
  std::atomic<uint64_t> generation{0};  // the newest that was mapped and opened

  // Under Reader's lock:
  absl::Status failure;  // why generation `failed_generation` could not be mapped
  uint64_t failed_generation = 0;
  absl::Status stopped;   // why users are refused
  int handles = 0;        // of Claim
  bool ended = false;     // the daemon has no such lease any more
  bool retiring = false;  // its last handle went, or its Activate failed
  RetireWaiter* waiter = nullptr;

  // The reader thread's own:
  bool release_asked = false;        // the daemon was told that the lease may end
  std::optional<uint64_t> revoked;   // the generation of a Revoke without an answer
  uint64_t released_generation = 0;  // the newest that was given back

  LeaseRecord(uint64_t lease_id, std::string model_name) : id(lease_id), model(std::move(model_name)) {}
};

// What Stop leaves in the use word. Why is in the record; the daemon's own codes are other ones.
inline constexpr uint32_t kStoppedByClient = 1;

// Tells the daemon that a lease may end, without waiting. The daemon then revokes the lease as it revokes any, and says
// when it is over: were the client to close the use word itself, that could cross a revocation that the daemon is just
// taking back, and the last user would wake nobody.
using ReleaseLeaseFunction = std::function<void(uint64_t lease_id)>;

// How long ~Lease waits for a daemon that does not answer; the lease goes when it does, or when it hangs up.
inline constexpr absl::Duration kRetirePatience = absl::Seconds(5);

class Reader {
 public:
  // Starts the thread. `driver` outlives the reader.
  static absl::StatusOr<std::unique_ptr<Reader>> Start(PageChannel channel, const Driver& driver,
                                                       ReleaseLeaseFunction release_lease);
  // Leases and uses have ended.
  ~Reader();

  // Brackets every Activate of the session, from before the call until after Claim. A lease that nobody has claimed
  // when none is under way belongs to one that failed, and is ended.
  void BeginActivation();
  void EndActivation();

  // Waits until generation `generation` or a newer one of the lease is open, and takes a handle of it, which Retire
  // gives back. DEADLINE_EXCEEDED/DEADLINE; UNAVAILABLE/DAEMON_GONE; ABORTED/RELEASED, UNLOADED: the lease is over; or
  // why the cells could not be mapped.
  absl::StatusOr<LeaseRecord*> Claim(uint64_t lease_id, uint64_t generation, absl::Time deadline);

  // Waits as Claim does for a lease of which a handle is held, and takes none.
  absl::Status AwaitGeneration(uint64_t lease_id, uint64_t generation, absl::Time deadline);

  // Gives a handle back; the last one ends the lease, as ~Lease says.
  void Retire(uint64_t lease_id);

  // Why users of a stopped lease are refused.
  absl::Status StopStatus(const LeaseRecord& record);

  // UNAVAILABLE/DAEMON_GONE (or what broke the channel) once the session is over.
  absl::Status SessionStatus();

 private:
  Reader(PageChannel channel, const Driver& driver, UniqueFd wakeup, ReleaseLeaseFunction release_lease);
  void Wake();
  // Called with the lock held, which it gives up while it waits.
  absl::StatusOr<LeaseRecord*> AwaitLocked(std::unique_lock<std::mutex>& lock, uint64_t lease_id, uint64_t generation,
                                           absl::Time deadline);

  // All below: reader thread.
  void Run();
  void AwaitWork();
  void ReadPackets();
  absl::Status OnPacket(Packet packet);
  absl::Status OnLeaseGranted(const v1::LeaseGranted& granted, const std::vector<UniqueFd>& descriptors);
  absl::Status OnCells(const v1::Cells& cells, std::vector<UniqueFd> descriptors);
  void OnRevoke(const v1::Revoke& revoke);
  void OnLeaseEnded(const v1::LeaseEnded& ended);
  void EndSession(const absl::Status& why);
  void Send(const v1::ClientPacket& packet);

  absl::Status OpenPages(LeaseRecord& record, LeaseGrant grant, const std::vector<UniqueFd>& descriptors);
  absl::StatusOr<const Device*> DeviceFor(const std::string& uuid);
  bool WantsCells(LeaseRecord* record, uint64_t generation);
  void OpenGeneration(LeaseRecord& record, uint64_t generation);
  void FailGeneration(LeaseRecord& record, uint64_t generation, const absl::Status& why);
  void AcknowledgeCells(const v1::Cells& cells);
  void DropCells(const LeaseRecord* record, const v1::Cells& cells);
  void SendReleased(uint64_t lease_id, uint64_t generation, const std::vector<uint32_t>& cells);
  void StopUsers(LeaseRecord& record, const absl::Status& why);

  void AdvanceAll();
  void Advance(LeaseRecord& record);
  bool TakePages(LeaseRecord& record, bool over);
  enum class GiveBack { kDone, kLater, kFailed };
  GiveBack GiveCellsBack(LeaseRecord& record);
  void DropUnclaimed();
  void Finish(uint64_t lease_id);
  LeaseRecord* FindRecord(uint64_t lease_id);

  PageChannel channel_;
  const Driver& driver_;
  const UniqueFd wakeup_;  // an eventfd
  const ReleaseLeaseFunction release_lease_;
  std::map<std::string, std::unique_ptr<Device>> devices_;
  bool connected_ = true;
  bool retry_soon_ = false;  // a stream capture is in the way

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::unique_ptr<LeaseRecord>> records_;  // changed by the reader thread, under mutex_
  absl::Status session_status_;                               // guarded by mutex_
  bool ending_ = false;                                       // guarded by mutex_
  int activations_ = 0;                                       // guarded by mutex_
  // Leases that were over before an Activate that got their number could claim them. Guarded by mutex_.
  std::set<uint64_t> ended_meanwhile_;

  std::thread thread_;
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_READER_H_

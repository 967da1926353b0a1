// SPDX-License-Identifier: Apache-2.0
//
// The decision core: one pure function from an event and the time to effects. It has no clock, lock, device
// or socket; the same events give the same effects. The broker feeds it and carries its effects out in the
// order given.
//
// Called on the loop, or by a test, or by whoever replays what was recorded.
#ifndef RESIDENCY_DAEMON_ARBITER_H_
#define RESIDENCY_DAEMON_ARBITER_H_

#include <map>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "daemon/device_queue.h"
#include "daemon/events.h"
#include "daemon/records.h"

namespace residency {

struct ArbiterOptions {
  std::vector<DeviceRecord> devices;
  std::optional<uint64_t> host_budget_bytes;     // most bytes of host copies, page-locked or not
  absl::Duration pool_idle = absl::Seconds(10);  // how long idle cells are kept
};

// ALREADY_EXISTS/NAME_TAKEN: `name` is registered, and not for the same files in the same state.
absl::Status CheckSame(const ModelRecord& model, const RegisterRequested& event);

class Arbiter {
 public:
  explicit Arbiter(const ArbiterOptions& options);

  // What follows from `event` at `now`; `now` never runs backwards.
  std::vector<Effect> Step(const Event& event, absl::Time now);

  // For status: what was promised and decided, nothing measured.
  const Records& records() const { return records_; }
  // What registering would take of the host, if it were asked for now.
  HostPlan PlanHost(const RegisterRequested& event) const;
  // When the transition that is under way for longest began; nothing where none is.
  std::optional<absl::Time> oldest_transition() const;

 private:
  void On(const RegisterRequested& event);
  void On(const UnloadRequested& event);
  void On(const ActivateRequested& event);
  void On(const DeactivateRequested& event);
  void On(const VerifyRequested& event);
  void On(const ReleaseLeaseRequested& event);
  void On(const BeginPhaseRequested& event);
  void On(const EndPhaseRequested& event);
  void On(const TrimRequested& event);
  void On(const RequestCancelled& event);
  void On(const MirrorsNearlyBuilt& event);
  void On(const MirrorsBuilt& event);
  void On(const DeviceMeasured& event);
  void On(const PlanRealized& event);
  void On(const CellsVerified& event);
  void On(const PoolTrimmed& event);
  void On(const ModelDropped& event);
  void On(const UseWordsClosed& event);
  void On(const UseWordsReopened& event);
  void On(const TimerFired& event);
  void On(const SessionOpened& event);
  void On(const SessionHungUp& event);
  void On(const SessionEnded& event);
  void On(const LeaseMapped& event);
  void On(const LeaseReleasing& event);
  void On(const LeaseReleased& event);
  void On(const LeaseFailed& event);

  // The model that `request` names; replies and returns nothing where there is no such model.
  ModelRecord* ModelFor(RequestId request, std::string_view name);
  DeviceQueue* QueueOf(ModelId model);
  void DropIfThere(LeaseId lease, std::string_view reason);
  void Drop(LeaseId lease, std::string_view reason, std::string_view message = "");
  void ForgetDeadlines();
  void Release(LeaseRecord& lease);
  // `what` was to be on the GPU by then.
  void SetDeadline(RequestId request, absl::Time deadline, const std::string& what);
  void GiveUp(RequestId request, const absl::Status& status);
  void ReadingFailed(const MirrorsBuilt& event, ModelRecord& model);
  void RegisterAgain(std::vector<RegisterRequested> registrations, uint64_t given_back_bytes);
  void NotePinning(const MirrorsBuilt& event, ModelRecord& model);

  const ArbiterOptions options_;
  Records records_;
  Context context_;  // of the step under way
  std::map<DeviceId, DeviceQueue> queues_;
  struct Deadline {
    RequestId request;
    std::string what;
  };
  std::map<TimerId, Deadline> deadlines_;
  uint64_t next_model_ = 1;
  uint64_t next_host_copy_ = 1;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_ARBITER_H_

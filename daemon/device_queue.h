// SPDX-License-Identifier: Apache-2.0
//
// The requests of one device, taken one after the other: each is measured, makes room, moves and replies
// before the next begins, so that no two transitions race for the same bytes. Part of the decision core:
// pure; called by the arbiter within a step.
//
// A job runs through these phases (each waits for the event in brackets):
//   activate:   kMeasuring [DeviceMeasured], for each victim kClosing and kRevoking as below, but no longer than until
//               each lease lets its cells go [LeaseReleasing], kFilling [PlanRealized], which also takes the victims
//               off
//   deactivate: kClosing [UseWordsClosed], kRevoking [LeaseReleased of each], kUnmapping [PlanRealized];
//               when the time is up while kRevoking: kReopening [UseWordsReopened], and it is undone
//   unload:     as deactivate where active, kDropping [ModelDropped]
//   verify:     kVerifying [CellsVerified]
//   trim:       kTrimming [PoolTrimmed], with which a deactivation ends too where idle cells are not kept
//   begin or end of a component's phase: leases that are in no phase let their cells go as at deactivate, then
//               kFilling or kUnmapping [PlanRealized], unless other leases are in the phase that is on
// The beginning of a phase that has to wait for the end of another one waits beside the queue.
#ifndef RESIDENCY_DAEMON_DEVICE_QUEUE_H_
#define RESIDENCY_DAEMON_DEVICE_QUEUE_H_

#include <deque>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "daemon/events.h"
#include "daemon/records.h"
#include "daemon/scheduler.h"

namespace residency {

// How long a client has to let its cells go where the request names no longer time. A client that does
// nothing else needs milliseconds (30 us a cell); one whose kernels run for seconds should be drained.
inline constexpr absl::Duration kReleaseDeadline = absl::Seconds(5);

// What a step needs beside the records: the time, and where effects go.
struct Context {
  absl::Time now;
  std::vector<Effect> effects;
  uint64_t next_lease = 1;
  uint64_t next_timer = 1;
  uint64_t next_phase = 1;
};

class DeviceQueue {
 public:
  DeviceQueue(DeviceId device, absl::Duration pool_idle, Records& records, Context& context)
      : device_(device), pool_idle_(pool_idle), records_(records), context_(context) {}
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  using Request = std::variant<ActivateRequested, DeactivateRequested, UnloadRequested, VerifyRequested,
                               BeginPhaseRequested, EndPhaseRequested, TrimRequested>;
  // Takes the request about `model` up now or when those before it are done. The model is meant, not its name, which
  // may have changed hands by then.
  void Add(Request request, ModelId model);
  // The same of a request about the device as a whole.
  void Add(const TrimRequested& request);
  // Replies to `request` with `status` where it waits or runs here. Leases that are being asked back for it are left
  // alone again. Bytes that have begun to move are stopped and taken off again, unless another request waits for them.
  bool GiveUp(RequestId request, const absl::Status& status);

  void On(const DeviceMeasured& event);
  void On(const PlanRealized& event);
  void On(const CellsVerified& event);
  void On(const PoolTrimmed& event);
  void On(const ModelDropped& event);
  void On(const UseWordsClosed& event);
  void On(const UseWordsReopened& event);
  // A timer that this queue set; false where it is not one of them.
  bool On(const TimerFired& event);
  // A lease of one of its models lets its cells go, one after the other.
  void OnLeaseReleasing(ModelId model);
  // A lease of one of its models holds no cells any more: released, failed or gone.
  void OnLeaseLet(ModelId model);
  // A lease of one of its models is about to end, since its client could not map: the phase or the activation that it
  // waits for is refused with that.
  void OnLeaseFailed(LeaseId lease, const absl::Status& status);
  // A lease of one of its models has mapped its cells.
  void OnLeaseLive(ModelId model);

  // Gives a lease that has no cells those of its model, which is active.
  void SendCells(LeaseRecord& lease);
  // When the job that runs began.
  std::optional<absl::Time> running_since() const;

 private:
  enum class Phase {
    kMeasuring,
    kClosing,
    kRevoking,
    kReopening,
    kUnmapping,
    kFilling,
    kVerifying,
    kTrimming,
    kDropping
  };
  struct Waiting {
    Request request;
    ModelId model;     // of none: the request is about the device
    std::string name;  // of the model, which may be gone when its turn comes
  };
  struct Job {
    Request request;
    Phase phase = Phase::kMeasuring;
    absl::Time began;
    ModelId model;                 // of the request
    ModelId clearing;              // the model that is being taken off: `model`, or a victim
    uint32_t component = 0;        // whose phase is to begin
    PhaseId left;                  // the phase that the request's lease was in
    std::vector<ModelId> victims;  // whose leases are still to be asked back
    std::vector<ModelId> givers;   // the victims that nobody uses any more: they give their cells to the fill
    LeaseId granted;               // a lease that was made for the request, which is not answered yet
    std::vector<std::string> evicted;
    bool replied = false;
    bool stopped = false;         // the fill was told to stop
    bool timed_out = false;       // the leases that are being asked back took too long
    bool pooled = false;          // cells went to the pool
    uint64_t unmapped_bytes = 0;  // of `model`
    DeactivateOutcome cleared;    // before the pool is trimmed
  };

  void Pump();
  void Start(const ActivateRequested& request);
  void Start(const DeactivateRequested& request);
  void Start(const UnloadRequested& request);
  void Start(const VerifyRequested& request);
  void Start(const BeginPhaseRequested& request);
  void Start(const EndPhaseRequested& request);
  void Start(const TrimRequested& request);
  void Fill();
  void VictimLetGo();
  void KeepGivers();
  void FinishGivers(const PlanRealized& event);
  void StopUnwantedFill();
  void StopHinderedFill();
  bool StoppedInTime(const PlanRealized& event) const;
  void FinishActivation(const PlanRealized& event);
  void Clear(ModelId model);
  bool drains() const;
  bool changes_phase() const;
  bool MustLetGo(const LeaseRecord& lease) const;
  void LetGo();
  void PhaseCleared();
  void EnterPhase(LeaseRecord& lease, const PlanRealized& moved);
  void FinishPhase(const PlanRealized& event);
  void RestorePhase();
  void WakeWaiting();
  void TakeOffLeft(ModelId model);
  void Unmap(ModelId model);
  void CheckRevoked();
  void TakeBack();
  void NotCleared(const absl::Status& status);
  void Cleared(const PlanRealized& event);
  void KeepFailed(ModelRecord& model);
  void TakenOff(ModelRecord& model);
  void ResendCells(ModelId model);
  void DropModelNow();
  LeaseRecord* LeaseFor(const ActivateRequested& request, const ModelRecord& model);
  LeaseId Grant(const ActivateRequested& request, ModelRecord& model);
  void NextGeneration(LeaseRecord& lease);
  CellReader AddReader(LeaseRecord& lease);
  void ServeReaders();
  void DismissReaders();
  void DismissReader(LeaseRecord& lease);
  void EndUnclaimed();
  bool IsOfRequest(LeaseId lease) const;
  absl::Status NoRoom(const ModelRecord& model, uint64_t needed_bytes, const DeviceRoom& room,
                      const RoomDecision& decision, const std::vector<LeaseId>& in_use) const;
  ActivateOutcome OutcomeOf(const ModelRecord& model, LeaseId lease) const;
  void ReplyNow(absl::Status status, decltype(Reply::outcome) outcome = {});
  void Finish();
  TimerId SetTimer(absl::Duration after);
  ModelRecord& Model(ModelId id) { return records_.models.at(id); }
  const DeviceRecord& device() const { return records_.devices.at(device_); }
  void Emit(Effect effect) { context_.effects.push_back(std::move(effect)); }

  const DeviceId device_;
  const absl::Duration pool_idle_;
  Records& records_;
  Context& context_;
  std::deque<Waiting> waiting_;
  std::deque<Waiting> waiting_for_phase_;
  std::optional<Job> job_;
  bool pumping_ = false;
  TimerId release_timer_;
  TimerId pool_timer_;
  bool trim_missed_ = false;  // the timer fired while a job ran
};

RequestId RequestOf(const DeviceQueue::Request& request);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_DEVICE_QUEUE_H_

// SPDX-License-Identifier: Apache-2.0
//
// How a device's queue takes a model off: for a deactivation, an unload, or because another one needs its room.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/device_queue.h"
#include "mechanisms/refusal.h"

namespace residency {

void DeviceQueue::Start(const DeactivateRequested& request) {
  ModelRecord& model = Model(job_->model);
  if (model.state == ModelState::kActive) return Clear(model.id);
  if (model.state == ModelState::kInactive) {
    ReplyNow(absl::OkStatus(), DeactivateOutcome{.freed_bytes = 0});
  } else {
    ReplyNow(Refuse(absl::StatusCode::kFailedPrecondition,
                    model.state == ModelState::kBroken ? "BROKEN" : "REGISTERING",
                    absl::StrCat(model.name, " is ", std::string(ModelStateName(model.state)))));
  }
  Finish();
}

void DeviceQueue::Start(const UnloadRequested& request) {
  ModelRecord& model = Model(job_->model);
  // Somebody registered it again meanwhile.
  if (!request.request && !model.unwanted && model.failed.ok()) return Finish();
  // A broken model may have cells under its addresses too, and clients that use them; one whose filling came to
  // nothing, clients that are just letting go of what they were sent of it.
  const std::vector<LeaseRecord*> leases = records_.LeasesOf(model.id);
  // What could not be read whole is nothing to wait with.
  const bool held = model.failed.ok() &&
                    std::any_of(leases.begin(), leases.end(), [](const auto* lease) { return lease->holds_cells(); });
  if (model.state == ModelState::kActive || model.state == ModelState::kBroken || held) return Clear(model.id);
  DropModelNow();
}

void DeviceQueue::Clear(ModelId id) {
  ModelRecord& model = Model(id);
  job_->clearing = id;
  std::vector<LeaseId> live;
  std::vector<LeaseId> hung_up;
  bool waits = false;
  for (const LeaseRecord* lease : records_.LeasesOf(id)) {
    if (!MustLetGo(*lease)) continue;
    if (lease->state == LeaseState::kLive) live.push_back(lease->id);
    if (lease->state == LeaseState::kUnresponsive) hung_up.push_back(lease->id);
    // Cells that are on their way, or on their way back, will have arrived in a moment.
    waits |= lease->holds_cells();
  }
  if (model.state == ModelState::kActive && !changes_phase()) model.Apply(ModelChange::kDeactivationBegan);
  if (!hung_up.empty() && !drains()) return NotCleared(records_.InUse(model.name, hung_up, context_.now));
  if (!waits) return LetGo();
  job_->phase = Phase::kClosing;
  if (release_timer_) Emit(Effect(residency::SetTimer{release_timer_, absl::InfiniteFuture()}));
  job_->timed_out = false;
  release_timer_ = SetTimer(drains() ? std::get<DeactivateRequested>(job_->request).drain : kReleaseDeadline);
  Emit(CloseUseWords{id, std::move(live), !drains()});
}

// Whether leases in use are waited for.
bool DeviceQueue::drains() const {
  const auto* deactivate = std::get_if<DeactivateRequested>(&job_->request);
  return deactivate != nullptr && deactivate->drain > absl::ZeroDuration();
}

// All leases, but that a phase which goes on keeps those that are in it.
bool DeviceQueue::MustLetGo(const LeaseRecord& lease) const { return !changes_phase() || !lease.phase; }

void DeviceQueue::LetGo() {
  if (changes_phase()) return PhaseCleared();
  if (std::holds_alternative<ActivateRequested>(job_->request)) return VictimLetGo();
  Unmap(job_->clearing);
}

void DeviceQueue::On(const UseWordsClosed& event) {
  if (!job_.has_value() || job_->phase != Phase::kClosing || job_->clearing != event.model) return;
  if (!event.in_use.empty()) {
    ReplyNow(records_.InUse(Model(event.model).name, event.in_use, context_.now));
    // Others may have been asked already, where this one became live after them.
    return TakeBack();
  }
  job_->phase = Phase::kRevoking;
  const bool too_late = job_->timed_out || job_->replied;
  for (LeaseRecord* lease : records_.LeasesOf(event.model)) {
    if (lease->state != LeaseState::kLive || !MustLetGo(*lease)) continue;
    lease->state = LeaseState::kRevoking;
    if (!too_late) Emit(RevokeLease{lease->id, lease->generation});
  }
  if (too_late) return TakeBack();
  CheckRevoked();
}

void DeviceQueue::OnLeaseLet(ModelId model) {
  if (job_.has_value() && job_->phase == Phase::kRevoking && job_->clearing == model) return CheckRevoked();
  // It came too late for the revocation that asked for it, and the model stayed: it gets its cells back.
  ResendCells(model);
  WakeWaiting();
  TakeOffLeft(model);
  Pump();
}

void DeviceQueue::OnLeaseReleasing(ModelId model) {
  if (job_.has_value() && job_->phase == Phase::kRevoking && job_->clearing == model) CheckRevoked();
}

void DeviceQueue::OnLeaseLive(ModelId model) {
  if (job_.has_value() && job_->phase == Phase::kRevoking && job_->clearing == model) CheckRevoked();
}

void DeviceQueue::CheckRevoked() {
  // A lease that became live while others were being closed is closed in its turn.
  std::vector<LeaseId> live;
  for (const LeaseRecord* lease : records_.LeasesOf(job_->clearing)) {
    if (lease->state == LeaseState::kLive && MustLetGo(*lease)) live.push_back(lease->id);
  }
  if (!live.empty()) {
    job_->phase = Phase::kClosing;
    Emit(CloseUseWords{job_->clearing, std::move(live), !drains()});
    return;
  }
  // A victim's cells are filled anew as they come free, so that the link need not wait for the last of them.
  const bool gives = std::holds_alternative<ActivateRequested>(job_->request);
  for (const LeaseRecord* lease : records_.LeasesOf(job_->clearing)) {
    if (gives && lease->state == LeaseState::kReleasing) continue;
    if (lease->holds_cells() && MustLetGo(*lease)) return;
  }
  LetGo();
}

bool DeviceQueue::On(const TimerFired& event) {
  if (event.timer == pool_timer_) {
    // A job that runs may be about to take those cells.
    trim_missed_ = job_.has_value();
    if (!trim_missed_) Emit(TrimPool{device_});
    return true;
  }
  if (event.timer != release_timer_) return false;
  release_timer_ = TimerId{};
  if (!job_.has_value()) return true;
  job_->timed_out = true;
  if (job_->phase == Phase::kRevoking) TakeBack();
  if (job_->phase == Phase::kFilling) StopHinderedFill();
  return true;
}

void DeviceQueue::TakeBack() {
  std::vector<LeaseId> held;
  for (const LeaseRecord* lease : records_.LeasesOf(job_->clearing)) {
    if (lease->state == LeaseState::kRevoking) held.push_back(lease->id);
  }
  job_->phase = Phase::kReopening;
  Emit(ReopenUseWords{job_->clearing, std::move(held)});
}

void DeviceQueue::On(const UseWordsReopened& event) {
  if (!job_.has_value() || job_->phase != Phase::kReopening || job_->clearing != event.model) return;
  std::vector<LeaseId> holders;
  for (LeaseRecord* lease : records_.LeasesOf(event.model)) {
    if (lease->holds_cells() && MustLetGo(*lease)) holders.push_back(lease->id);
    const bool taken = std::find(event.taken.begin(), event.taken.end(), lease->id) != event.taken.end();
    if (lease->state == LeaseState::kRevoking && !taken) lease->state = LeaseState::kLive;
  }
  NotCleared(records_.InUse(Model(event.model).name, holders, context_.now));
}

void DeviceQueue::NotCleared(const absl::Status& status) {
  ModelRecord& model = Model(job_->clearing);
  if (model.state == ModelState::kDeactivating) model.Apply(ModelChange::kDeactivationUndone);
  RestorePhase();
  ReplyNow(status);
  ResendCells(model.id);
  KeepGivers();
  Finish();
}

void DeviceQueue::Unmap(ModelId id) {
  job_->phase = Phase::kUnmapping;
  Emit(RealizePlan{id, NoneResident(Model(id).layout)});
}

void DeviceQueue::On(const PlanRealized& event) {
  if (!job_.has_value()) return;
  const bool filled = job_->phase == Phase::kFilling && job_->model == event.model;
  const bool unmapped = job_->phase == Phase::kUnmapping && job_->clearing == event.model;
  if ((filled || unmapped) && changes_phase()) return FinishPhase(event);
  if (filled) return FinishActivation(event);
  if (unmapped) return Cleared(event);
}

void DeviceQueue::Cleared(const PlanRealized& event) {
  ModelRecord& model = Model(event.model);
  const bool unloading = std::holds_alternative<UnloadRequested>(job_->request);
  model.device_bytes = event.device_bytes;
  job_->pooled = true;
  if (!event.status.ok()) {
    // Also for an unload: a model of which something is left on the GPU is not forgotten.
    model.last_error = event.status;
    if (!model.failed.ok()) KeepFailed(model);
    if (!event.broken) return NotCleared(event.status);
    if (model.state != ModelState::kBroken) model.Apply(ModelChange::kBroke);
    ReplyNow(event.status);
    return Finish();
  }
  job_->unmapped_bytes = event.unmapped_bytes;
  TakenOff(model);
  if (unloading) return DropModelNow();
  job_->cleared = {event.pooled_bytes, event.freed_bytes, event.copied_to_host_bytes, context_.now - job_->began};
  // The caller is told of memory that the driver has, where that is where it belongs.
  if (pool_idle_ == absl::ZeroDuration()) {
    job_->phase = Phase::kTrimming;
    return Emit(TrimPool{device_, /*report=*/true});
  }
  ReplyNow(absl::OkStatus(), job_->cleared);
  Finish();
}

// It cannot be dropped by itself, so it stays until somebody unloads it.
void DeviceQueue::KeepFailed(ModelRecord& model) {
  model.dropping = false;
  for (RequestId request : std::exchange(model.registrations, {})) Emit(Reply{request, model.failed, {}});
  if (const RequestId unload = std::exchange(model.unload, {})) Emit(Reply{unload, model.last_error, {}});
  for (const RegisterRequested& registration : std::exchange(model.registrations_after, {})) {
    Emit(Reply{registration.request, IsBroken(model), {}});
  }
}

// All of it is off the GPU.
void DeviceQueue::TakenOff(ModelRecord& model) {
  if (model.state == ModelState::kDeactivating) model.Apply(ModelChange::kDeactivated);
  model.component_on_gpu.reset();
  for (LeaseRecord* lease : records_.LeasesOf(model.id)) lease->phase = PhaseId{};
  model.claimed_device_bytes = 0;
}

void DeviceQueue::DropModelNow() {
  job_->phase = Phase::kDropping;
  for (const LeaseRecord* lease : records_.LeasesOf(job_->model)) {
    Emit(EndLease{lease->id, "UNLOADED", ""});
    if (lease->release) Emit(Reply{lease->release, absl::OkStatus(), {}});
  }
  std::erase_if(records_.leases, [this](const auto& entry) { return entry.second.model == job_->model; });
  Model(job_->model).dropping = true;
  Emit(DropModel{job_->model});
}

void DeviceQueue::On(const ModelDropped& event) {
  if (!job_.has_value() || job_->phase != Phase::kDropping || job_->model != event.model) return;
  Model(event.model).Apply(ModelChange::kUnloaded);
  records_.models.erase(event.model);
  ReplyNow(absl::OkStatus(), UnloadOutcome{event.host_bytes, job_->unmapped_bytes + event.device_bytes});
  Finish();
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/arbiter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

absl::Status UnloadedMeanwhile(const ModelRecord& model) {
  return Refuse(absl::StatusCode::kAborted, "UNLOADED",
                absl::StrCat(model.name, " was unloaded while it was being registered"));
}

// Why `session` may not speak for `lease`, which may be nobody's.
absl::Status CheckLease(const Records& records, SessionId session, LeaseId lease) {
  const auto found = records.leases.find(lease);
  if (found == records.leases.end()) return LeaseIsOver(lease);
  if (found->second.session != session) {
    return Refuse(absl::StatusCode::kPermissionDenied, "SESSION_OWNER",
                  absl::StrCat("lease ", lease.value, " belongs to another session"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSame(const ModelRecord& model, const RegisterRequested& event) {
  const auto taken = [&](const std::string& by) {
    return Refuse(absl::StatusCode::kAlreadyExists, "NAME_TAKEN",
                  absl::StrCat("the name '", event.name, "' ", by, "; unload it first"));
  };
  if (model.identity != event.identity) {
    return taken("belongs to another checkpoint, or to these files before they changed");
  }
  if (model.mode != event.mode) {
    return taken(absl::StrCat("is registered as ", std::string(ModelModeName(model.mode)), ", not as ",
                              std::string(ModelModeName(event.mode))));
  }
  if (model.tier == event.tier) return absl::OkStatus();
  return taken(absl::StrCat("is registered with the host tier ", std::string(HostTierName(model.tier)), ", not ",
                            std::string(HostTierName(event.tier))));
}

Arbiter::Arbiter(const ArbiterOptions& options) : options_(options) {
  for (const DeviceRecord& device : options.devices) {
    records_.devices.emplace(device.id, device);
    queues_.try_emplace(device.id, device.id, options.pool_idle, records_, context_);
  }
}

std::vector<Effect> Arbiter::Step(const Event& event, absl::Time now) {
  context_.now = now;
  context_.effects.clear();
  std::visit([this](const auto& e) { On(e); }, event);
  ForgetDeadlines();
  return std::move(context_.effects);
}

// The deadlines of what was answered in this step.
void Arbiter::ForgetDeadlines() {
  std::vector<Effect> timers;
  for (const Effect& effect : context_.effects) {
    const auto* reply = std::get_if<Reply>(&effect);
    if (reply == nullptr) continue;
    const auto found = std::find_if(deadlines_.begin(), deadlines_.end(),
                                    [&](const auto& entry) { return entry.second.request == reply->request; });
    if (found == deadlines_.end()) continue;
    timers.push_back(SetTimer{found->first, absl::InfiniteFuture()});
    deadlines_.erase(found);
  }
  for (Effect& timer : timers) context_.effects.push_back(std::move(timer));
}

std::optional<absl::Time> Arbiter::oldest_transition() const {
  std::optional<absl::Time> oldest;
  for (const auto& [id, queue] : queues_) {
    const std::optional<absl::Time> since = queue.running_since();
    if (since.has_value() && (!oldest.has_value() || *since < *oldest)) oldest = since;
  }
  return oldest;
}

DeviceQueue* Arbiter::QueueOf(ModelId model) { return &queues_.at(records_.models.at(model).device); }

ModelRecord* Arbiter::ModelFor(RequestId request, std::string_view name) {
  const auto model = records_.GetModel(name);
  if (model.ok()) return *model;
  context_.effects.push_back(Reply{request, model.status(), {}});
  return nullptr;
}

// ---- Registration. ----

void Arbiter::On(const RegisterRequested& event) {
  if (absl::Status tier = CheckTier(event); !tier.ok()) {
    return context_.effects.push_back(Reply{event.request, std::move(tier), {}});
  }
  if (ModelRecord* model = records_.FindModel(event.name)) {
    if (absl::Status taken = CheckSame(*model, event); !taken.ok()) {
      context_.effects.push_back(Reply{event.request, std::move(taken), {}});
    } else if (model->dropping || model->given_up()) {
      // Its memory is being given back; what comes now is taken up when that is done.
      model->registrations_after.push_back(event);
    } else if (!model->failed.ok()) {
      context_.effects.push_back(Reply{event.request, IsBroken(*model), {}});
    } else if (model->reading) {
      model->registrations.push_back(event.request);
      context_.effects.push_back(JoinMirrors{model->id, event.request});
    } else {
      model->unwanted = false;
      context_.effects.push_back(
          Reply{event.request, absl::OkStatus(), RegisterOutcome{model->id, model->pinned_bytes, model->pin}});
    }
    return;
  }
  HostPlan plan = PlanHost(event);
  if (!plan.room.ok()) {
    context_.effects.push_back(Reply{event.request, plan.room, {}});
    return;
  }
  const ModelId id{next_model_++};
  ModelRecord& model = records_.models[id];
  model.id = id;
  model.name = event.name;
  model.identity = event.identity;
  model.device = event.device;
  model.budget = event.budget;
  model.layout = event.layout;
  model.mode = event.mode;
  model.tier = event.tier;
  model.host_bytes = HostBytes(event);
  model.last_used = context_.now;
  model.registrations = {event.request};
  model.host_copy = plan.copy ? plan.copy : HostCopyId{next_host_copy_++};
  model.pin_wish = plan.wish;
  model.pin = std::move(plan.pin);
  context_.effects.push_back(BuildMirrors{id, event.request, model.host_copy, model.pin_wish, model.tier});
}

HostPlan Arbiter::PlanHost(const RegisterRequested& event) const {
  return residency::PlanHost(event, records_, options_.host_budget_bytes);
}

void Arbiter::NotePinning(const MirrorsBuilt& event, ModelRecord& model) {
  model.pinned_bytes = event.pinned_bytes;
  model.pin.pinned = event.pinned_bytes > 0;
  if (model.pin.reason == PinReason::kShared) {
    absl::StrAppend(&model.pin.message, model.pin.pinned ? ", which is page-locked" : ", which is pageable");
  } else if (!event.pin_refusal.ok()) {
    model.pin.reason = PinReason::kRefused;
    model.pin.message = absl::StrCat("pageable: ", std::string(event.pin_refusal.message()));
  }
  if (event.pin_limit_bytes.has_value()) records_.pin_limit_bytes = event.pin_limit_bytes;
  if (records_.pin_limit_bytes.has_value() && records_.pinned_bytes() > *records_.pin_limit_bytes) {
    records_.pin_limit_bytes.reset();
  }
}

// What came while a model's memory was given back; `given_back_bytes` were missing from what the host had then.
void Arbiter::RegisterAgain(std::vector<RegisterRequested> registrations, uint64_t given_back_bytes) {
  for (RegisterRequested& registration : registrations) {
    if (registration.host.available_bytes.has_value()) *registration.host.available_bytes += given_back_bytes;
    On(registration);
  }
}

void Arbiter::On(const MirrorsNearlyBuilt& event) { records_.models.at(event.model).nearly_built = true; }

void Arbiter::On(const MirrorsBuilt& event) {
  ModelRecord& model = records_.models.at(event.model);
  model.reading = false;
  NotePinning(event, model);
  if (!event.status.ok()) return ReadingFailed(event, model);
  const absl::Status status = model.unload ? UnloadedMeanwhile(model) : absl::OkStatus();
  // Those who came after it was given up, too late to stop the reading, find it registered.
  std::vector<RegisterRequested> after = std::exchange(model.registrations_after, {});
  const bool wanted = !model.registrations.empty() || !after.empty() || model.unload;
  for (RequestId request : std::exchange(model.registrations, {})) {
    Reply reply{request, status, {}};
    if (status.ok()) reply.outcome = RegisterOutcome{model.id, model.pinned_bytes, model.pin};
    context_.effects.push_back(std::move(reply));
  }
  // It may be on its way to the GPU already.
  if (model.state == ModelState::kRegistering) model.Apply(ModelChange::kRegistered);
  // Given up too late to stop the reading: the registration is undone all the same.
  model.unwanted = !wanted;
  if (model.unload || !wanted) QueueOf(model.id)->Add(UnloadRequested{model.unload, model.name}, model.id);
  RegisterAgain(std::move(after), 0);
}

void Arbiter::ReadingFailed(const MirrorsBuilt& event, ModelRecord& model) {
  const absl::Status status = model.unload ? UnloadedMeanwhile(model) : event.status;
  if (model.nearly_built) {
    // A fill may be under way, or about to be. It is told when all of that is over, which whoever gives up unloading it
    // does not keep from coming.
    model.failed = status;
    model.dropping = true;
    return QueueOf(model.id)->Add(UnloadRequested{RequestId{}, model.name}, model.id);
  }
  for (RequestId request : model.registrations) context_.effects.push_back(Reply{request, status, {}});
  if (model.unload) context_.effects.push_back(Reply{model.unload, absl::OkStatus(), UnloadOutcome{}});
  std::vector<RegisterRequested> after = std::move(model.registrations_after);
  const uint64_t given_back_bytes = model.layout.span_bytes;
  model.Apply(ModelChange::kRegistrationFailed);
  records_.models.erase(event.model);
  RegisterAgain(std::move(after), given_back_bytes);
}

// ---- Requests about a model. ----

void Arbiter::On(const UnloadRequested& event) {
  ModelRecord* const model = ModelFor(event.request, event.name);
  if (model == nullptr) return;
  if (!model->reading) return QueueOf(model->id)->Add(event, model->id);
  if (model->unload) {
    context_.effects.push_back(
        Reply{event.request,
              Refuse(absl::StatusCode::kAborted, "UNLOADED", absl::StrCat(model->name, " is being unloaded already")),
              {}});
    return;
  }
  model->unload = event.request;
  context_.effects.push_back(CancelMirrors{model->id});
}

void Arbiter::On(const ActivateRequested& event) {
  if (event.session) {
    const auto session = records_.sessions.find(event.session);
    if (session == records_.sessions.end() || session->second.hung_up) {
      context_.effects.push_back(Reply{event.request,
                                       Refuse(absl::StatusCode::kNotFound, "NO_SUCH_SESSION",
                                              "the session is not known here; open the page channel first"),
                                       {}});
      return;
    }
  }
  const ModelRecord* const model = ModelFor(event.request, event.name);
  if (model == nullptr) return;
  SetDeadline(event.request, event.deadline, model->name);
  QueueOf(model->id)->Add(event, model->id);
}

void Arbiter::SetDeadline(RequestId request, absl::Time deadline, const std::string& what) {
  if (deadline == absl::InfiniteFuture()) return;
  const TimerId timer{context_.next_timer++};
  deadlines_.emplace(timer, Deadline{request, what});
  context_.effects.push_back(SetTimer{timer, deadline});
}

void Arbiter::On(const DeactivateRequested& event) {
  if (const ModelRecord* model = ModelFor(event.request, event.name)) QueueOf(model->id)->Add(event, model->id);
}

void Arbiter::On(const VerifyRequested& event) {
  if (const ModelRecord* model = ModelFor(event.request, event.name)) QueueOf(model->id)->Add(event, model->id);
}

void Arbiter::On(const TrimRequested& event) { queues_.at(event.device).Add(event); }

void Arbiter::GiveUp(RequestId request, const absl::Status& status) {
  for (auto& [id, queue] : queues_) {
    if (queue.GiveUp(request, status)) return;
  }
  for (auto& [id, model] : records_.models) {
    if (std::erase_if(model.registrations_after, [&](const auto& event) { return event.request == request; }) > 0) {
      context_.effects.push_back(Reply{request, status, {}});
      return;
    }
    const auto found = std::find(model.registrations.begin(), model.registrations.end(), request);
    if (found == model.registrations.end()) continue;
    model.registrations.erase(found);
    context_.effects.push_back(Reply{request, status, {}});
    // Nobody wants it any more.
    if (model.given_up() && !model.unload) context_.effects.push_back(CancelMirrors{id});
    return;
  }
}

void Arbiter::On(const RequestCancelled& event) {
  GiveUp(event.request, Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the caller has gone away"));
}

void Arbiter::On(const TimerFired& event) {
  if (const auto deadline = deadlines_.find(event.timer); deadline != deadlines_.end()) {
    const Deadline passed = std::move(deadline->second);
    deadlines_.erase(deadline);
    return GiveUp(passed.request, Refuse(absl::StatusCode::kDeadlineExceeded, "DEADLINE",
                                         absl::StrCat("the deadline passed before ", passed.what, " was on the GPU")));
  }
  for (auto& [id, queue] : queues_) {
    if (queue.On(event)) return;
  }
}

// ---- Answers to effects, which the queue of the device waits for. ----

void Arbiter::On(const DeviceMeasured& event) { queues_.at(event.device).On(event); }
void Arbiter::On(const PlanRealized& event) { QueueOf(event.model)->On(event); }
void Arbiter::On(const PoolTrimmed& event) { queues_.at(event.device).On(event); }
void Arbiter::On(const CellsVerified& event) { QueueOf(event.model)->On(event); }
void Arbiter::On(const ModelDropped& event) {
  ModelRecord& model = records_.models.at(event.model);
  for (RequestId request : std::exchange(model.registrations, {})) {
    context_.effects.push_back(Reply{request, model.failed, {}});
  }
  if (model.unload && !model.failed.ok()) {
    context_.effects.push_back(
        Reply{model.unload, absl::OkStatus(), UnloadOutcome{event.host_bytes, event.device_bytes}});
  }
  const uint64_t given_back_bytes = model.failed.ok() ? event.host_bytes : model.layout.span_bytes;
  std::vector<RegisterRequested> after = std::move(model.registrations_after);
  QueueOf(event.model)->On(event);
  RegisterAgain(std::move(after), given_back_bytes);
}
void Arbiter::On(const UseWordsClosed& event) { QueueOf(event.model)->On(event); }
void Arbiter::On(const UseWordsReopened& event) {
  QueueOf(event.model)->On(event);
  for (LeaseRecord* lease : records_.LeasesOf(event.model)) {
    if (lease->ending()) Release(*lease);
  }
}

// ---- Sessions and leases. ----

void Arbiter::On(const SessionOpened& event) {
  records_.sessions.emplace(event.session, SessionRecord{event.session, event.pid, event.uid, event.client, false});
}

void Arbiter::On(const SessionHungUp& event) {
  const auto session = records_.sessions.find(event.session);
  if (session == records_.sessions.end()) return;
  session->second.hung_up = true;
  std::vector<LeaseId> empty;
  for (auto& [id, lease] : records_.leases) {
    if (lease.session != event.session) continue;
    if (!lease.holds_cells()) empty.push_back(id);
    if (lease.holds_cells()) lease.state = LeaseState::kUnresponsive;
  }
  // Nothing could be sent to those any more.
  for (LeaseId lease : empty) DropIfThere(lease, "SESSION_ENDED");
}

void Arbiter::On(const SessionEnded& event) {
  std::vector<LeaseId> held;
  for (const auto& [id, lease] : records_.leases) {
    if (lease.session == event.session) held.push_back(id);
  }
  records_.sessions.erase(event.session);
  for (LeaseId lease : held) DropIfThere(lease, "SESSION_ENDED");
}

void Arbiter::On(const ReleaseLeaseRequested& event) {
  absl::Status status = CheckLease(records_, event.session, event.lease);
  if (status.ok()) {
    LeaseRecord& lease = records_.leases.at(event.lease);
    if (!lease.release) {
      lease.release = event.request;
      return Release(lease);
    }
    status = Refuse(absl::StatusCode::kFailedPrecondition, "RELEASING",
                    absl::StrCat("lease ", event.lease.value, " is being released already"));
  }
  // One that is over has been released.
  if (status.code() == absl::StatusCode::kNotFound) status = absl::OkStatus();
  context_.effects.push_back(Reply{event.request, std::move(status), {}});
}

void Arbiter::On(const BeginPhaseRequested& event) {
  if (absl::Status status = CheckLease(records_, event.session, event.lease); !status.ok()) {
    return context_.effects.push_back(Reply{event.request, std::move(status), {}});
  }
  const ModelId model = records_.leases.at(event.lease).model;
  SetDeadline(event.request, event.deadline,
              absl::StrCat("component ", event.component, " of ", records_.models.at(model).name));
  QueueOf(model)->Add(event, model);
}

void Arbiter::On(const EndPhaseRequested& event) {
  absl::Status status = CheckLease(records_, event.session, event.lease);
  // A lease that is over is in no phase.
  if (status.code() == absl::StatusCode::kNotFound) status = absl::OkStatus();
  const auto lease = records_.leases.find(event.lease);
  if (!status.ok() || lease == records_.leases.end()) {
    return context_.effects.push_back(Reply{event.request, std::move(status), {}});
  }
  const ModelId model = lease->second.model;
  QueueOf(model)->Add(event, model);
}

// A lease that ends goes the way of every revocation: were the client to close its use word itself, that could cross
// a revocation which is just being taken back. One that is being mapped or revoked already is taken up when that is
// through.
void Arbiter::Release(LeaseRecord& lease) {
  if (lease.state == LeaseState::kRevoked) {
    const std::string reason = lease.failure.ok() ? "RELEASED" : ReasonOf(lease.failure);
    return Drop(lease.id, reason, std::string(lease.failure.message()));
  }
  // The word of one whose cells are still being filled is closed, and it need not wait for them.
  if (lease.state == LeaseState::kFilling) {
    lease.state = LeaseState::kRevoking;
    return context_.effects.push_back(RevokeLease{lease.id, lease.generation});
  }
  if (lease.state != LeaseState::kLive) return;
  lease.state = LeaseState::kRevoking;
  context_.effects.push_back(CloseAndRevoke{lease.id, lease.generation});
}

// What the end of one lease lets go on may be the unloading of another one's model.
void Arbiter::DropIfThere(LeaseId id, std::string_view reason) {
  if (records_.leases.contains(id)) Drop(id, reason);
}

void Arbiter::Drop(LeaseId id, std::string_view reason, std::string_view message) {
  const ModelId model = records_.leases.at(id).model;
  const RequestId release = records_.leases.at(id).release;
  records_.leases.erase(id);
  context_.effects.push_back(EndLease{id, std::string(reason), std::string(message)});
  if (release) context_.effects.push_back(Reply{release, absl::OkStatus(), {}});
  records_.models.at(model).last_used = context_.now;
  QueueOf(model)->OnLeaseLet(model);
}

void Arbiter::On(const LeaseMapped& event) {
  const auto lease = records_.leases.find(event.lease);
  if (lease == records_.leases.end() || lease->second.generation != event.generation) return;
  if (lease->second.state != LeaseState::kGranting) return;
  lease->second.state = LeaseState::kLive;
  if (lease->second.ending()) return Release(lease->second);
  QueueOf(lease->second.model)->OnLeaseLive(lease->second.model);
}

void Arbiter::On(const LeaseReleasing& event) {
  const auto lease = records_.leases.find(event.lease);
  if (lease == records_.leases.end() || lease->second.generation != event.generation) return;
  if (lease->second.state != LeaseState::kRevoking && lease->second.state != LeaseState::kLive) return;
  lease->second.state = LeaseState::kReleasing;
  QueueOf(lease->second.model)->OnLeaseReleasing(lease->second.model);
}

void Arbiter::On(const LeaseReleased& event) {
  const auto lease = records_.leases.find(event.lease);
  if (lease == records_.leases.end() || lease->second.generation != event.generation) return;
  const bool holds = lease->second.state == LeaseState::kRevoking || lease->second.state == LeaseState::kReleasing ||
                     lease->second.state == LeaseState::kLive;
  if (!holds) return;
  lease->second.state = LeaseState::kRevoked;
  if (lease->second.ending()) return Release(lease->second);
  QueueOf(lease->second.model)->OnLeaseLet(lease->second.model);
}

void Arbiter::On(const LeaseFailed& event) {
  const auto lease = records_.leases.find(event.lease);
  if (lease == records_.leases.end()) return;
  if (!event.by_client) records_.models.at(lease->second.model).last_error = event.status;
  QueueOf(lease->second.model)->OnLeaseFailed(event.lease, event.status);
  // What could not be handed over as a whole may have come in parts.
  if (!event.by_client && lease->second.state == LeaseState::kGranting) {
    lease->second.unclaimed = true;
    lease->second.failure = event.status;
    lease->second.state = LeaseState::kRevoking;
    return context_.effects.push_back(RevokeLease{event.lease, lease->second.generation});
  }
  const std::string reason = ReasonOf(event.status);
  Drop(event.lease, reason.empty() ? "LEASE_FAILED" : reason, std::string(event.status.message()));
}

}  // namespace residency

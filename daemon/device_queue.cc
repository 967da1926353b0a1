// SPDX-License-Identifier: Apache-2.0
#include "daemon/device_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/planner.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {

RequestId RequestOf(const DeviceQueue::Request& request) {
  return std::visit([](const auto& r) { return r.request; }, request);
}

void DeviceQueue::Add(Request request, ModelId model) {
  waiting_.push_back({std::move(request), model, Model(model).name});
  Pump();
}

void DeviceQueue::Add(const TrimRequested& request) {
  waiting_.push_back({request, ModelId{}, ""});
  Pump();
}

bool DeviceQueue::GiveUp(RequestId request, const absl::Status& status) {
  if (job_.has_value() && !job_->replied && RequestOf(job_->request) == request) {
    ReplyNow(status);
    // Nobody is there to take a lease.
    if (auto* activate = std::get_if<ActivateRequested>(&job_->request)) {
      activate->session = SessionId{};
    }
    if (job_->phase == Phase::kRevoking) TakeBack();
    EndUnclaimed();
    StopUnwantedFill();
    return true;
  }
  for (std::deque<Waiting>* waiting : {&waiting_, &waiting_for_phase_}) {
    const auto found = std::find_if(waiting->begin(), waiting->end(),
                                    [&](const Waiting& entry) { return RequestOf(entry.request) == request; });
    if (found == waiting->end()) continue;
    const ModelId model = found->model;
    waiting->erase(found);
    Emit(Reply{request, status, {}});
    // It may have been about to take the place of a component that nobody needs any more.
    if (records_.models.contains(model)) TakeOffLeft(model);
    StopUnwantedFill();
    Pump();
    return true;
  }
  return false;
}

// Whoever waits for the same model finds it active once this fill is through, so that goes on as long as one does.
void DeviceQueue::StopUnwantedFill() {
  if (!job_.has_value() || job_->phase != Phase::kFilling || !job_->replied || job_->stopped) return;
  const auto* phase = std::get_if<BeginPhaseRequested>(&job_->request);
  const auto wants_it = [&](const Waiting& waiting) {
    if (waiting.model != job_->model) return false;
    if (phase == nullptr) return std::holds_alternative<ActivateRequested>(waiting.request);
    const auto* other = std::get_if<BeginPhaseRequested>(&waiting.request);
    return other != nullptr && other->component == phase->component;
  };
  if (std::any_of(waiting_.begin(), waiting_.end(), wants_it)) return;
  job_->stopped = true;
  Emit(CancelRealize{job_->model});
}

void DeviceQueue::Pump() {
  // A request that is answered at once ends in Finish, which pumps; the loop below goes on then.
  if (std::exchange(pumping_, true)) return;
  while (!job_.has_value() && !waiting_.empty()) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    job_ = Job{.request = std::move(next.request), .began = context_.now, .model = next.model};
    if (next.model && !records_.models.contains(next.model)) {
      ReplyNow(Refuse(absl::StatusCode::kNotFound, "NO_SUCH_MODEL", "the model was unloaded while the request waited"));
      Finish();
      continue;
    }
    std::visit([this](const auto& request) { Start(request); }, Request(job_->request));
  }
  pumping_ = false;
}

// ---- Activation. ----

void DeviceQueue::Start(const ActivateRequested& request) {
  ModelRecord& model = Model(job_->model);
  if (model.state == ModelState::kActive) {
    const LeaseId lease = Grant(request, model);
    ReplyNow(absl::OkStatus(), OutcomeOf(model, lease));
    return Finish();
  }
  absl::Status status = device().usable;
  const bool early = model.state == ModelState::kRegistering && model.nearly_built;
  if (!model.failed.ok()) {
    status = model.failed;
  } else if (model.state == ModelState::kBroken) {
    status = IsBroken(model);
  } else if (model.state != ModelState::kInactive && !early) {
    status = Refuse(absl::StatusCode::kFailedPrecondition, "REGISTERING",
                    absl::StrCat(model.name, " is still being registered"));
  }
  if (status.ok()) status = CheckBudget(model.name, model.layout, model.mode, request.budget);
  if (status.ok()) status = CheckBudget(model.name, model.layout, model.mode, model.budget);
  if (!status.ok()) {
    ReplyNow(status);
    return Finish();
  }
  job_->phase = Phase::kMeasuring;
  Emit(MeasureDevice{device_});
}

void DeviceQueue::On(const DeviceMeasured& event) {
  if (!job_.has_value() || job_->phase != Phase::kMeasuring) return;
  // Whoever gave up meanwhile evicts nobody.
  if (job_->replied) return Finish();
  if (!event.status.ok()) {
    ReplyNow(event.status);
    return Finish();
  }
  ModelRecord& model = Model(job_->model);
  DeviceRoom room{.total_bytes = event.total_bytes,
                  .free_bytes = event.free_bytes,
                  .pool_idle_bytes = event.pool_idle_bytes,
                  .broker_bytes = event.broker_bytes,
                  .budget_bytes = device().budget_bytes,
                  .reserve_bytes = device().reserve_bytes};
  std::vector<Occupant> occupants;
  std::vector<LeaseId> in_use = event.leases_in_use;
  for (const auto& [id, other] : records_.models) {
    if (other.device != device_ || other.state != ModelState::kActive || id == model.id) continue;
    // What a phased one has claimed beyond what is there is promised to its next phase.
    const bool phased = other.mode == ModelMode::kPhased;
    const uint64_t device_bytes =
        phased ? std::min(other.device_bytes, other.claimed_device_bytes) : other.claimed_device_bytes;
    Occupant occupant{id, device_bytes, false, other.last_used, other.claimed_device_bytes - device_bytes};
    room.promised_bytes += occupant.promised_bytes;
    for (const LeaseRecord* lease : records_.LeasesOf(id)) {
      // A lease whose client is just mapping is about to be used; one that hung up cannot be asked.
      // Between its phases the owner of a claim has nothing on the GPU, and must find room for the next one.
      const bool mapping = lease->state != LeaseState::kLive && lease->holds_cells();
      const bool waits = (mapping || phased) && !lease->ending();
      if (waits && std::find(in_use.begin(), in_use.end(), lease->id) == in_use.end()) in_use.push_back(lease->id);
      occupant.in_use |= waits || std::find(in_use.begin(), in_use.end(), lease->id) != in_use.end();
    }
    occupants.push_back(occupant);
  }
  const uint64_t needed_bytes = ClaimedBytes(model.layout, model.mode);
  RoomDecision decision = DecideRoom(needed_bytes, room, std::move(occupants));
  if (!decision.fits) {
    ReplyNow(NoRoom(model, needed_bytes, room, decision, in_use));
    return Finish();
  }
  if (decision.victims.empty()) return Fill();
  job_->victims = std::move(decision.victims);
  const ModelId victim = job_->victims.front();
  job_->victims.erase(job_->victims.begin());
  Clear(victim);
}

absl::Status DeviceQueue::NoRoom(const ModelRecord& model, uint64_t needed_bytes, const DeviceRoom& room,
                                 const RoomDecision& decision, const std::vector<LeaseId>& in_use) const {
  const std::string promised =
      room.promised_bytes > 0 ? absl::StrCat(", promised to phases ", room.promised_bytes) : "";
  const std::string figures = absl::StrCat(
      model.name, " needs ", needed_bytes, " bytes on ", device().uuid, "; ", decision.available_bytes,
      " available (held by the broker ", room.broker_bytes, ", by others ", room.others_bytes(), promised, ", free ",
      room.free_bytes + room.pool_idle_bytes, ", reserve ", room.reserve_bytes, ", budget ", room.budget_bytes, ")");
  Refusal refusal{.reason = "GPU_BUDGET", .needed_bytes = needed_bytes, .available_bytes = decision.available_bytes};
  if (decision.in_the_way.empty()) return Refuse(absl::StatusCode::kResourceExhausted, refusal, figures);
  refusal.reason = "IN_USE";
  std::string names;
  for (ModelId id : decision.in_the_way) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", records_.models.at(id).name);
    for (LeaseId lease : in_use) {
      // It may have ended since it was measured.
      const auto record = records_.leases.find(lease);
      if (record == records_.leases.end() || record->second.model != id) continue;
      refusal.holders.push_back(records_.HolderOf(record->second, context_.now));
    }
  }
  return Refuse(absl::StatusCode::kFailedPrecondition, refusal,
                absl::StrCat(figures, "; it would fit without ", names, ", which is in use"));
}

void DeviceQueue::Fill() {
  ModelRecord& model = Model(job_->model);
  // Its reading may have failed while room was made for it.
  if (!model.failed.ok()) {
    ReplyNow(model.failed);
    KeepGivers();
    return Finish();
  }
  model.Apply(ModelChange::kActivationBegan);
  model.claimed_device_bytes = ClaimedBytes(model.layout, model.mode);
  model.generation += 1;
  job_->phase = Phase::kFilling;
  const auto& request = std::get<ActivateRequested>(job_->request);
  RealizePlan effect{model.id, ActivationPlan(model.layout, model.mode), job_->givers, request.skip_verification, {}};
  if (model.mode == ModelMode::kHeld) {
    const bool had_one = records_.FindLease(request.session, model.id) != nullptr;
    const LeaseRecord* own = LeaseFor(request, model);
    if (own != nullptr && !had_one) job_->granted = own->id;
    for (LeaseRecord* lease : records_.LeasesOf(model.id)) {
      if (lease->state == LeaseState::kRevoked && !lease->ending()) effect.readers.push_back(AddReader(*lease));
    }
  }
  Emit(std::move(effect));
}

// That its caller gave up is nothing wrong with the model.
bool DeviceQueue::StoppedInTime(const PlanRealized& event) const {
  return job_->stopped && !event.broken && absl::IsCancelled(event.status);
}

void DeviceQueue::FinishActivation(const PlanRealized& event) {
  FinishGivers(event);
  ModelRecord& model = Model(job_->model);
  model.device_bytes = event.device_bytes;
  if (!event.status.ok()) {
    const bool early = model.reading || !model.failed.ok();
    model.Apply(event.broken ? ModelChange::kBroke
                : early      ? ModelChange::kEarlyActivationUndone
                             : ModelChange::kActivationUndone);
    model.claimed_device_bytes = 0;
    if (!StoppedInTime(event)) model.last_error = event.status;
    job_->pooled = true;
    DismissReaders();
    ReplyNow(model.failed.ok() ? event.status : model.failed);
    return Finish();
  }
  model.Apply(ModelChange::kActivated);
  // Unset is not zero, nor "no limit": it leaves what an earlier activation said.
  const Budget& asked = std::get<ActivateRequested>(job_->request).budget;
  if (asked.device_bytes.has_value()) model.asked_device_bytes = asked.device_bytes;
  model.last_used = context_.now;
  // All that it took, from the first effect to this event.
  const absl::Duration duration = context_.now - job_->began;
  model.last_activation = ActivationRecord{event.copied_bytes, duration, event.verified_cells, event.trusted_cells};
  model.last_error = absl::OkStatus();
  // Leases from before get their cells back, at the same addresses, without asking.
  ServeReaders();
  ResendCells(model.id);
  const LeaseId lease = Grant(std::get<ActivateRequested>(job_->request), model);
  ActivateOutcome outcome = OutcomeOf(model, lease);
  outcome.bytes_moved = event.copied_bytes;
  outcome.duration = duration;
  outcome.verified_cells = event.verified_cells;
  outcome.refilled_cells = event.refilled_cells;
  outcome.device_bytes = event.device_bytes;
  outcome.evicted = job_->evicted;
  outcome.trusted_cells = event.trusted_cells;
  ReplyNow(absl::OkStatus(), std::move(outcome));
  Finish();
}

ActivateOutcome DeviceQueue::OutcomeOf(const ModelRecord& model, LeaseId lease) const {
  // A lease may have an older generation than another one of its model: it never lost its cells.
  const uint64_t generation = lease ? records_.leases.at(lease).generation : model.generation;
  return ActivateOutcome{.model = model.id, .lease = lease, .generation = generation};
}

// The session's lease, which is made where there is none; nullptr where nobody is there to take one.
LeaseRecord* DeviceQueue::LeaseFor(const ActivateRequested& request, const ModelRecord& model) {
  const auto session = records_.sessions.find(request.session);
  if (session == records_.sessions.end() || session->second.hung_up) return nullptr;
  if (LeaseRecord* lease = records_.FindLease(request.session, model.id)) return lease;
  const LeaseId id{context_.next_lease++};
  LeaseRecord& lease = records_.leases[id];
  lease = LeaseRecord{.id = id, .session = request.session, .model = model.id, .since = context_.now};
  Emit(GrantLease{id, request.session, model.id});
  return &lease;
}

LeaseId DeviceQueue::Grant(const ActivateRequested& request, ModelRecord& model) {
  model.last_used = context_.now;
  LeaseRecord* lease = LeaseFor(request, model);
  if (lease == nullptr) return LeaseId{};
  lease->working_bytes = request.working_bytes;
  if (records_.WantsCells(*lease)) SendCells(*lease);
  return lease->id;
}

void DeviceQueue::ResendCells(ModelId model) {
  for (LeaseRecord* lease : records_.LeasesOf(model)) {
    if (records_.WantsCells(*lease)) SendCells(*lease);
  }
}

// A lease that lost its cells while the model stayed active gets them as a new generation, since only that opens its
// use word.
void DeviceQueue::NextGeneration(LeaseRecord& lease) {
  ModelRecord& model = Model(lease.model);
  if (lease.generation == model.generation) model.generation += 1;
  lease.generation = model.generation;
}

void DeviceQueue::SendCells(LeaseRecord& lease) {
  NextGeneration(lease);
  lease.state = LeaseState::kGranting;
  Emit(Effect(residency::SendCells{lease.id, lease.generation}));
}

// ---- Verify. ----

void DeviceQueue::Start(const VerifyRequested& request) {
  ModelRecord& model = Model(job_->model);
  if (model.state != ModelState::kActive && model.state != ModelState::kBroken) {
    ReplyNow(Refuse(absl::StatusCode::kFailedPrecondition, "NOT_ACTIVE",
                    absl::StrCat(model.name, " is ", std::string(ModelStateName(model.state)),
                                 ": there is nothing on the GPU to verify")));
    return Finish();
  }
  // One that broke while it was being read has nothing to be compared with.
  if (model.reading || !model.failed.ok()) {
    ReplyNow(Refuse(absl::StatusCode::kFailedPrecondition, "REGISTERING",
                    absl::StrCat(model.name, " is still being registered")));
    return Finish();
  }
  job_->phase = Phase::kVerifying;
  Emit(VerifyCells{model.id});
}

void DeviceQueue::On(const CellsVerified& event) {
  if (!job_.has_value() || job_->phase != Phase::kVerifying || job_->model != event.model) return;
  ModelRecord& model = Model(event.model);
  if (!event.status.ok()) {
    model.last_error = event.status;
    if (event.broken && model.state == ModelState::kActive) model.Apply(ModelChange::kBroke);
    ReplyNow(event.status);
  } else {
    ReplyNow(absl::OkStatus(),
             VerifyOutcome{event.verified_cells, event.refilled_cells, event.absent_cells, event.duration});
  }
  Finish();
}

// ---- Trim. ----

void DeviceQueue::Start(const TrimRequested& request) {
  job_->phase = Phase::kTrimming;
  Emit(TrimPool{device_, /*report=*/true});
}

void DeviceQueue::On(const PoolTrimmed& event) {
  if (!job_.has_value() || job_->phase != Phase::kTrimming) return;
  // The model of a deactivation is off its GPU, whatever became of the pool.
  if (std::holds_alternative<DeactivateRequested>(job_->request)) {
    DeactivateOutcome outcome = job_->cleared;
    // Cells that were idle before have gone with its own. What the figure did not rise by is counted against its own.
    const uint64_t idle_before_bytes = SaturatingSubtract(event.trimmed_bytes, outcome.pooled_bytes);
    const uint64_t freed_bytes =
        SaturatingSubtract(std::min(event.freed_bytes, event.trimmed_bytes), idle_before_bytes);
    if (!event.status.ok()) outcome.freed_bytes.reset();
    if (outcome.freed_bytes.has_value()) *outcome.freed_bytes += freed_bytes;
    outcome.pooled_bytes = SaturatingSubtract(outcome.pooled_bytes, event.trimmed_bytes);
    outcome.duration = context_.now - job_->began;
    ReplyNow(absl::OkStatus(), outcome);
  } else if (event.status.ok()) {
    ReplyNow(absl::OkStatus(), TrimOutcome{event.trimmed_bytes, event.freed_bytes});
  } else {
    ReplyNow(event.status);
  }
  job_->pooled = false;
  Finish();
}

// ---- Common. ----

void DeviceQueue::ReplyNow(absl::Status status, decltype(Reply::outcome) outcome) {
  if (std::exchange(job_->replied, true)) return;
  // What the core asked of itself is answered to nobody.
  if (const RequestId request = RequestOf(job_->request)) Emit(Reply{request, std::move(status), std::move(outcome)});
}

void DeviceQueue::Finish() {
  const bool pooled = job_->pooled || std::exchange(trim_missed_, false);
  job_.reset();
  if (release_timer_)
    Emit(Effect(residency::SetTimer{std::exchange(release_timer_, TimerId{}), absl::InfiniteFuture()}));
  if (pooled) {
    if (pool_timer_) Emit(Effect(residency::SetTimer{pool_timer_, absl::InfiniteFuture()}));
    pool_timer_ = SetTimer(pool_idle_);
  }
  WakeWaiting();
  Pump();
}

TimerId DeviceQueue::SetTimer(absl::Duration after) {
  const TimerId timer{context_.next_timer++};
  Emit(Effect(residency::SetTimer{timer, context_.now + after}));
  return timer;
}

std::optional<absl::Time> DeviceQueue::running_since() const {
  if (!job_.has_value()) return std::nullopt;
  return job_->began;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
//
// How a device's queue changes the component of a phased model that is on the GPU. One component is there at a time,
// for as long as a lease is in its phase; leases that want the same one share it, others wait for its end.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/device_queue.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

std::optional<uint32_t> FindComponent(const Layout& layout, const std::string& name) {
  for (uint32_t i = 0; i < layout.components.size(); ++i) {
    if (layout.components[i].name == name) return i;
  }
  return std::nullopt;
}

absl::Status NoSuchComponent(const ModelRecord& model, const std::string& name) {
  const std::string known =
      absl::StrJoin(model.layout.components, ", ",
                    [](std::string* out, const LayoutComponent& component) { out->append(component.name); });
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_COMPONENT",
                absl::StrCat(model.name, " has no component '", name, "'; there are: ", known));
}

// Why no phase of `model` can begin now.
absl::Status CheckPhased(const ModelRecord& model) {
  if (model.mode != ModelMode::kPhased) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "NOT_PHASED",
                  absl::StrCat(model.name, " is registered as held: all of it is there while it is active"));
  }
  if (model.state == ModelState::kBroken) return IsBroken(model);
  if (model.state != ModelState::kActive) {
    return Refuse(
        absl::StatusCode::kFailedPrecondition, "NOT_ACTIVE",
        absl::StrCat(model.name, " is ", std::string(ModelStateName(model.state)), ": activate it before its phases"));
  }
  return absl::OkStatus();
}

}  // namespace

bool DeviceQueue::changes_phase() const {
  return std::holds_alternative<BeginPhaseRequested>(job_->request) ||
         std::holds_alternative<EndPhaseRequested>(job_->request);
}

void DeviceQueue::Start(const BeginPhaseRequested& request) {
  ModelRecord& model = Model(job_->model);
  const auto lease = records_.leases.find(request.lease);
  const std::optional<uint32_t> component = FindComponent(model.layout, request.component);
  absl::Status status = CheckPhased(model);
  // One that hung up could be sent nothing.
  if (lease == records_.leases.end() || lease->second.ending() || lease->second.state == LeaseState::kUnresponsive) {
    status = LeaseIsOver(request.lease);
  } else if (status.ok() && !component.has_value()) {
    status = NoSuchComponent(model, request.component);
  }
  if (!status.ok()) {
    ReplyNow(status);
    TakeOffLeft(model.id);
    return Finish();
  }
  if (lease->second.phase && model.component_on_gpu == component) {
    ReplyNow(absl::OkStatus(), PhaseOutcome{.phase = lease->second.phase,
                                            .generation = lease->second.generation,
                                            .device_bytes = model.device_bytes});
    return Finish();
  }
  job_->component = *component;
  job_->left = std::exchange(lease->second.phase, PhaseId{});
  Clear(model.id);
}

void DeviceQueue::Start(const EndPhaseRequested& request) {
  const ModelRecord& model = Model(job_->model);
  const auto lease = records_.leases.find(request.lease);
  // A phase that is over already, for its model was deactivated or another one was begun, is no error.
  const bool over = !request.phase || lease == records_.leases.end() || lease->second.phase != request.phase;
  const bool left_on = model.component_on_gpu.has_value() && !records_.IsInPhase(model.id);
  if (over && (!left_on || model.state != ModelState::kActive)) {
    ReplyNow(absl::OkStatus(), PhaseOutcome{});
    return Finish();
  }
  if (absl::Status status = CheckPhased(model); !status.ok()) {
    ReplyNow(std::move(status));
    return Finish();
  }
  if (!over) job_->left = std::exchange(lease->second.phase, PhaseId{});
  Clear(model.id);
}

// Whoever is in no phase has let its cells go.
void DeviceQueue::PhaseCleared() {
  ModelRecord& model = Model(job_->model);
  const auto* begin = std::get_if<BeginPhaseRequested>(&job_->request);
  const bool is_on = model.component_on_gpu.has_value();
  if (begin == nullptr) {
    if (is_on && !records_.IsInPhase(model.id)) return Unmap(model.id);
    ReplyNow(absl::OkStatus(), PhaseOutcome{});
    return Finish();
  }
  const auto lease = records_.leases.find(begin->lease);
  if (job_->replied || lease == records_.leases.end()) {
    ReplyNow(LeaseIsOver(begin->lease));
    TakeOffLeft(model.id);
    return Finish();
  }
  if (is_on && *model.component_on_gpu == job_->component) {
    return EnterPhase(lease->second, PlanRealized{.device_bytes = model.device_bytes});
  }
  // Those who came before and wait for this phase's end go first.
  const bool others_wait = std::any_of(waiting_for_phase_.begin(), waiting_for_phase_.end(),
                                       [&](const Waiting& waiting) { return waiting.model == model.id; });
  if (records_.IsInPhase(model.id) || others_wait) {
    waiting_for_phase_.push_back({std::move(job_->request), model.id, model.name});
    return Finish();
  }
  // The one before goes first and by itself: undoing the filling, for a caller that gives up, would bring it back.
  if (is_on) return Unmap(model.id);
  job_->phase = Phase::kFilling;
  RealizePlan effect{.model = model.id, .plan = ComponentResident(model.layout, job_->component)};
  if (lease->second.state == LeaseState::kRevoked) effect.readers.push_back(AddReader(lease->second));
  Emit(std::move(effect));
}

void DeviceQueue::EnterPhase(LeaseRecord& lease, const PlanRealized& moved) {
  lease.phase = PhaseId{context_.next_phase++};
  Model(lease.model).last_used = context_.now;
  ServeReaders();
  if (records_.WantsCells(lease)) SendCells(lease);
  ReplyNow(absl::OkStatus(), PhaseOutcome{.phase = lease.phase,
                                          .generation = lease.generation,
                                          .bytes_moved = moved.copied_bytes,
                                          .duration = moved.duration,
                                          .verified_cells = moved.verified_cells,
                                          .refilled_cells = moved.refilled_cells,
                                          .device_bytes = moved.device_bytes});
  Finish();
}

void DeviceQueue::FinishPhase(const PlanRealized& event) {
  ModelRecord& model = Model(event.model);
  const auto* begin = std::get_if<BeginPhaseRequested>(&job_->request);
  model.device_bytes = event.device_bytes;
  job_->pooled = true;
  if (!event.status.ok()) {
    // What was there before is there again, or nobody knows what is there. Either way nobody is in a phase.
    if (!StoppedInTime(event)) model.last_error = event.status;
    if (event.broken) model.Apply(ModelChange::kBroke);
    DismissReaders();
    ReplyNow(event.status);
    if (begin != nullptr) TakeOffLeft(model.id);
    return Finish();
  }
  if (job_->phase == Phase::kUnmapping) {
    model.component_on_gpu.reset();
    return PhaseCleared();
  }
  model.component_on_gpu = job_->component;
  model.last_activation = ActivationRecord{event.copied_bytes, event.duration, event.verified_cells};
  model.last_error = absl::OkStatus();
  const auto lease = records_.leases.find(begin->lease);
  const bool gone =
      lease == records_.leases.end() || lease->second.ending() || lease->second.state == LeaseState::kUnresponsive;
  if (!job_->replied && !gone) return EnterPhase(lease->second, event);
  DismissReaders();
  ReplyNow(LeaseIsOver(begin->lease));
  TakeOffLeft(model.id);
  Finish();
}

// A phase that could not be left goes on.
void DeviceQueue::RestorePhase() {
  if (!job_->left) return;
  const auto* begin = std::get_if<BeginPhaseRequested>(&job_->request);
  const LeaseId id = begin != nullptr ? begin->lease : std::get<EndPhaseRequested>(job_->request).lease;
  const auto lease = records_.leases.find(id);
  if (lease != records_.leases.end()) lease->second.phase = job_->left;
}

// Has a component taken off that is in nobody's phase, unless another one is about to take its place.
void DeviceQueue::TakeOffLeft(ModelId model) {
  if (!Model(model).component_on_gpu.has_value() || records_.IsInPhase(model)) return;
  const bool replaced = std::any_of(waiting_.begin(), waiting_.end(), [model](const Waiting& waiting) {
    return waiting.model == model && std::holds_alternative<BeginPhaseRequested>(waiting.request);
  });
  if (!replaced) waiting_.push_back({EndPhaseRequested{}, model, Model(model).name});
}

// Takes up again those for whom the way is clear, or will never be.
void DeviceQueue::WakeWaiting() {
  std::deque<Waiting> still_waiting;
  for (Waiting& waiting : waiting_for_phase_) {
    const auto& begin = std::get<BeginPhaseRequested>(waiting.request);
    const auto model = records_.models.find(waiting.model);
    bool waits = model != records_.models.end() && model->second.state == ModelState::kActive &&
                 records_.leases.contains(begin.lease) && records_.IsInPhase(waiting.model, begin.lease);
    if (waits && model->second.component_on_gpu.has_value()) {
      waits = model->second.layout.components[*model->second.component_on_gpu].name != begin.component;
    }
    (waits ? still_waiting : waiting_).push_back(std::move(waiting));
  }
  waiting_for_phase_ = std::move(still_waiting);
}

}  // namespace residency

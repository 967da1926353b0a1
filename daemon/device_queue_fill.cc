// SPDX-License-Identifier: Apache-2.0
//
// Whom a filling concerns beside its caller: the leases whose clients are sent cells as they come, and the models whose
// place it takes.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/device_queue.h"

namespace residency {

// ---- Readers. ----

// Its client is sent the cells that are about to be filled, each as it is.
CellReader DeviceQueue::AddReader(LeaseRecord& lease) {
  NextGeneration(lease);
  lease.state = LeaseState::kFilling;
  return {lease.id, lease.generation};
}

// What was filled is theirs.
void DeviceQueue::ServeReaders() {
  for (LeaseRecord* lease : records_.LeasesOf(job_->model)) {
    if (lease->state != LeaseState::kFilling) continue;
    lease->state = LeaseState::kGranting;
    Emit(Effect(residency::SendCells{lease->id, lease->generation}));
  }
}

// The filling came to nothing, or nobody waits for it any more: their clients let go of the cells that they have.
void DeviceQueue::DismissReaders() {
  for (LeaseRecord* lease : records_.LeasesOf(job_->model)) DismissReader(*lease);
  EndUnclaimed();
}

void DeviceQueue::DismissReader(LeaseRecord& lease) {
  if (lease.state != LeaseState::kFilling) return;
  lease.state = LeaseState::kRevoking;
  Emit(RevokeLease{lease.id, lease.generation});
}

// A lease that was made for this activation, whose caller will not be told of it.
void DeviceQueue::EndUnclaimed() {
  const auto lease = records_.leases.find(std::exchange(job_->granted, LeaseId{}));
  if (lease == records_.leases.end()) return;
  lease->second.unclaimed = true;
  DismissReader(lease->second);
}

// Whether the activation that runs is for this lease.
bool DeviceQueue::IsOfRequest(LeaseId lease) const {
  const auto* activate = std::get_if<ActivateRequested>(&job_->request);
  return activate != nullptr && activate->session && records_.leases.at(lease).session == activate->session &&
         records_.leases.at(lease).model == job_->model;
}

void DeviceQueue::OnLeaseFailed(LeaseId lease, const absl::Status& status) {
  if (job_.has_value() && job_->phase == Phase::kFilling && IsOfRequest(lease)) {
    job_->granted = LeaseId{};
    GiveUp(RequestOf(job_->request), status);
    return;
  }
  const auto is_its = [lease](const Request& request) {
    const auto* begin = std::get_if<BeginPhaseRequested>(&request);
    return begin != nullptr && begin->lease == lease;
  };
  std::vector<RequestId> refused;
  if (job_.has_value() && is_its(job_->request)) refused.push_back(RequestOf(job_->request));
  for (const std::deque<Waiting>* waiting : {&waiting_, &waiting_for_phase_}) {
    for (const Waiting& entry : *waiting) {
      if (is_its(entry.request)) refused.push_back(RequestOf(entry.request));
    }
  }
  for (RequestId request : refused) GiveUp(request, status);
}

// ---- Givers. ----

// Nobody uses the victim any more. It keeps its cells until the bytes that need their place are about to flow.
void DeviceQueue::VictimLetGo() {
  job_->givers.push_back(job_->clearing);
  // Whoever gave up meanwhile evicts nobody.
  if (job_->replied) {
    KeepGivers();
    return Finish();
  }
  if (job_->victims.empty()) return Fill();
  const ModelId next = job_->victims.front();
  job_->victims.erase(job_->victims.begin());
  Clear(next);
}

// The victims so far stay after all.
void DeviceQueue::KeepGivers() {
  for (ModelId giver : std::exchange(job_->givers, {})) {
    Model(giver).Apply(ModelChange::kDeactivationUndone);
    ResendCells(giver);
  }
}

void DeviceQueue::FinishGivers(const PlanRealized& event) {
  for (const GiverEmptied& emptied : event.givers) {
    ModelRecord& giver = Model(emptied.model);
    giver.device_bytes = emptied.device_bytes;
    job_->pooled = true;
    if (emptied.kept) {
      giver.Apply(ModelChange::kDeactivationUndone);
      ResendCells(giver.id);
      continue;
    }
    if (emptied.status.ok()) {
      TakenOff(giver);
      job_->evicted.push_back(giver.name);
      continue;
    }
    giver.last_error = emptied.status;
    giver.Apply(emptied.broken ? ModelChange::kBroke : ModelChange::kDeactivationUndone);
    ResendCells(giver.id);
  }
}

// A client that had begun to let a victim's cells go has not come to the end of it.
void DeviceQueue::StopHinderedFill() {
  std::vector<LeaseId> holders;
  std::string names;
  for (ModelId giver : job_->givers) {
    const size_t before = holders.size();
    for (const LeaseRecord* lease : records_.LeasesOf(giver)) {
      if (lease->holds_cells()) holders.push_back(lease->id);
    }
    if (holders.size() > before) absl::StrAppend(&names, names.empty() ? "" : ", ", Model(giver).name);
  }
  if (holders.empty()) return;
  ReplyNow(records_.InUse(names, holders, context_.now));
  std::get<ActivateRequested>(job_->request).session = SessionId{};
  EndUnclaimed();
  if (!std::exchange(job_->stopped, true)) Emit(CancelRealize{job_->model});
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/records.h"

#include <utility>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"

namespace residency {

void ModelRecord::Apply(ModelChange change) {
  const std::optional<ModelState> next = NextState(state, change);
  ABSL_RAW_CHECK(next.has_value(), "a model's state took a change that the table does not have");
  state = *next;
}

namespace {

// Adds up `bytes` of one model of each host copy.
template <typename Bytes>
uint64_t SumOfCopies(const std::map<ModelId, ModelRecord>& models, Bytes bytes) {
  std::set<HostCopyId> counted;
  uint64_t sum = 0;
  for (const auto& [id, model] : models) {
    if (const uint64_t own = bytes(model); own > 0 && counted.insert(model.host_copy).second) sum += own;
  }
  return sum;
}

}  // namespace

uint64_t Records::host_bytes() const {
  return SumOfCopies(models, [](const ModelRecord& model) { return model.host_bytes; });
}

uint64_t Records::pinned_bytes() const {
  return SumOfCopies(models, [](const ModelRecord& model) { return model.pinned_bytes; });
}

uint64_t Records::pageable_bytes() const {
  return SumOfCopies(models, [](const ModelRecord& model) {
    const bool complete = !model.reading && model.failed.ok();
    return !complete || model.pin.pinned ? 0 : model.host_bytes;
  });
}

uint64_t Records::file_bytes() const {
  return SumOfCopies(models,
                     [](const ModelRecord& model) { return model.tier == HostTier::kFile ? model.host_bytes : 0; });
}

uint64_t Records::page_cache_bytes() const {
  return SumOfCopies(models,
                     [](const ModelRecord& model) { return model.tier == HostTier::kFile ? model.pinned_bytes : 0; });
}

absl::Status LeaseIsOver(LeaseId lease) {
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_LEASE", absl::StrCat("lease ", lease.value, " is over"));
}

absl::Status IsBroken(const ModelRecord& model) {
  return Refuse(absl::StatusCode::kFailedPrecondition, "BROKEN",
                absl::StrCat(model.name, " is broken, unload it: ", std::string(model.last_error.message())));
}

const ModelRecord* Records::FindModel(std::string_view name) const {
  for (const auto& [id, model] : models) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

ModelRecord* Records::FindModel(std::string_view name) {
  return const_cast<ModelRecord*>(std::as_const(*this).FindModel(name));
}

absl::StatusOr<ModelRecord*> Records::GetModel(std::string_view name) {
  if (ModelRecord* model = FindModel(name)) return model;
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_MODEL",
                absl::StrCat("no model is registered as '", std::string(name), "'"));
}

std::vector<LeaseRecord*> Records::LeasesOf(ModelId model) {
  std::vector<LeaseRecord*> found;
  for (auto& [id, lease] : leases) {
    if (lease.model == model) found.push_back(&lease);
  }
  return found;
}

bool Records::WantsCells(const LeaseRecord& lease) const {
  const ModelRecord& model = models.at(lease.model);
  return lease.state == LeaseState::kRevoked && !lease.ending() && model.state == ModelState::kActive &&
         (model.mode == ModelMode::kHeld || lease.phase);
}

bool Records::IsInPhase(ModelId model, LeaseId except) const {
  for (const auto& [id, lease] : leases) {
    if (lease.model == model && id != except && lease.phase) return true;
  }
  return false;
}

LeaseRecord* Records::FindLease(SessionId session, ModelId model) {
  for (auto& [id, lease] : leases) {
    if (lease.session == session && lease.model == model && !lease.ending()) return &lease;
  }
  return nullptr;
}

Holder Records::HolderOf(const LeaseRecord& lease, absl::Time now) const {
  Holder holder{.lease_id = lease.id.value, .age_seconds = absl::ToDoubleSeconds(now - lease.since)};
  if (const auto session = sessions.find(lease.session); session != sessions.end()) {
    holder.pid = session->second.pid;
    holder.uid = session->second.uid;
    holder.client = session->second.client;
  }
  return holder;
}

absl::Status Records::InUse(std::string_view model, const std::vector<LeaseId>& in_use, absl::Time now) const {
  Refusal refusal{.reason = "IN_USE"};
  std::string who;
  for (LeaseId id : in_use) {
    const auto lease = leases.find(id);
    if (lease == leases.end()) continue;
    refusal.holders.push_back(HolderOf(lease->second, now));
    const Holder& holder = refusal.holders.back();
    absl::StrAppend(&who, who.empty() ? "" : ", ", "pid ", holder.pid, " (", holder.client, ", lease ", holder.lease_id,
                    ", ", static_cast<int64_t>(holder.age_seconds), " s old)");
  }
  return Refuse(absl::StatusCode::kFailedPrecondition, std::move(refusal),
                absl::StrCat(std::string(model), " is in use by ", who.empty() ? "a lease that just ended" : who));
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/status.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "daemon/device_shares.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

v1::ModelState StateOf(ModelState state) {
  switch (state) {
    case ModelState::kRegistering:
      return v1::MODEL_STATE_REGISTERING;
    case ModelState::kInactive:
      return v1::MODEL_STATE_INACTIVE;
    case ModelState::kActivating:
      return v1::MODEL_STATE_ACTIVATING;
    case ModelState::kActive:
      return v1::MODEL_STATE_ACTIVE;
    case ModelState::kDeactivating:
      return v1::MODEL_STATE_DEACTIVATING;
    case ModelState::kBroken:
      return v1::MODEL_STATE_BROKEN;
    case ModelState::kUnloaded:
      break;  // such a model is in no record
  }
  return v1::MODEL_STATE_UNSPECIFIED;
}

v1::LeaseState StateOf(LeaseState state) {
  switch (state) {
    case LeaseState::kFilling:
    case LeaseState::kGranting:
      return v1::LEASE_STATE_GRANTING;
    case LeaseState::kLive:
      return v1::LEASE_STATE_LIVE;
    case LeaseState::kRevoking:
    case LeaseState::kReleasing:
      return v1::LEASE_STATE_REVOKING;
    case LeaseState::kRevoked:
      return v1::LEASE_STATE_REVOKED;
    case LeaseState::kUnresponsive:
      return v1::LEASE_STATE_UNRESPONSIVE;
  }
  return v1::LEASE_STATE_UNSPECIFIED;
}

// Shows the processes on a device, and sums them up as the daemon, its clients, and others.
MeasuredMemory::Processes AddProcesses(const std::vector<ProcessOnGpu>& processes, const Records& records,
                                       v1::DeviceStatus& status) {
  std::map<int64_t, std::string> clients;
  for (const auto& [id, session] : records.sessions) clients.emplace(session.pid, session.client);
  MeasuredMemory::Processes sums;
  for (const ProcessOnGpu& process : processes) {
    const auto client = clients.find(process.pid);
    v1::ProcessStatus& shown = *status.add_processes();
    shown.set_pid(process.pid);
    if (process.uid.has_value()) shown.set_uid(*process.uid);
    shown.set_bytes(process.bytes);
    if (process.is_daemon) {
      shown.set_client("residencyd");
      sums.daemon_bytes += process.bytes;
    } else if (client != clients.end()) {
      shown.set_client(client->second);
      sums.clients_bytes += process.bytes;
    }
  }
  return sums;
}

v1::LeaseStatus LeaseStatusOf(const LeaseRecord& lease, const GpuMeasurement& measured, const Records& records,
                              const LeaseProbe& probe, absl::Time now) {
  const Holder holder = records.HolderOf(lease, now);
  v1::LeaseStatus status;
  status.set_id(lease.id.value);
  status.set_pid(holder.pid);
  status.set_uid(holder.uid);
  status.set_client(holder.client);
  status.set_in_use(probe.in_use(lease.id));
  status.set_claimed_mapped_bytes(probe.mapped_bytes(lease.id));
  status.set_working_bytes(lease.working_bytes);
  if (measured.processes.ok()) {
    for (const ProcessOnGpu& process : *measured.processes) {
      if (process.pid == holder.pid) status.set_measured_bytes(process.bytes);
    }
  }
  status.set_age_seconds(holder.age_seconds);
  status.set_state(StateOf(lease.state));
  const ModelRecord& model = records.models.at(lease.model);
  if (lease.phase && model.component_on_gpu.has_value()) {
    status.set_phase(model.layout.components[*model.component_on_gpu].name);
  }
  return status;
}

v1::PinReason PinReasonProto(PinReason reason) {
  switch (reason) {
    case PinReason::kRequested:
      return v1::PIN_REASON_REQUESTED;
    case PinReason::kRoom:
      return v1::PIN_REASON_ROOM;
    case PinReason::kLittleRoom:
      return v1::PIN_REASON_LITTLE_ROOM;
    case PinReason::kRefused:
      return v1::PIN_REASON_REFUSED;
    case PinReason::kShared:
      return v1::PIN_REASON_SHARED;
    case PinReason::kHostTier:
      return v1::PIN_REASON_HOST_TIER;
  }
  return v1::PIN_REASON_UNSPECIFIED;
}

}  // namespace

v1::Pin PinProto(const PinOutcome& pin) {
  v1::Pin proto;
  proto.set_pinned(pin.pinned);
  proto.set_reason(PinReasonProto(pin.reason));
  proto.set_message(pin.message);
  return proto;
}

v1::HostTier HostTierProto(HostTier tier) {
  return tier == HostTier::kFile ? v1::HOST_TIER_FILE : v1::HOST_TIER_MIRROR;
}

v1::VerifiedAgainst VerifiedAgainstProto(HostTier tier) {
  return tier == HostTier::kFile ? v1::VERIFIED_AGAINST_FIRST_ACTIVATION : v1::VERIFIED_AGAINST_REGISTRATION;
}

void SetPinLimit(v1::HostStatus& host, std::optional<uint64_t> probed_bytes, std::optional<uint64_t> configured_bytes,
                 std::optional<uint64_t> cgroup_bytes) {
  const auto offer = [&host](std::optional<uint64_t> bytes, v1::PinLimitSource source) {
    if (!bytes.has_value() || (host.has_pin_limit_bytes() && host.pin_limit_bytes() <= *bytes)) return;
    host.set_pin_limit_bytes(*bytes);
    host.set_pin_limit_source(source);
  };
  offer(probed_bytes, v1::PIN_LIMIT_SOURCE_PROBED);
  offer(configured_bytes, v1::PIN_LIMIT_SOURCE_CONFIGURED);
  offer(cgroup_bytes, v1::PIN_LIMIT_SOURCE_CGROUP);
}

v1::DeviceStatus DeviceStatusOf(const DeviceInfo& info, const DeviceRecord& record, const GpuMeasurement& measured,
                                const Records& records) {
  v1::DeviceStatus status;
  status.set_uuid(info.uuid);
  status.set_name(info.name);
  status.set_state(ReasonOf(measured.status) == "DEVICE_LOST" ? v1::DEVICE_STATE_LOST : v1::DEVICE_STATE_ONLINE);
  status.set_budget_bytes(record.budget_bytes);
  status.set_reserve_bytes(record.reserve_bytes);
  MeasuredMemory memory{.pool_idle_bytes = measured.pool_idle_bytes,
                        .broker_bytes = measured.broker_bytes,
                        .free_bytes = measured.memory.free_bytes,
                        .total_bytes = measured.memory.total_bytes};
  if (measured.processes.ok()) {
    memory.processes = AddProcesses(*measured.processes, records, status);
  } else {
    status.set_not_measured(std::string(measured.processes.status().message()));
  }
  const DeviceShares shares = ShareOut(memory);
  status.set_total_bytes(measured.memory.total_bytes);
  status.set_free_bytes(shares.free_bytes);
  status.set_broker_bytes(shares.broker_bytes);
  status.set_pool_idle_bytes(shares.pool_idle_bytes);
  if (shares.contexts_bytes.has_value()) status.set_contexts_bytes(*shares.contexts_bytes);
  status.set_others_bytes(shares.others_bytes);
  uint64_t working_bytes = 0;
  for (const auto& [id, lease] : records.leases) {
    if (records.models.at(lease.model).device == record.id) working_bytes += lease.working_bytes;
  }
  status.set_working_bytes(working_bytes);
  status.set_measured_in_microseconds(absl::ToDoubleMicroseconds(measured.duration));
  return status;
}

v1::ModelStatus ModelStatusOf(const ModelRecord& record, const Layout& layout, const GpuMeasurement& measured,
                              const Records& records, const LeaseProbe& probe, absl::Time now) {
  v1::ModelStatus status;
  status.set_name(record.name);
  status.set_state(StateOf(record.state));
  status.set_mode(record.mode == ModelMode::kPhased ? v1::MODEL_MODE_PHASED : v1::MODEL_MODE_HELD);
  status.set_generation(record.generation);
  status.set_payload_bytes(layout.payload_bytes);
  status.set_tax_bytes(layout.tax_bytes());
  status.set_pinned_bytes(record.pinned_bytes);
  status.set_host_tier(HostTierProto(record.tier));
  status.set_verified_against(VerifiedAgainstProto(record.tier));
  if (record.state != ModelState::kRegistering) *status.mutable_pin() = PinProto(record.pin);
  v1::Budget& budget = *status.mutable_budget();
  constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();
  const uint64_t device_bytes =
      std::min(record.budget.device_bytes.value_or(kNoLimit), record.asked_device_bytes.value_or(kNoLimit));
  if (device_bytes != kNoLimit) budget.set_device_bytes(device_bytes);
  if (record.budget.host_bytes.has_value()) budget.set_host_bytes(*record.budget.host_bytes);
  status.set_claimed_device_bytes(record.claimed_device_bytes);
  const auto found = measured.models.find(record.id);
  const Footprint footprint = found == measured.models.end() ? Footprint{} : found->second;
  status.set_device_bytes(footprint.device_bytes);
  for (size_t i = 0; i < layout.components.size(); ++i) {
    const LayoutComponent& component = layout.components[i];
    const Footprint::Component there =
        i < footprint.components.size() ? footprint.components[i] : Footprint::Component{};
    v1::ComponentStatus& shown = *status.add_components();
    shown.set_name(component.name);
    shown.set_tensors(component.tensors.size());
    shown.set_payload_bytes(component.payload_bytes);
    shown.set_cells(component.cell_count);
    shown.set_cells_on_gpu(there.cells_on_gpu);
    shown.set_device_bytes(there.device_bytes);
    // A component without a byte has no cell that could be there.
    if (there.cells_on_gpu == 0) continue;
    if (there.cells_on_gpu == component.cell_count) {
      status.set_components_on_gpu(status.components_on_gpu() + 1);
    } else {
      status.set_components_partly_on_gpu(status.components_partly_on_gpu() + 1);
    }
  }
  for (const auto& [id, lease] : records.leases) {
    if (lease.model == record.id) *status.add_leases() = LeaseStatusOf(lease, measured, records, probe, now);
  }
  if (record.last_activation.has_value()) {
    v1::Activation& activation = *status.mutable_last_activation();
    activation.set_bytes(record.last_activation->bytes);
    activation.set_seconds(absl::ToDoubleSeconds(record.last_activation->duration));
    activation.set_verified(record.last_activation->verified_cells);
    activation.set_trusted(record.last_activation->trusted_cells);
  }
  if (!record.last_error.ok()) {
    v1::LastError& error = *status.mutable_last_error();
    error.set_code(absl::StatusCodeToString(record.last_error.code()));
    error.set_reason(ReasonOf(record.last_error));
    error.set_message(std::string(record.last_error.message()));
  }
  return status;
}

}  // namespace residency

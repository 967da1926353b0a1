// SPDX-License-Identifier: Apache-2.0
//
// What the broker tells of itself: a model's layout, the status as measured now, and who is told of changes.
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/broker.h"
#include "daemon/status.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

void SetHostNodes(v1::ModelStatus& model, const BuiltMirrors& built) {
  for (const auto& [node, bytes] : built.node_bytes) {
    v1::NodeBytes& shown = *model.add_host_nodes();
    shown.set_node(node);
    shown.set_bytes(bytes);
  }
  if (!built.placed.ok()) model.set_host_not_placed(std::string(built.placed.message()));
}

}  // namespace

absl::StatusOr<Broker::ModelView> Broker::Find(const std::string& name) const {
  if (!ending_.ok()) return ending_;
  const ModelRecord* const record = arbiter_.records().FindModel(name);
  if (record != nullptr && models_.contains(record->id)) return ViewOf(record->id);
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_MODEL", absl::StrCat("no model is registered as '", name, "'"));
}

Broker::ModelView Broker::ViewOf(ModelId id) const {
  const LoadedModel& model = *models_.at(id);
  return {model.checkpoint.layout, gpus_[model.device.value - 1]->device().info().uuid, model.checkpoint.layout.digest,
          arbiter_.records().models.at(id).mode, arbiter_.records().models.at(id).tier};
}

void Broker::GetStatus(const std::string& model, std::function<void(absl::StatusOr<v1::Status>)> done) {
  // Not at once: whoever is told of a change may ask, and forget itself when it hears this.
  if (!ending_.ok()) return loop_.Post([this, done = std::move(done)] { done(ending_); });
  struct Gathering {
    std::vector<GpuMeasurement> measured;
    size_t missing;
    std::function<void(absl::StatusOr<v1::Status>)> done;
  };
  auto gathering = std::make_shared<Gathering>();
  gathering->measured.resize(gpus_.size());
  gathering->missing = gpus_.size();
  gathering->done = std::move(done);
  for (size_t i = 0; i < gpus_.size(); ++i) {
    gpus_[i]->Measure([this, i, gathering, model](const GpuMeasurement& measurement) {
      gathering->measured[i] = measurement;
      if (--gathering->missing > 0) return;
      if (!ending_.ok()) return gathering->done(ending_);
      if (!model.empty()) {
        if (const auto found = Find(model); !found.ok()) return gathering->done(found.status());
      }
      gathering->done(BuildStatus(model, gathering->measured));
    });
  }
}

v1::Status Broker::BuildStatus(const std::string& model, const std::vector<GpuMeasurement>& measured) {
  const absl::Time now = MonotonicNow();
  v1::Status status;
  v1::DaemonStatus& daemon = *status.mutable_daemon();
  daemon.set_version(options_.version);
  daemon.set_pid(getpid());
  daemon.set_epoch(options_.identity.epoch);
  daemon.set_driver(options_.identity.driver);
  daemon.set_serving(ending_.ok());
  daemon.set_uptime_seconds(absl::ToDoubleSeconds(now - started_));
  const auto oldest = arbiter_.oldest_transition();
  daemon.set_oldest_transition_seconds(oldest.has_value() ? absl::ToDoubleSeconds(now - *oldest) : 0);
  const Records& records = arbiter_.records();
  SetHostStatus(*status.mutable_host());
  for (const auto& gpu : gpus_) {
    v1::DeviceStatus& device = *status.add_devices();
    device =
        DeviceStatusOf(gpu->device().info(), records.devices.at(gpu->id()), measured[gpu->id().value - 1], records);
    if (gpu->numa_node().has_value()) device.set_numa_node(*gpu->numa_node());
  }
  const LeaseProbe probe{[this](LeaseId lease) { return IsInUse(lease); },
                         [this](LeaseId lease) { return sessions_.mapped_bytes(lease); }};
  for (const auto& [id, record] : records.models) {
    if ((!model.empty() && record.name != model) || !models_.contains(id)) continue;
    const LoadedModel& loaded = *models_.at(id);
    const GpuMeasurement& measurement = measured[record.device.value - 1];
    v1::ModelStatus& shown = *status.add_models();
    shown = ModelStatusOf(record, loaded.checkpoint.layout, measurement, records, probe, now);
    shown.set_device_uuid(records.devices.at(record.device).uuid);
    shown.set_epoch(options_.identity.epoch);
    if (const auto copy = copies_.find(loaded.copy); copy != copies_.end()) SetHostNodes(shown, copy->second->built);
    if (record.reading) shown.set_pinned_bytes(loaded.loaded_pinned_bytes);
    if (record.reading && loaded.checkpoint.layout.payload_bytes > 0) {
      shown.set_progress(static_cast<double>(loaded.loaded_bytes) /
                         static_cast<double>(loaded.checkpoint.layout.payload_bytes));
    }
  }
  std::sort(status.mutable_models()->begin(), status.mutable_models()->end(),
            [](const v1::ModelStatus& a, const v1::ModelStatus& b) { return a.name() < b.name(); });
  return status;
}

uint64_t Broker::Watch(std::function<void()> changed) {
  const uint64_t watcher = next_watcher_++;
  watchers_.emplace(watcher, std::move(changed));
  return watcher;
}

void Broker::Unwatch(uint64_t watcher) { watchers_.erase(watcher); }

void Broker::Changed() {
  for (const auto& [watcher, changed] : watchers_) changed();
}

}  // namespace residency

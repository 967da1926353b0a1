// SPDX-License-Identifier: Apache-2.0
//
// The broker's host side: what a registration asks of the core, the copies that models of the same files share, and
// what the host has.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/broker.h"
#include "daemon/dry_run.h"
#include "daemon/status.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// What a decision needs of a layout; a model can have a million tensors.
Layout WithoutTensors(const Layout& layout) {
  Layout bare = layout;
  for (LayoutComponent& component : bare.components) component.tensors.clear();
  return bare;
}

}  // namespace

// ---- Before a registration. ----

absl::StatusOr<Gpu*> Broker::FindGpu(const std::string& uuid) const {
  if (uuid.empty()) return gpus_.front().get();
  for (const auto& gpu : gpus_) {
    if (gpu->device().info().uuid == uuid) return gpu.get();
  }
  const std::string known = absl::StrJoin(
      gpus_, ", ", [](std::string* out, const auto& candidate) { out->append(candidate->device().info().uuid); });
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_DEVICE",
                absl::StrCat("no device ", uuid, "; there are: ", known));
}

RegisterRequested Broker::RegisterEvent(RequestId request, const RegisterOptions& options, const Checkpoint& checkpoint,
                                        DeviceId device) const {
  const HostTier tier = options.tier.value_or(options_.tier);
  return {.request = request,
          .name = options.name,
          .identity = checkpoint.identity,
          .device = device,
          .budget = options.budget,
          .layout = WithoutTensors(checkpoint.layout),
          .mode = options.mode,
          .pin = options.pin.value_or(DefaultPin(tier, options_.pin)),
          .host = MeasureHost(),
          .tier = tier,
          .file_bytes = checkpoint.file_bytes};
}

// Asked for each registration, since others use the host too. What readings under way will still take is not missing
// from the system's figures yet. What the host tier file locks never is: the core knows it.
HostRoom Broker::MeasureHost() const {
  const HostMemory memory = host_memory_.Read();
  HostRoom room{.available_bytes = memory.room_bytes(), .cgroup_limit_bytes = memory.mirror_limit_bytes()};
  uint64_t unread_bytes = 0;
  for (const auto& [id, copy] : copies_) {
    if (copy->complete || copy->failed || copy->tier == HostTier::kFile) continue;
    const auto found = models_.find(copy->reader);
    const LoadedModel& model = found != models_.end() ? *found->second : *copy->kept;
    unread_bytes += model.checkpoint.layout.span_bytes - model.loaded_bytes;
  }
  if (room.available_bytes.has_value()) *room.available_bytes -= std::min(*room.available_bytes, unread_bytes);
  return room;
}

void Broker::DryRun(RegisterOptions options, std::function<void(absl::StatusOr<v1::DryRun>)> done) {
  const auto gpu = FindGpu(options.device_uuid);
  if (!gpu.ok()) return done(gpu.status());
  const uint64_t granule_bytes = (*gpu)->device().info().granule_bytes;
  loader_->ReadHeaders(options.source, options.components, granule_bytes,
                       [this, options, gpu = *gpu, done = std::move(done)](absl::StatusOr<Checkpoint> checkpoint) {
                         if (!checkpoint.ok()) return done(checkpoint.status());
                         if (!ending_.ok()) return done(ending_);
                         const RegisterRequested event = RegisterEvent(RequestId{}, options, *checkpoint, gpu->id());
                         absl::Status tier = CheckTier(event);
                         if (tier.ok() && event.tier == HostTier::kFile) tier = CheckReadOnlyPin(gpu->device());
                         if (!tier.ok()) return done(tier);
                         if (const ModelRecord* named = arbiter_.records().FindModel(event.name)) {
                           if (auto taken = CheckSame(*named, event); !taken.ok()) return done(taken);
                         }
                         gpu->Measure([this, event, done](const GpuMeasurement& measured) {
                           NoteLoss(measured.status);
                           if (!ending_.ok()) return done(ending_);
                           if (!measured.status.ok()) return done(measured.status);
                           done(BuildDryRun(event, measured));
                         });
                       });
}

v1::DryRun Broker::BuildDryRun(const RegisterRequested& event, const GpuMeasurement& measured) {
  const Records& records = arbiter_.records();
  const DeviceRecord& device = records.devices.at(event.device);
  DeviceRoom room{.total_bytes = measured.memory.total_bytes,
                  .free_bytes = measured.memory.free_bytes,
                  .pool_idle_bytes = measured.pool_idle_bytes,
                  .broker_bytes = measured.broker_bytes,
                  .budget_bytes = device.budget_bytes,
                  .reserve_bytes = device.reserve_bytes};
  // Models that nobody uses make room for an activation; a phased one that anybody has a lease on keeps its claim.
  for (const auto& [id, record] : records.models) {
    if (record.device != event.device || record.state != ModelState::kActive) continue;
    const bool in_use =
        std::any_of(records.leases.begin(), records.leases.end(), [&, &model = record](const auto& entry) {
          return entry.second.model == model.id && (model.mode == ModelMode::kPhased || IsInUse(entry.first));
        });
    const auto found = measured.models.find(id);
    const uint64_t device_bytes = found == measured.models.end() ? 0 : found->second.device_bytes;
    if (in_use) {
      room.promised_bytes += record.claimed_device_bytes - std::min(record.claimed_device_bytes, device_bytes);
    } else {
      room.pool_idle_bytes += device_bytes;
      room.broker_bytes -= std::min(room.broker_bytes, device_bytes);
    }
  }
  return DryRunOf(event, arbiter_.PlanHost(event), device, room);
}

// ---- Copies. ----

void Broker::Do(const BuildMirrors& effect) {
  auto node = loading_.extract(effect.request);
  // Everybody was refused meanwhile, since the daemon is ending.
  if (node.empty()) return Feed(MirrorsBuilt{effect.model, ending_});
  LoadedModel& model = *(models_[effect.model] = std::move(node.mapped()));
  model.copy = effect.copy;
  model.watching_progress = {effect.request};
  const auto [copy, is_new] = copies_.try_emplace(effect.copy);
  if (is_new) {
    copy->second = std::make_unique<HostCopy>();
    copy->second->reader = effect.model;
    copy->second->tier = effect.tier;
    ReadCopy(effect.copy, effect.pin);
  } else if (copy->second->complete) {
    OnCopyComplete(effect.model);
  }
}

void Broker::ReadCopy(HostCopyId id, PinWish pin) {
  HostCopy& copy = *copies_.at(id);
  const LoadedModel& model = *models_.at(copy.reader);
  const auto pinned_bytes = [this] {
    uint64_t sum = 0;
    for (const auto& gpu : gpus_) sum += gpu->device().registered_host_bytes();
    return sum;
  };
  const auto progress = [this, id](const BuildProgress& made) { OnProgress(id, made); };
  const auto done = [this, id](BuiltMirrors built) { OnMirrors(id, std::move(built)); };
  const Device& device = GpuOf(model.device).device();
  if (copy.tier == HostTier::kFile) {
    loader_->MapFiles(model.checkpoint, device, pinned_bytes, copy.cancelled, progress, done);
    return;
  }
  EarlyFill early;
  if (model.activate && GpuOf(model.device).usable().ok()) {
    copy.flow = std::make_unique<MirrorFlow>(model.checkpoint.layout);
    early = {copy.flow.get(), [this, id] { OnNearlyBuilt(id); }};
  }
  loader_->BuildMirrors(model.checkpoint, device, pin, pinned_bytes, copy.cancelled, progress, early, done);
}

std::vector<ModelId> Broker::ModelsOf(HostCopyId copy) const {
  std::vector<ModelId> models;
  for (const auto& [id, model] : models_) {
    if (model->copy == copy) models.push_back(id);
  }
  return models;
}

void Broker::OnProgress(HostCopyId copy, const BuildProgress& progress) {
  const auto take_in = [&progress](LoadedModel& model) {
    // The thread that page-locks may say what was read a moment after the one that reads has said more.
    model.loaded_bytes = std::max(model.loaded_bytes, progress.read_bytes);
    model.loaded_pinned_bytes = progress.pinned_bytes.value_or(model.loaded_pinned_bytes);
  };
  if (const auto found = copies_.find(copy); found != copies_.end() && found->second->kept != nullptr) {
    take_in(*found->second->kept);
  }
  for (ModelId id : ModelsOf(copy)) {
    LoadedModel& model = *models_.at(id);
    take_in(model);
    for (RequestId request : model.watching_progress) {
      const auto told = progress_.find(request);
      if (told == progress_.end()) continue;
      told->second(model.loaded_bytes, model.checkpoint.layout.payload_bytes, model.loaded_pinned_bytes);
    }
  }
  Changed();
}

// So little is left to be read that the reader's cells may be filled meanwhile, for which it needs its addresses.
void Broker::OnNearlyBuilt(HostCopyId id) {
  HostCopy& copy = *copies_.at(id);
  const auto found = models_.find(copy.reader);
  if (copy.cancelled || found == models_.end()) return;
  LoadedModel& model = *found->second;
  model.addresses = LoadedModel::Addresses::kAsked;
  GpuOf(model.device).AddModel(copy.reader, model.checkpoint.layout, [this, id](absl::Status status) {
    HostCopy& copy = *copies_.at(id);
    LoadedModel& model = *models_.at(copy.reader);
    model.addresses = status.ok() ? LoadedModel::Addresses::kThere : LoadedModel::Addresses::kNone;
    if (status.ok()) {
      Feed(MirrorsNearlyBuilt{copy.reader});
      for (RequestId request : model.watching_progress) {
        if (const auto early = early_.extract(request); !early.empty() && early.mapped()) early.mapped()();
      }
    }
    if (copy.waiting.has_value()) OnMirrors(id, *std::exchange(copy.waiting, std::nullopt));
  });
}

void Broker::OnMirrors(HostCopyId id, BuiltMirrors built) {
  HostCopy& copy = *copies_.at(id);
  const auto reader = models_.find(copy.reader);
  if (reader != models_.end() && reader->second->addresses == LoadedModel::Addresses::kAsked) {
    copy.waiting = std::move(built);
    return;
  }
  if (!built.status.ok()) return OnCopyFailed(id, built);
  copy.built = std::move(built);
  if (copy.flow != nullptr) {
    copy.built.mirrors = copy.flow->TakeMirrors();
    copy.flow->Finish(copy.built.sources());
  }
  copy.complete = true;
  copy.kept.reset();
  copy.pinned_bytes = copy.built.pinned_bytes();
  if (!copy.filling) DiscardFlow(copy);
  for (ModelId model : ModelsOf(id)) OnCopyComplete(model);
}

void Broker::OnCopyFailed(HostCopyId id, const BuiltMirrors& built) {
  const std::vector<ModelId> models = ModelsOf(id);
  HostCopy& copy = *copies_.at(id);
  const auto reader = models_.find(copy.reader);
  copy.failed = reader != models_.end() && reader->second->addresses == LoadedModel::Addresses::kThere;
  // What a fill may be copying from goes when the core has dropped the reader.
  if (!copy.failed) copies_.erase(id);
  for (ModelId model : models) {
    Feed(MirrorsBuilt{model, built.status, 0, built.pin_refusal, built.pin_limit_bytes});
    if (!arbiter_.records().models.contains(model)) models_.erase(model);
  }
}

void Broker::BeginFill(ModelId model) {
  HostCopy& copy = *copies_.at(models_.at(model)->copy);
  copy.filling |= copy.reader == model && !copy.complete;
}

void Broker::EndFill(ModelId model) {
  HostCopy& copy = *copies_.at(models_.at(model)->copy);
  if (copy.reader != model) return;
  copy.filling = false;
  if (copy.complete) DiscardFlow(copy);
}

// Unlocking what it may have kept takes long for a large model.
void Broker::DiscardFlow(HostCopy& copy) {
  if (copy.flow != nullptr) loader_->Discard(std::move(copy.flow), [] {});
}

// The model has its host copy; what is left is its addresses.
void Broker::OnCopyComplete(ModelId id) {
  LoadedModel& model = *models_.at(id);
  model.loaded_bytes = model.checkpoint.layout.payload_bytes;
  HostCopy& copy = *copies_.at(model.copy);
  // The refusal's figure is news once; by the next model that shares the copy it may be an old one.
  MirrorsBuilt event{id, absl::OkStatus(), copy.pinned_bytes, copy.built.pin_refusal,
                     std::exchange(copy.built.pin_limit_bytes, std::nullopt)};
  Gpu& gpu = GpuOf(model.device);
  // A model may be registered for a GPU that cannot map memory; only its activation is refused.
  if (!gpu.usable().ok() || model.addresses == LoadedModel::Addresses::kThere) return Feed(event);
  gpu.AddModel(id, model.checkpoint.layout, [this, event](absl::Status status) mutable {
    event.status = status;
    if (!status.ok()) {
      event.pinned_bytes = 0;
      auto node = models_.extract(event.model);
      if (auto copy = TakeUnused(node.mapped()->copy)) loader_->Discard(std::move(copy), [] {});
    }
    Feed(event);
  });
}

// The copy, where no model has it any more.
std::unique_ptr<Broker::HostCopy> Broker::TakeUnused(HostCopyId id) {
  if (!ModelsOf(id).empty()) return nullptr;
  auto node = copies_.extract(id);
  return node.empty() ? nullptr : std::move(node.mapped());
}

void Broker::Do(const CancelMirrors& effect) {
  const auto found = models_.find(effect.model);
  if (found == models_.end()) return;
  const HostCopyId id = found->second->copy;
  const auto reading = copies_.find(id);
  if (reading == copies_.end() || reading->second->complete) return;  // too late: MirrorsBuilt is coming
  HostCopy& copy = *reading->second;
  if (ModelsOf(id).size() == 1) {
    copy.cancelled = true;
    return;
  }
  // Nearly done, and perhaps being filled: MirrorsBuilt will come.
  if (found->second->addresses != LoadedModel::Addresses::kNone) return;
  // Others still want the copy; this model leaves them alone with it.
  auto node = models_.extract(found);
  if (copy.reader == effect.model) copy.kept = std::move(node.mapped());
  Feed(MirrorsBuilt{effect.model, Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the registration was given up")});
}

void Broker::Do(const JoinMirrors& effect) {
  // Where the daemon is ending, the reading that it joins may not even have begun.
  const auto model = models_.find(effect.model);
  if (model != models_.end()) model->second->watching_progress.push_back(effect.request);
}

void Broker::Do(const DropModel& effect) {
  GpuOf(models_.at(effect.model)->device).RemoveModel(effect.model, [this, id = effect.model](uint64_t device_bytes) {
    auto node = models_.extract(id);
    auto copy = TakeUnused(node.mapped()->copy);
    const uint64_t host_bytes = copy != nullptr ? copy->built.host_bytes() : 0;
    // Giving page-locked memory back takes long for a large model.
    using Gone = std::pair<std::unique_ptr<LoadedModel>, std::unique_ptr<HostCopy>>;
    loader_->Discard(std::make_unique<Gone>(std::move(node.mapped()), std::move(copy)),
                     [this, id, host_bytes, device_bytes] {
                       Feed(ModelDropped{id, host_bytes, device_bytes});
                     });
  });
}

// ---- Status. ----

void Broker::SetHostStatus(v1::HostStatus& host) const {
  const Records& records = arbiter_.records();
  const HostRoom room = MeasureHost();
  const auto budget_bytes = HostBudgetBytes(room, records, options_.host_budget_bytes);
  if (budget_bytes.has_value()) host.set_budget_bytes(*budget_bytes);
  host.set_pinned_bytes(records.pinned_bytes());
  host.set_pageable_bytes(records.pageable_bytes());
  host.set_page_cache_bytes(records.page_cache_bytes());
  SetPinLimit(host, records.pin_limit_bytes, options_.host_budget_bytes, room.cgroup_limit_bytes);
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/broker.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

ArbiterOptions ArbiterOptionsOf(const BrokerOptions& options, const std::vector<std::unique_ptr<Gpu>>& gpus) {
  ArbiterOptions arbiter{.host_budget_bytes = options.host_budget_bytes, .pool_idle = options.pool_idle};
  for (const auto& gpu : gpus) {
    const DeviceInfo& info = gpu->device().info();
    arbiter.devices.push_back({.id = gpu->id(),
                               .uuid = info.uuid,
                               .budget_bytes = options.device_budget_bytes.value_or(info.total_bytes),
                               .reserve_bytes = options.device_reserve_bytes,
                               .usable = gpu->usable()});
  }
  return arbiter;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Broker>> Broker::Start(Loop& loop, const Driver& driver, BrokerOptions options) {
  const auto count = Device::Count(driver);
  if (!count.ok()) return count.status();
  if (*count == 0) return Refuse(absl::StatusCode::kUnavailable, "NO_DEVICE", "the driver shows no GPU");
  std::vector<std::unique_ptr<Gpu>> gpus;
  for (int ordinal = 0; ordinal < *count; ++ordinal) {
    auto gpu = Gpu::Open(driver, options.nvml, ordinal, DeviceId{static_cast<uint64_t>(ordinal) + 1}, loop);
    if (!gpu.ok()) return gpu.status();
    const DeviceInfo& info = (*gpu)->device().info();
    spdlog::info("device {} ({}): {} bytes, {}", info.uuid, info.name, info.total_bytes,
                 (*gpu)->usable().ok() ? "usable" : std::string((*gpu)->usable().message()));
    gpus.push_back(*std::move(gpu));
  }
  auto loader = Loader::Start(loop, options.cell_bytes);
  if (!loader.ok()) return loader.status();
  std::unique_ptr<Recorder> recorder;
  if (!options.record_path.empty()) {
    auto created = Recorder::Create(options.record_path, options.version, ArbiterOptionsOf(options, gpus));
    if (!created.ok()) return created.status();
    recorder = *std::move(created);
  }
  return std::unique_ptr<Broker>(
      new Broker(loop, std::move(options), std::move(gpus), *std::move(loader), std::move(recorder)));
}

Broker::Broker(Loop& loop, BrokerOptions options, std::vector<std::unique_ptr<Gpu>> gpus,
               std::unique_ptr<Loader> loader, std::unique_ptr<Recorder> recorder)
    : loop_(loop),
      options_(std::move(options)),
      started_(MonotonicNow()),
      gpus_(std::move(gpus)),
      arbiter_(ArbiterOptionsOf(options_, gpus_)),
      recorder_(std::move(recorder)),
      sessions_(loop, options_.identity, [this](const Event& event) { Feed(event); }),
      loader_(std::move(loader)) {
  for (auto& gpu : gpus_) gpu->OnLost([this](const absl::Status& status) { NoteLoss(status); });
}

Broker::~Broker() {
  for (auto& [id, copy] : copies_) copy->cancelled = true;
  // One may wait for bytes that nobody passes on any more.
  for (const auto& gpu : gpus_) gpu->End();
  loader_.reset();
  // Arenas first, since they copy from mirrors; devices last, since mirrors are page-locked for them.
  for (auto& gpu : gpus_) gpu->Stop();
  models_.clear();
  copies_.clear();
}

// ---- Requests. ----

RequestId Broker::Expect(Done done) {
  const RequestId id{next_request_++};
  done_.emplace(id, std::move(done));
  return id;
}

// A daemon that is ending begins nothing new.
RequestId Broker::Ask(RequestId request, const Event& event) {
  if (!ending_.ok()) {
    Answer({request, ending_, {}});
  } else {
    Feed(event);
  }
  return request;
}

void Broker::Answer(const Reply& reply) {
  auto node = done_.extract(reply.request);
  progress_.erase(reply.request);
  early_.erase(reply.request);
  // The core agreed, or refused: in either case nothing waits for it any more.
  loading_.erase(reply.request);
  NoteLoss(reply.status);
  if (node.empty()) return;
  // What was done on a GPU that is lost meanwhile is not there any more.
  const bool lost = ReasonOf(ending_) == "DEVICE_LOST";
  node.mapped()(lost ? Reply{reply.request, ending_, {}} : reply);
}

void Broker::NoteLoss(const absl::Status& status) {
  if (ReasonOf(status) != "DEVICE_LOST" || ReasonOf(ending_) == "DEVICE_LOST") return;
  spdlog::critical("a GPU's context is lost: {}", status.ToString());
  ending_ = status;
  RefuseWaiting();
  Changed();
  if (lost_) lost_(status);
}

void Broker::RefuseWaiting() {
  std::vector<RequestId> waiting;
  for (const auto& [request, done] : done_) waiting.push_back(request);
  for (RequestId request : waiting) Answer({request, ending_, {}});
}

RequestId Broker::Register(RegisterOptions options, Progress progress, std::function<void()> early, Done done) {
  const RequestId request = Expect(std::move(done));
  progress_.emplace(request, std::move(progress));
  if (options.activate) early_.emplace(request, std::move(early));
  const auto gpu = FindGpu(options.device_uuid);
  if (!gpu.ok()) {
    Answer({request, gpu.status(), {}});
    return request;
  }
  const uint64_t granule_bytes = (*gpu)->device().info().granule_bytes;
  loader_->ReadHeaders(options.source, options.components, granule_bytes,
                       [this, request, options, device = (*gpu)->id()](absl::StatusOr<Checkpoint> checkpoint) {
                         // The caller may have gone away while the headers were read.
                         if (!done_.contains(request)) return;
                         if (!checkpoint.ok()) return Answer({request, checkpoint.status(), {}});
                         auto model = std::make_unique<LoadedModel>();
                         model->checkpoint = *std::move(checkpoint);
                         model->device = device;
                         model->activate = options.activate && options.mode == ModelMode::kHeld;
                         const RegisterRequested event = RegisterEvent(request, options, model->checkpoint, device);
                         loading_.emplace(request, std::move(model));
                         Ask(request, event);
                       });
  return request;
}

RequestId Broker::Unload(const std::string& name, Done done) {
  const RequestId request = Expect(std::move(done));
  return Ask(request, UnloadRequested{request, name});
}

RequestId Broker::Activate(ActivateRequested event, Done done) {
  event.request = Expect(std::move(done));
  return Ask(event.request, event);
}

RequestId Broker::Deactivate(const std::string& name, absl::Duration drain, Done done) {
  const RequestId request = Expect(std::move(done));
  return Ask(request, DeactivateRequested{request, name, drain});
}

RequestId Broker::Verify(const std::string& name, Done done) {
  const RequestId request = Expect(std::move(done));
  return Ask(request, VerifyRequested{request, name});
}

RequestId Broker::ReleaseLease(SessionId session, LeaseId lease, Done done) {
  const RequestId request = Expect(std::move(done));
  return Ask(request, ReleaseLeaseRequested{request, session, lease});
}

RequestId Broker::BeginPhase(BeginPhaseRequested event, Done done) {
  event.request = Expect(std::move(done));
  return Ask(event.request, event);
}

RequestId Broker::EndPhase(EndPhaseRequested event, Done done) {
  event.request = Expect(std::move(done));
  return Ask(event.request, event);
}

void Broker::Trim(const std::string& device_uuid, std::function<void(absl::StatusOr<v1::TrimResponse>)> done) {
  struct Gathering {
    v1::TrimResponse response;
    absl::Status status;
    size_t missing = 0;
  };
  std::vector<Gpu*> gpus;
  if (device_uuid.empty()) {
    for (const auto& gpu : gpus_) gpus.push_back(gpu.get());
  } else {
    const auto gpu = FindGpu(device_uuid);
    if (!gpu.ok()) return done(gpu.status());
    gpus.push_back(*gpu);
  }
  auto gathering = std::make_shared<Gathering>();
  gathering->missing = gpus.size();
  for (Gpu* gpu : gpus) gathering->response.add_devices()->set_device_uuid(gpu->device().info().uuid);
  for (int i = 0; i < static_cast<int>(gpus.size()); ++i) {
    const RequestId request = Expect([gathering, i, done](const Reply& reply) {
      gathering->status.Update(reply.status);
      if (const auto* outcome = std::get_if<TrimOutcome>(&reply.outcome)) {
        v1::TrimmedDevice& device = *gathering->response.mutable_devices(i);
        device.set_trimmed_bytes(outcome->trimmed_bytes);
        device.set_freed_bytes(outcome->freed_bytes);
      }
      if (--gathering->missing > 0) return;
      if (!gathering->status.ok()) return done(gathering->status);
      done(std::move(gathering->response));
    });
    Ask(request, TrimRequested{request, gpus[i]->id()});
  }
}

void Broker::Cancel(RequestId request) {
  if (!done_.contains(request)) return;
  Feed(RequestCancelled{request});
  // A registration whose headers are still being read is not known to the core yet.
  if (progress_.contains(request)) {
    Answer({request, Refuse(absl::StatusCode::kCancelled, "CANCELLED", "the caller has gone away"), {}});
  }
}

void Broker::ShutDown() {
  if (ending_.ok()) {
    ending_ = Refuse(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the daemon is shutting down");
  }
  // Nobody will see what is on its way to a GPU, and the end need not wait for it.
  for (const auto& gpu : gpus_) gpu->End();
  RefuseWaiting();
}

// ---- The core. ----

void Broker::Feed(const Event& event) {
  events_.push_back(event);
  if (std::exchange(feeding_, true)) return;
  while (!events_.empty()) {
    const Event next = std::move(events_.front());
    events_.pop_front();
    const absl::Time now = MonotonicNow();
    if (recorder_ != nullptr) recorder_->Begin(next, now);
    const std::vector<Effect> effects = arbiter_.Step(next, now);
    if (recorder_ != nullptr) recorder_->End(effects);
    for (const Effect& effect : effects) std::visit([this](const auto& e) { Do(e); }, effect);
  }
  feeding_ = false;
  Changed();
}

void Broker::Do(const MeasureDevice& effect) {
  GpuOf(effect.device).MeasureInOrder([this, device = effect.device](const GpuMeasurement& measured) {
    DeviceMeasured event{.device = device,
                         .status = measured.status,
                         .total_bytes = measured.memory.total_bytes,
                         .free_bytes = measured.memory.free_bytes,
                         .pool_idle_bytes = measured.pool_idle_bytes,
                         .broker_bytes = measured.broker_bytes};
    for (const auto& [id, lease] : arbiter_.records().leases) {
      if (arbiter_.records().models.at(lease.model).device == device && IsInUse(id)) event.leases_in_use.push_back(id);
    }
    Feed(event);
  });
}

void Broker::Do(const RealizePlan& effect) {
  std::vector<Giver> givers;
  for (ModelId giver : effect.givers) {
    const auto held = std::make_shared<HeldCells>();
    for (const auto& [id, lease] : arbiter_.records().leases) {
      if (lease.model == giver && lease.holds_cells()) sessions_.ShowHeld(id, held);
    }
    givers.push_back({.model = giver, .sources = SourcesOf(giver), .held = held});
  }
  const LoadedModel& model = *models_.at(effect.model);
  for (const CellReader& reader : effect.readers) sessions_.BeginCells(reader.lease, reader.generation);
  std::function<void(std::vector<CellToSend>)> filled;
  if (!effect.readers.empty()) {
    filled = [this, readers = effect.readers](std::vector<CellToSend> cells) {
      for (const CellReader& reader : readers)
        sessions_.SendCells(reader.lease, reader.generation, cells, /*last=*/false);
    };
  }
  BeginFill(effect.model);
  GpuOf(model.device)
      .Realize(effect, model.checkpoint.layout, SourcesOf(effect.model), std::move(givers), std::move(filled),
               [this](const PlanRealized& event) {
                 EndFill(event.model);
                 Feed(event);
               });
  // What the core takes up next, after the transfer that the end has stopped.
  if (!ending_.ok()) GpuOf(models_.at(effect.model)->device).CancelRealize();
}

void Broker::Do(const CancelRealize& effect) { GpuOf(models_.at(effect.model)->device).CancelRealize(); }

void Broker::Do(const VerifyCells& effect) {
  GpuOf(models_.at(effect.model)->device)
      .Verify(effect.model, SourcesOf(effect.model), [this](const CellsVerified& event) { Feed(event); });
}

void Broker::Do(const TrimPool& effect) {
  GpuOf(effect.device).Trim([this, report = effect.report](const PoolTrimmed& event) {
    if (report) Feed(event);
  });
}

// ---- Leases. ----

void Broker::Do(const GrantLease& effect) {
  const LoadedModel& model = *models_.at(effect.model);
  v1::LeaseGranted grant;
  grant.set_lease_id(effect.lease.value);
  grant.set_model(arbiter_.records().models.at(effect.model).name);
  grant.set_device_uuid(GpuOf(model.device).device().info().uuid);
  grant.set_layout_digest(model.checkpoint.layout.digest);
  grant.set_span_bytes(model.checkpoint.layout.span_bytes);
  sessions_.GrantLease(effect.session, grant);
}

void Broker::Do(const SendCells& effect) {
  const auto lease = arbiter_.records().leases.find(effect.lease);
  if (lease == arbiter_.records().leases.end()) return;
  const LoadedModel& model = *models_.at(lease->second.model);
  GpuOf(model.device)
      .Export(lease->second.model, model.checkpoint.layout,
              [this, effect](absl::StatusOr<std::vector<CellToSend>> cells) {
                if (!cells.ok()) return Feed(LeaseFailed{effect.lease, cells.status()});
                sessions_.SendCells(effect.lease, effect.generation, *cells);
              });
}

bool Broker::IsInUse(LeaseId lease) {
  UseWord* word = sessions_.Word(lease);
  return word != nullptr && word->Read().count > 0;
}

void Broker::Do(const CloseUseWords& effect) {
  UseWordsClosed event{.model = effect.model};
  std::vector<LeaseId> closed;
  for (LeaseId lease : effect.leases) {
    UseWord* word = sessions_.Word(lease);
    if (word == nullptr) continue;
    const CloseResult result = effect.only_if_idle ? word->CloseIfIdle() : word->Close();
    // A word that is closed already is that of a client which is just leaving; it will say so.
    if (result == CloseResult::kInUse) event.in_use.push_back(lease);
    if (result == CloseResult::kClosed) closed.push_back(lease);
  }
  if (!event.in_use.empty()) {
    for (LeaseId lease : closed) (void)sessions_.Word(lease)->Cancel();
  }
  Feed(event);
}

void Broker::Do(const ReopenUseWords& effect) {
  UseWordsReopened event{.model = effect.model};
  for (LeaseId lease : effect.leases) {
    UseWord* word = sessions_.Word(lease);
    if (word != nullptr && word->Cancel() == CancelResult::kTaken) event.taken.push_back(lease);
  }
  Feed(event);
}

void Broker::Do(const CloseAndRevoke& effect) {
  // The order matters: a Revoke that is read before the word is closed would be taken for one that was cancelled.
  if (UseWord* word = sessions_.Word(effect.lease)) (void)word->Close();
  sessions_.Revoke(effect.lease, effect.generation);
}

void Broker::Do(const RevokeLease& effect) { sessions_.Revoke(effect.lease, effect.generation); }
void Broker::Do(const EndLease& effect) { sessions_.EndLease(effect.lease, effect.reason, effect.message); }

void Broker::Do(const SetTimer& effect) {
  if (auto node = timers_.extract(effect.timer); !node.empty()) loop_.CancelTimer(node.mapped());
  if (effect.at == absl::InfiniteFuture()) return;
  timers_[effect.timer] = loop_.At(effect.at, [this, timer = effect.timer] {
    timers_.erase(timer);
    Feed(TimerFired{timer});
  });
}

std::vector<const Source*> Broker::SourcesOf(ModelId model) const {
  const HostCopy& copy = *copies_.at(models_.at(model)->copy);
  return copy.complete ? copy.built.sources() : copy.flow->sources();
}

}  // namespace residency

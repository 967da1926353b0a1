// SPDX-License-Identifier: Apache-2.0
#include "tests/core_rig.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"
#include "tests/test_driver.h"

namespace residency {
namespace {

constexpr DeviceId kDevice{1};

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(value.status().ToString());
  return *std::move(value);
}

}  // namespace

class RigCheckpoint::ComponentSource final : public ImageSource {
 public:
  explicit ComponentSource(const RigCheckpoint& checkpoint) : checkpoint_(checkpoint) {}
  const std::byte* CellData(uint32_t cell) const override { return checkpoint_.CellData(cell); }
  uint64_t CellBytes(uint32_t cell) const override { return checkpoint_.layout_.cells[cell].bytes; }
  uint64_t CellDigest(uint32_t cell) const override { return checkpoint_.digests_[cell]; }

 private:
  const RigCheckpoint& checkpoint_;
};

namespace {

// A component whose reading may fail after its first cell was given out.
class FlowingSource final : public Source {
 public:
  FlowingSource(const Source& source, uint32_t first_cell, const absl::Status& failed)
      : source_(source), first_cell_(first_cell), failed_(failed) {}
  absl::Status AwaitCell(uint32_t cell, std::stop_token) const override {
    return cell == first_cell_ ? absl::OkStatus() : failed_;
  }
  absl::Status AwaitEnd(std::stop_token) const override { return failed_; }
  absl::Status ForEachPart(uint32_t cell, PartWriter write) const override { return source_.ForEachPart(cell, write); }
  bool Accept(uint32_t cell, uint64_t digest) const override { return failed_.ok() && source_.Accept(cell, digest); }
  bool HasDigest(uint32_t) const override { return true; }
  absl::Status CheckUnchanged() const override { return absl::OkStatus(); }

 private:
  const Source& source_;
  const uint32_t first_cell_;
  const absl::Status& failed_;
};

}  // namespace

RigCheckpoint::RigCheckpoint(std::string name, const std::vector<uint64_t>& component_bytes, uint64_t cell_bytes,
                             uint64_t seed, ModelMode mode)
    : name_(std::move(name)), mode_(mode) {
  std::vector<LayoutComponent> components;
  for (uint64_t bytes : component_bytes) {
    LayoutComponent component{.name = absl::StrCat("part", components.size())};
    component.tensors = {{.name = "w", .dtype = DType::kU8, .shape = {bytes}, .bytes = bytes}};
    components.push_back(std::move(component));
    components_.push_back(std::make_unique<ComponentSource>(*this));
    sources_.push_back(components_.back().get());
  }
  layout_ = Must(MakeLayout(std::move(components), cell_bytes, kMinCellBytes));
  bytes_.resize(layout_.span_bytes);
  std::mt19937_64 random(seed);
  auto* words = reinterpret_cast<uint64_t*>(bytes_.data());
  for (uint64_t i = 0; i < bytes_.size() / 8; ++i) words[i] = random();
  for (uint32_t cell = 0; cell < layout_.cells.size(); ++cell) {
    digests_.push_back(
        DigestWordsPortable(reinterpret_cast<const uint64_t*>(CellData(cell)), layout_.cells[cell].bytes / 8, 0));
  }
}

CoreRig::CoreRig(uint64_t budget_bytes, std::vector<RigCheckpoint*> checkpoints, uint64_t piece_bytes)
    : checkpoints_(std::move(checkpoints)), truth_(OpenTestDevice()) {
  FaultDriver::Reset();
  ranges_at_start_ = FaultDriver::holdings().ranges.size();
  memory_ =
      Must(GpuMemory::Open(FaultDriver::Table(), 0, {.pieces = {piece_bytes, piece_bytes}, .filled_cells_at_once = 1}));
  for (RigCheckpoint* checkpoint : checkpoints_) {
    pins_.push_back(Must(truth_->RegisterHost(checkpoint->bytes().data(), checkpoint->bytes().size())));
  }
  free_at_start_bytes_ = truth_->Memory()->free_bytes;
  ArbiterOptions options;
  options.devices = {{.id = kDevice, .uuid = truth_->info().uuid, .budget_bytes = budget_bytes}};
  arbiter_ = std::make_unique<Arbiter>(options);
}

CoreRig::~CoreRig() {
  FaultDriver::Disarm();
  for (auto& [session, client] : clients_) {
    for (auto& [id, lease] : client.leases) LetGo(lease);
  }
  clients_.clear();
  models_.clear();
  memory_->Close();
  FaultDriver::TakeBackRefused();
}

// ---- Requests. ----

RequestId CoreRig::NextRequest() {
  const RequestId request{next_request_++};
  asked_.insert(request);
  return request;
}

RequestId CoreRig::Register(const std::string& name) {
  const RequestId request = NextRequest();
  const auto found = std::find_if(checkpoints_.begin(), checkpoints_.end(),
                                  [&](const RigCheckpoint* checkpoint) { return checkpoint->name() == name; });
  registering_[request] = *found;
  Feed(RegisterRequested{request, name, name, kDevice, Budget{}, (*found)->layout(), (*found)->mode()});
  return request;
}

RequestId CoreRig::Unload(const std::string& name) {
  const RequestId request = NextRequest();
  Feed(UnloadRequested{request, name});
  return request;
}

RequestId CoreRig::Activate(const std::string& name, SessionId session, absl::Duration deadline) {
  const RequestId request = NextRequest();
  Feed(ActivateRequested{.request = request, .name = name, .session = session, .deadline = now_ + deadline});
  return request;
}

RequestId CoreRig::Deactivate(const std::string& name, absl::Duration drain) {
  const RequestId request = NextRequest();
  Feed(DeactivateRequested{request, name, drain});
  return request;
}

RequestId CoreRig::Verify(const std::string& name) {
  const RequestId request = NextRequest();
  Feed(VerifyRequested{request, name});
  return request;
}

RequestId CoreRig::AskToTrim() {
  const RequestId request = NextRequest();
  Feed(TrimRequested{request, kDevice});
  return request;
}

RequestId CoreRig::ReleaseLease(SessionId session, LeaseId lease) {
  const RequestId request = NextRequest();
  Feed(ReleaseLeaseRequested{request, session, lease});
  return request;
}

RequestId CoreRig::BeginPhase(SessionId session, LeaseId lease, const std::string& component, absl::Duration deadline) {
  const RequestId request = NextRequest();
  phases_asked_[request] = FaultDriver::hits();
  Feed(BeginPhaseRequested{request, session, lease, component, now_ + deadline});
  return request;
}

RequestId CoreRig::EndPhase(SessionId session, LeaseId lease, PhaseId phase) {
  const RequestId request = NextRequest();
  Feed(EndPhaseRequested{request, session, lease, phase});
  return request;
}

void CoreRig::Cancel(RequestId request) { Feed(RequestCancelled{request}); }

const Reply* CoreRig::reply(RequestId request) const {
  const auto found = replies_.find(request);
  return found == replies_.end() ? nullptr : &found->second;
}

std::vector<RequestId> CoreRig::outstanding() const { return {asked_.begin(), asked_.end()}; }

const ModelRecord* CoreRig::FindModel(const std::string& name) const { return arbiter_->records().FindModel(name); }

// ---- What can happen next. ----

bool CoreRig::WorkDevice() {
  if (device_work_.empty()) return false;
  if (device_work_.front().waits != nullptr && device_work_.front().waits()) return false;
  const DeviceWork work = std::move(device_work_.front());
  device_work_.pop_front();
  if (Answer answer = work.work()) answers_.push_back(std::move(answer));
  return true;
}

void CoreRig::Work(std::function<Answer()> work, std::function<bool()> waits) {
  device_work_.push_back({std::move(work), std::move(waits)});
}

bool CoreRig::WorkLoader() {
  if (loader_work_.empty()) return false;
  const auto work = std::move(loader_work_.front());
  loader_work_.pop_front();
  if (Answer answer = work()) answers_.push_back(std::move(answer));
  return true;
}

bool CoreRig::DeliverAnswer() {
  if (answers_.empty()) return false;
  const Answer answer = std::move(answers_.front());
  answers_.pop_front();
  Feed(answer());
  return true;
}

bool CoreRig::DeliverEvent(SessionId from) {
  Client& client = clients_.at(from);
  if (client.outbox.empty()) return false;
  const Event event = std::move(client.outbox.front());
  client.outbox.pop_front();
  const bool ended = std::holds_alternative<SessionEnded>(event);
  if (ended) {
    std::erase_if(daemon_leases_, [&](const auto& entry) { return entry.second.session == from; });
    if (client.dead) clients_.erase(from);
  }
  Feed(event);
  return true;
}

bool CoreRig::Advance(absl::Duration most) {
  const auto next = std::min_element(timers_.begin(), timers_.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  if (next == timers_.end() || next->second > now_ + most) {
    now_ += most;
    return false;
  }
  now_ = std::max(now_, next->second);
  const TimerId timer = next->first;
  timers_.erase(next);
  Feed(TimerFired{timer});
  return true;
}

void CoreRig::Drain() {
  bool went_on = true;
  while (went_on) {
    went_on = WorkDevice() || WorkLoader() || DeliverAnswer();
    std::vector<SessionId> sessions;
    for (const auto& [session, client] : clients_) sessions.push_back(session);
    for (SessionId session : sessions) {
      went_on |= DeliverPacket(session);
      went_on |= DeliverEvent(session);
      went_on |= WorkClient(session);
    }
  }
}

bool CoreRig::quiet() const {
  if (!device_work_.empty() || !loader_work_.empty() || !answers_.empty()) return false;
  return std::all_of(clients_.begin(), clients_.end(), [](const auto& entry) {
    const Client& client = entry.second;
    const bool releasing = std::any_of(client.leases.begin(), client.leases.end(),
                                       [](const auto& lease) { return lease.second.releasing; });
    return client.inbox.empty() && client.outbox.empty() && !releasing;
  });
}

// ---- The core. ----

void CoreRig::Feed(const Event& event) {
  events_.push_back(event);
  if (std::exchange(feeding_, true)) return;
  while (!events_.empty()) {
    const Event next = std::move(events_.front());
    events_.pop_front();
    ++events_fed_;
    for (const Effect& effect : arbiter_->Step(next, now_)) {
      std::visit([this](const auto& e) { Do(e); }, effect);
    }
  }
  feeding_ = false;
}

void CoreRig::Do(const Reply& effect) {
  // Nobody asked for what is undone because everybody gave up.
  if (!effect.request) return;
  if (asked_.erase(effect.request) == 0) {
    complaint_ = absl::StrCat("request ", effect.request.value, " was answered twice, or never asked");
  }
  const auto phase = phases_asked_.extract(effect.request);
  if (!phase.empty() && absl::IsResourceExhausted(effect.status) && phase.mapped() == FaultDriver::hits()) {
    complaint_ = absl::StrCat("a phase had no room: ", effect.status.ToString());
  }
  replies_[effect.request] = effect;
  registering_.erase(effect.request);
}

void CoreRig::Do(const BuildMirrors& effect) {
  LiveModel& model = models_[effect.model];
  model.checkpoint = registering_.at(effect.request);
  const bool early = reads_early_ && ++readings_ % 2 == 0 && model.checkpoint->mode() == ModelMode::kHeld;
  if (!early) {
    loader_work_.push_back([this, id = effect.model]() -> Answer {
      EndReading(id);
      return nullptr;
    });
    return;
  }
  loader_work_.push_back([this, id = effect.model]() -> Answer {
    LiveModel& model = models_.at(id);
    const Layout& layout = model.checkpoint->layout();
    model.plan = NoneResident(layout);
    // In the end it may be as if none of this had been.
    loader_work_.push_back([this, id]() -> Answer {
      EndReading(id);
      return nullptr;
    });
    if (auto arena = memory_->Reserve(layout); arena.ok()) model.arena = *std::move(arena);
    if (model.arena == nullptr) return nullptr;
    model.reading = LiveModel::Reading::kNearly;
    for (uint32_t i = 0; i < layout.components.size(); ++i) {
      model.flowing.push_back(std::make_unique<FlowingSource>(*model.checkpoint->sources()[i],
                                                              layout.components[i].first_cell, model.failed));
    }
    return [id]() -> Event { return MirrorsNearlyBuilt{id}; };
  });
}

// The bytes are there, or will never be; a moment later the core hears of it.
void CoreRig::EndReading(ModelId id) {
  LiveModel& model = models_.at(id);
  const bool early = model.reading == LiveModel::Reading::kNearly;
  absl::Status status;
  if (model.cancelled) {
    status = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "given up");
  } else if (std::exchange(next_reading_fails_, false)) {
    status = Refuse(absl::StatusCode::kFailedPrecondition, "FILE_CHANGED", "it changed");
  } else if (!early) {
    auto arena = memory_->Reserve(model.checkpoint->layout());
    status = arena.status();
    if (arena.ok()) model.arena = *std::move(arena);
    model.plan = NoneResident(model.checkpoint->layout());
  }
  if (early) model.failed = status;
  if (status.ok()) model.reading = LiveModel::Reading::kEnded;
  // A fill that was waiting may be heard of before, where it failed.
  const auto tell = [this, id, status, early]() -> Event {
    const LiveModel& model = models_.at(id);
    const uint64_t pinned_bytes = model.checkpoint->layout().span_bytes;
    if (!status.ok() && !early) models_.erase(id);
    return MirrorsBuilt{id, status, status.ok() ? pinned_bytes : 0};
  };
  if (status.ok()) {
    answers_.push_back(tell);
  } else {
    loader_work_.push_back([tell]() -> Answer { return tell; });
  }
}

void CoreRig::Do(const CancelMirrors& effect) {
  if (const auto model = models_.find(effect.model); model != models_.end()) model->second.cancelled = true;
}

void CoreRig::Do(const DropModel& effect) {
  Work([this, id = effect.model]() -> Answer {
    LiveModel& model = models_.at(id);
    const uint64_t device_bytes = model.arena->Measure().device_bytes;
    model.arena.reset();
    return [this, id, device_bytes]() -> Event {
      const uint64_t host_bytes = models_.at(id).checkpoint->layout().span_bytes;
      models_.erase(id);
      return ModelDropped{id, host_bytes, device_bytes};
    };
  });
}

void CoreRig::Do(const MeasureDevice&) {
  Work([this]() -> Answer {
    std::map<ModelId, const Arena*> arenas;
    for (const auto& [id, model] : models_) {
      if (model.arena != nullptr) arenas.emplace(id, model.arena.get());
    }
    const GpuMeasurement measured = memory_->Measure(arenas);
    return [this, measured]() -> Event {
      DeviceMeasured event{.device = kDevice,
                           .status = measured.status,
                           .total_bytes = measured.memory.total_bytes,
                           .free_bytes = measured.memory.free_bytes,
                           .pool_idle_bytes = measured.pool_idle_bytes,
                           .broker_bytes = measured.broker_bytes};
      for (const auto& [id, lease] : arbiter_->records().leases) {
        const auto found = daemon_leases_.find(id);
        if (found != daemon_leases_.end() && found->second.page->word().Read().count > 0) {
          event.leases_in_use.push_back(id);
        }
      }
      return event;
    };
  });
}

void CoreRig::Do(const RealizePlan& effect) {
  realizing_ = std::stop_source();
  const bool fills = Price(models_.at(effect.model).checkpoint->layout(), effect.plan) > 0;
  if (fills && models_.at(effect.model).reading == LiveModel::Reading::kNearly) ++realized_early_;
  // Arenas wait in the middle of it; who waits for whom is the same.
  const auto waits = [this, effect, fills, stop = realizing_.get_token()] {
    if (stop.stop_requested()) return false;
    const LiveModel& model = models_.at(effect.model);
    const bool comes = fills && model.reading == LiveModel::Reading::kNearly && model.failed.ok();
    return comes || std::any_of(effect.givers.begin(), effect.givers.end(),
                                [this](ModelId giver) { return HeldOf(giver)->any(); });
  };
  const auto work = [this, effect, stop = realizing_.get_token()]() -> Answer {
    LiveModel& model = models_.at(effect.model);
    std::vector<Giver> givers;
    for (ModelId id : effect.givers) {
      givers.push_back({id, models_.at(id).arena.get(), models_.at(id).checkpoint->sources(), HeldOf(id)});
      if (givers.back().held->any()) ++hindered_;
    }
    RealizeOptions options{.verify = !effect.skip_verification, .stop = stop};
    if (!effect.readers.empty()) {
      options.filled = [&](std::span<const uint32_t> indices) {
        const auto cells = memory_->Export(*model.arena, model.checkpoint->layout(), indices);
        if (!cells.ok()) return;
        NoteInodes(model, *cells);
        for (const CellReader& reader : effect.readers) PushCells(reader, *cells, /*last=*/false);
      };
    }
    std::vector<const Source*> sources = model.checkpoint->sources();
    for (size_t i = 0; i < sources.size() && model.reading == LiveModel::Reading::kNearly; ++i) {
      sources[i] = model.flowing[i].get();
    }
    if (!model.failed.ok() && Price(model.checkpoint->layout(), effect.plan) > 0) ++readings_failed_;
    PlanRealized event = memory_->Realize(effect.model, *model.arena, effect.plan, sources, options, givers);
    event.duration = absl::ZeroDuration();
    if (event.status.ok()) model.plan = effect.plan;
    for (const GiverEmptied& emptied : event.givers) {
      LiveModel& giver = models_.at(emptied.model);
      if (emptied.status.ok() && !emptied.kept) giver.plan = NoneResident(giver.checkpoint->layout());
    }
    ++realized_;
    return [event]() -> Event { return event; };
  };
  Work(work, waits);
}

void CoreRig::Do(const VerifyCells& effect) {
  Work([this, effect]() -> Answer {
    LiveModel& model = models_.at(effect.model);
    CellsVerified event = memory_->Verify(effect.model, *model.arena, model.checkpoint->sources());
    event.duration = absl::ZeroDuration();
    return [event]() -> Event { return event; };
  });
}

void CoreRig::Do(const TrimPool& effect) {
  Work([this, effect]() -> Answer {
    PoolTrimmed event = memory_->Trim();
    event.device = effect.device;
    if (!effect.report) return nullptr;
    return [event]() -> Event { return event; };
  });
}

void CoreRig::Do(const SetTimer& effect) {
  timers_.erase(effect.timer);
  if (effect.at != absl::InfiniteFuture()) timers_[effect.timer] = effect.at;
}

}  // namespace residency

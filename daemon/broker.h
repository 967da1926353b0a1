// SPDX-License-Identifier: Apache-2.0
//
// Carries out what the decision core orders: it owns the GPUs, the loader, the mirrors and the sessions, feeds
// the core with what happens, and answers requests. It decides nothing. Everything on the decision loop, but for
// Start and the destructor.
#ifndef RESIDENCY_DAEMON_BROKER_H_
#define RESIDENCY_DAEMON_BROKER_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/arbiter.h"
#include "daemon/gpu.h"
#include "daemon/loader.h"
#include "daemon/loop.h"
#include "daemon/recording.h"
#include "daemon/sessions.h"
#include "mechanisms/driver.h"
#include "mechanisms/host_memory.h"
#include "mechanisms/nvml.h"
#include "proto/residency.pb.h"

namespace residency {

struct BrokerOptions {
  DaemonIdentity identity;
  std::string version;
  uint64_t cell_bytes = kDefaultCellBytes;
  std::optional<uint64_t> device_budget_bytes;  // of each device; unset: all of it
  uint64_t device_reserve_bytes = 0;            // of each device
  std::optional<uint64_t> host_budget_bytes;    // of all host copies
  PinPolicy pin = PinPolicy::kAuto;             // of registrations that do not say: DefaultPin
  HostTier tier = HostTier::kMirror;            // of registrations that do not say
  absl::Duration pool_idle = absl::Seconds(10);
  absl::StatusOr<Nvml> nvml = absl::UnavailableError("NVML is not used");  // what tells processes apart, or why not
  std::string record_path;  // of a recording of all decisions; empty: none
};

struct RegisterOptions {
  std::string name;
  std::string source;
  std::vector<ComponentSource> components;
  std::string device_uuid;  // empty: the first
  Budget budget;
  ModelMode mode = ModelMode::kHeld;
  std::optional<PinPolicy> pin;  // unset: the daemon's
  std::optional<HostTier> tier;  // unset: the daemon's
  bool activate = false;         // it is to be activated as soon as may be, which the caller asks for
};

class Broker {
 public:
  // Opens every GPU that `driver` shows. UNAVAILABLE/NO_DEVICE where there is none; else as Recorder::Create. `loop`
  // and `driver` outlive it.
  static absl::StatusOr<std::unique_ptr<Broker>> Start(Loop& loop, const Driver& driver, BrokerOptions options);
  // Give up all device and host memory. After the decision loop was stopped.
  ~Broker();

  using Done = std::function<void(const Reply&)>;
  using Progress = std::function<void(uint64_t bytes_done, uint64_t bytes_total, uint64_t pinned_bytes)>;

  // Each answers `done` exactly once. The id is for Cancel. `early` is called at most once, and before `done`, if the
  // model can be activated while its last bytes are being read; only where `options` say that it is to be.
  RequestId Register(RegisterOptions options, Progress progress, std::function<void()> early, Done done);
  // What Register would do, and what would fit; nothing is kept, no weight is read.
  void DryRun(RegisterOptions options, std::function<void(absl::StatusOr<v1::DryRun>)> done);
  RequestId Unload(const std::string& name, Done done);
  RequestId Activate(ActivateRequested request, Done done);
  RequestId Deactivate(const std::string& name, absl::Duration drain, Done done);
  RequestId Verify(const std::string& name, Done done);
  RequestId ReleaseLease(SessionId session, LeaseId lease, Done done);
  RequestId BeginPhase(BeginPhaseRequested request, Done done);
  RequestId EndPhase(EndPhaseRequested request, Done done);
  // Of one device, or of all where `device_uuid` is empty. NOT_FOUND/NO_SUCH_DEVICE.
  void Trim(const std::string& device_uuid, std::function<void(absl::StatusOr<v1::TrimResponse>)> done);
  void Cancel(RequestId request);

  // Measures and builds the status of one model, or of all. NOT_FOUND/NO_SUCH_MODEL.
  void GetStatus(const std::string& model, std::function<void(absl::StatusOr<v1::Status>)> done);
  // Calls `changed` after every change of what status shows, until Unwatch.
  uint64_t Watch(std::function<void()> changed);
  void Unwatch(uint64_t watcher);

  // The layout of a model that has been read, with its tensors. Valid until control returns to the loop.
  struct ModelView {
    const Layout& layout;
    std::string device_uuid;
    uint64_t layout_digest;
    ModelMode mode;
    HostTier tier;
  };
  absl::StatusOr<ModelView> Find(const std::string& name) const;
  // The same by the core's number; the model exists.
  ModelView ViewOf(ModelId model) const;

  Sessions& sessions() { return sessions_; }

  // Refuses what waits and what comes with UNAVAILABLE/SHUTTING_DOWN.
  void ShutDown();
  // What every request is refused with from now on: UNAVAILABLE/SHUTTING_DOWN, or UNAVAILABLE/DEVICE_LOST once a GPU's
  // context is lost. OK while there is neither.
  const absl::Status& ending() const { return ending_; }
  // Called once if a GPU's context is lost: the process should end and say so.
  void OnLost(std::function<void(absl::Status)> lost) { lost_ = std::move(lost); }

 private:
  struct LoadedModel {
    Checkpoint checkpoint;
    DeviceId device;
    HostCopyId copy;
    std::vector<RequestId> watching_progress;
    uint64_t loaded_bytes = 0;                                                              // of payload, read so far
    uint64_t loaded_pinned_bytes = 0;                                                       // page-locked so far
    bool activate = false;                                                                  // at once
    enum class Addresses : uint8_t { kNone, kAsked, kThere } addresses = Addresses::kNone;  // before the mirrors are
  };

  // The mirrors that one model has, or several of the same files, or their mappings. It goes with the last of them.
  struct HostCopy {
    HostTier tier = HostTier::kMirror;
    BuiltMirrors built;
    bool complete = false;
    bool failed = false;  // and is only here until its reader is dropped
    uint64_t pinned_bytes = 0;
    std::atomic<bool> cancelled{false};
    ModelId reader;                       // until it is complete, the loader reads by this model's checkpoint,
    std::unique_ptr<LoadedModel> kept;    // which is kept here where that model was given up meanwhile
    std::optional<BuiltMirrors> waiting;  // for the addresses that were asked for
    bool filling = false;                 // the reader's RealizePlan is under way, from the flow
    std::unique_ptr<MirrorFlow> flow;     // while it is being read, for its reader; goes before the mirrors
  };

  Broker(Loop& loop, BrokerOptions options, std::vector<std::unique_ptr<Gpu>> gpus, std::unique_ptr<Loader> loader,
         std::unique_ptr<Recorder> recorder);

  RequestId Expect(Done done);
  RequestId Ask(RequestId request, const Event& event);
  void Answer(const Reply& reply);
  void Feed(const Event& event);
  void Changed();
  void NoteLoss(const absl::Status& status);
  void RefuseWaiting();

  void Do(const Reply& effect) { Answer(effect); }
  void Do(const BuildMirrors& effect);
  void Do(const CancelMirrors& effect);
  void Do(const JoinMirrors& effect);
  void Do(const DropModel& effect);
  void Do(const MeasureDevice& effect);
  void Do(const RealizePlan& effect);
  void Do(const CancelRealize& effect);
  void Do(const VerifyCells& effect);
  void Do(const TrimPool& effect);
  void Do(const GrantLease& effect);
  void Do(const SendCells& effect);
  void Do(const CloseUseWords& effect);
  void Do(const ReopenUseWords& effect);
  void Do(const CloseAndRevoke& effect);
  void Do(const RevokeLease& effect);
  void Do(const EndLease& effect);
  void Do(const SetTimer& effect);

  void ReadCopy(HostCopyId id, PinWish pin);
  void OnProgress(HostCopyId id, const BuildProgress& progress);
  void OnMirrors(HostCopyId id, BuiltMirrors built);
  void OnCopyComplete(ModelId id);
  void OnNearlyBuilt(HostCopyId id);
  void OnCopyFailed(HostCopyId id, const BuiltMirrors& built);
  void BeginFill(ModelId model);
  void EndFill(ModelId model);
  void DiscardFlow(HostCopy& copy);
  std::vector<ModelId> ModelsOf(HostCopyId copy) const;
  std::unique_ptr<HostCopy> TakeUnused(HostCopyId copy);
  HostRoom MeasureHost() const;
  // The GPU that a registration names; NOT_FOUND/NO_SUCH_DEVICE.
  absl::StatusOr<Gpu*> FindGpu(const std::string& uuid) const;
  RegisterRequested RegisterEvent(RequestId request, const RegisterOptions& options, const Checkpoint& checkpoint,
                                  DeviceId device) const;
  v1::DryRun BuildDryRun(const RegisterRequested& event, const GpuMeasurement& measured);
  void SetHostStatus(v1::HostStatus& host) const;
  Gpu& GpuOf(DeviceId device) { return *gpus_[device.value - 1]; }
  std::vector<const Source*> SourcesOf(ModelId model) const;
  bool IsInUse(LeaseId lease);
  v1::Status BuildStatus(const std::string& model, const std::vector<GpuMeasurement>& measured);

  Loop& loop_;
  const BrokerOptions options_;
  const absl::Time started_;
  std::vector<std::unique_ptr<Gpu>> gpus_;  // DeviceId n is at n - 1
  Arbiter arbiter_;
  const std::unique_ptr<Recorder> recorder_;  // null where nothing is recorded
  Sessions sessions_;
  const HostMemoryReader host_memory_;
  std::map<ModelId, std::unique_ptr<LoadedModel>> models_;
  std::map<HostCopyId, std::unique_ptr<HostCopy>> copies_;
  std::map<RequestId, Done> done_;
  std::map<RequestId, Progress> progress_;
  std::map<RequestId, std::function<void()>> early_;
  std::map<RequestId, std::unique_ptr<LoadedModel>> loading_;  // headers read, the core not yet asked or not agreed
  std::map<TimerId, uint64_t> timers_;
  std::map<uint64_t, std::function<void()>> watchers_;
  std::deque<Event> events_;  // that came up while one is being carried out
  bool feeding_ = false;
  absl::Status ending_;
  uint64_t next_request_ = 1;
  uint64_t next_watcher_ = 1;
  std::function<void(absl::Status)> lost_;
  std::unique_ptr<Loader> loader_;  // last, so that it goes first: its workers read the models
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_BROKER_H_

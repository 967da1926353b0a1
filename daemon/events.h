// SPDX-License-Identifier: Apache-2.0
//
// What the decision core is told and what it orders, as plain values. Events are in the past tense, effects
// in the imperative. Whoever carries an effect out reports back with the event named beside it.
#ifndef RESIDENCY_DAEMON_EVENTS_H_
#define RESIDENCY_DAEMON_EVENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/host_room.h"
#include "daemon/ids.h"
#include "daemon/residency.h"
#include "mechanisms/layout.h"
#include "mechanisms/plan.h"

namespace residency {

// ---- Events: requests. Each is answered by exactly one Reply. ----

// A checkpoint's headers were read. `identity` tells the same files from others; `layout` comes without its
// tensors, which no decision needs.
struct RegisterRequested {
  RequestId request;
  std::string name;
  std::string identity;
  DeviceId device;
  Budget budget;
  Layout layout;
  ModelMode mode = ModelMode::kHeld;
  PinPolicy pin = PinPolicy::kAuto;
  HostRoom host;
  HostTier tier = HostTier::kMirror;
  uint64_t file_bytes = 0;  // of the pages of its files that the tier kFile locks, small gaps between tensors with them
};

struct UnloadRequested {
  RequestId request;
  std::string name;
};

struct ActivateRequested {
  RequestId request;
  std::string name;
  Budget budget;
  SessionId session;  // nobody: a prewarm
  uint64_t working_bytes = 0;
  absl::Time deadline = absl::InfiniteFuture();
  bool skip_verification = false;  // what comes onto the GPU is not compared with its source there
};

struct DeactivateRequested {
  RequestId request;
  std::string name;
  absl::Duration drain;  // zero: a lease in use is a refusal at once
};

struct VerifyRequested {
  RequestId request;
  std::string name;
};

struct ReleaseLeaseRequested {
  RequestId request;
  SessionId session;
  LeaseId lease;
};

// The lease wants a component of its phased model on the GPU, and lets go of the one that it is in.
struct BeginPhaseRequested {
  RequestId request;
  SessionId session;
  LeaseId lease;
  std::string component;
  absl::Time deadline = absl::InfiniteFuture();
};

struct EndPhaseRequested {
  RequestId request;  // nobody: the core's own, for a component that all have left
  SessionId session;
  LeaseId lease;
  PhaseId phase;
};

// The idle cells of the device's pool are to go back to the driver.
struct TrimRequested {
  RequestId request;
  DeviceId device;
};

// The caller has gone away; it gets its Reply all the same, as a CANCELLED.
struct RequestCancelled {
  RequestId request;
};

// ---- Events: answers to effects. ----

// BuildMirrors has so little left to read that the model may be activated meanwhile; its MirrorsBuilt comes later, and
// before a PlanRealized that is OK. Not of every model.
struct MirrorsNearlyBuilt {
  ModelId model;
};

// BuildMirrors is done. On failure nothing is left of them, but for a model that was nearly built: that is dropped.
// `pinned_bytes` is all of them or nothing.
struct MirrorsBuilt {
  ModelId model;
  absl::Status status;
  uint64_t pinned_bytes = 0;
  // Where the driver refused to page-lock: how, and what it had locked of mirrors by then, for all models together.
  absl::Status pin_refusal;
  std::optional<uint64_t> pin_limit_bytes;
};

// MeasureDevice is done.
struct DeviceMeasured {
  DeviceId device;
  absl::Status status;
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;
  uint64_t pool_idle_bytes = 0;
  uint64_t broker_bytes = 0;           // mapped under models, as the driver says
  std::vector<LeaseId> leases_in_use;  // on models of this device, as their use words say
};

// What became of a model that a RealizePlan was to empty; `device_bytes` is measured afterwards.
struct GiverEmptied {
  ModelId model;
  absl::Status status;  // where not OK, all of it is there again, unless broken; and the plan was not realized
  bool broken = false;
  uint64_t device_bytes = 0;
  bool kept = false;  // the plan was not realized, and all of it is there
};

// RealizePlan is done; `device_bytes` is measured afterwards, in either case.
struct PlanRealized {
  ModelId model;
  absl::Status status;
  bool broken = false;  // it failed and could not be undone
  uint64_t device_bytes = 0;
  uint64_t copied_bytes = 0;
  uint64_t verified_cells = 0;
  uint64_t refilled_cells = 0;
  uint64_t unmapped_bytes = 0;          // left the addresses
  uint64_t pooled_bytes = 0;            // of them went to the cell pool, as measured there
  std::optional<uint64_t> freed_bytes;  // by how much the driver's free figure rose; nothing where it did not say
  uint64_t copied_to_host_bytes = 0;    // counted; a deactivation has none
  absl::Duration duration;
  std::vector<GiverEmptied> givers;  // one for each that was named
  uint64_t trusted_cells = 0;        // not verified: nothing was known of their bytes before
};

// VerifyCells is done.
struct CellsVerified {
  ModelId model;
  absl::Status status;
  bool broken = false;
  uint64_t verified_cells = 0;
  uint64_t refilled_cells = 0;
  uint64_t absent_cells = 0;
  absl::Duration duration;
};

// TrimPool is done.
struct PoolTrimmed {
  DeviceId device;
  absl::Status status;
  uint64_t trimmed_bytes = 0;  // left the pool, also where `status` is that the driver did not say what this freed
  uint64_t freed_bytes = 0;    // by how much the driver's free figure rose
};

// DropModel is done; `device_bytes` is what was still mapped.
struct ModelDropped {
  ModelId model;
  uint64_t host_bytes = 0;
  uint64_t device_bytes = 0;
};

// CloseUseWords is done: either all of the leases are closed, or none and `in_use` says which stood in the
// way.
struct UseWordsClosed {
  ModelId model;
  std::vector<LeaseId> in_use;
};

// ReopenUseWords is done. A lease in `taken` was faster: its LeaseReleased will come, or has come.
struct UseWordsReopened {
  ModelId model;
  std::vector<LeaseId> taken;
};

struct TimerFired {
  TimerId timer;
};

// ---- Events: sessions. ----

struct SessionOpened {
  SessionId session;
  int64_t pid = 0;
  uint32_t uid = 0;
  std::string client;
};

// The channel hung up while its process may still have cells mapped.
struct SessionHungUp {
  SessionId session;
};

// The process is gone, or it hung up and holds nothing.
struct SessionEnded {
  SessionId session;
};

// The client has mapped all cells of the generation and opened its use word.
struct LeaseMapped {
  LeaseId lease;
  uint64_t generation = 0;
};

// The client has let some cells of the generation go, and is about to let go of the rest: nothing can call that back.
struct LeaseReleasing {
  LeaseId lease;
  uint64_t generation = 0;
};

// The client has let all cells of the generation go.
struct LeaseReleased {
  LeaseId lease;
  uint64_t generation = 0;
};

// The client could not map, and holds nothing; or the daemon could not hand over all of it.
struct LeaseFailed {
  LeaseId lease;
  absl::Status status;
  bool by_client = false;  // then `status` is the client's word
};

using Event =
    std::variant<RegisterRequested, UnloadRequested, ActivateRequested, DeactivateRequested, VerifyRequested,
                 ReleaseLeaseRequested, BeginPhaseRequested, EndPhaseRequested, TrimRequested, RequestCancelled,
                 MirrorsNearlyBuilt, MirrorsBuilt, DeviceMeasured, PlanRealized, CellsVerified, PoolTrimmed,
                 ModelDropped, UseWordsClosed, UseWordsReopened, TimerFired, SessionOpened, SessionHungUp, SessionEnded,
                 LeaseMapped, LeaseReleasing, LeaseReleased, LeaseFailed>;

// ---- Effects. ----

struct RegisterOutcome {
  ModelId model;
  uint64_t pinned_bytes = 0;
  PinOutcome pin;
};

struct UnloadOutcome {
  uint64_t host_bytes = 0;
  uint64_t device_bytes = 0;
};

struct ActivateOutcome {
  ModelId model;
  LeaseId lease;
  uint64_t generation = 0;
  uint64_t bytes_moved = 0;
  absl::Duration duration;
  uint64_t verified_cells = 0;
  uint64_t refilled_cells = 0;
  uint64_t device_bytes = 0;
  std::vector<std::string> evicted;
  uint64_t trusted_cells = 0;
};

struct DeactivateOutcome {
  uint64_t pooled_bytes = 0;
  std::optional<uint64_t> freed_bytes;  // nothing: not known
  uint64_t copied_bytes = 0;
  absl::Duration duration;
};

struct PhaseOutcome {
  PhaseId phase;
  uint64_t generation = 0;  // of the lease's cells
  uint64_t bytes_moved = 0;
  absl::Duration duration;
  uint64_t verified_cells = 0;
  uint64_t refilled_cells = 0;
  uint64_t device_bytes = 0;  // of the model, measured
};

struct VerifyOutcome {
  uint64_t verified_cells = 0;
  uint64_t refilled_cells = 0;
  uint64_t absent_cells = 0;
  absl::Duration duration;
};

struct TrimOutcome {
  uint64_t trimmed_bytes = 0;
  uint64_t freed_bytes = 0;
};

struct Reply {
  RequestId request;
  absl::Status status;
  std::variant<std::monostate, RegisterOutcome, UnloadOutcome, ActivateOutcome, DeactivateOutcome, PhaseOutcome,
               VerifyOutcome, TrimOutcome>
      outcome;  // monostate where `status` is not OK, or there is nothing to say
};

// Read, page-lock and digest the model whose RegisterRequested was `request`, unless another model has that copy
// already, or is just having it read; -> perhaps MirrorsNearlyBuilt, MirrorsBuilt. In the tier kFile: map and page-lock
// its files.
struct BuildMirrors {
  ModelId model;
  RequestId request;
  HostCopyId copy;
  PinWish pin = PinWish::kTry;
  HostTier tier = HostTier::kMirror;
};
struct CancelMirrors {
  ModelId model;
};
// Another request waits for the registration of `model`, so shows its progress too.
struct JoinMirrors {
  ModelId model;
  RequestId request;
};
// Its host copy goes with it where no other model has it; -> ModelDropped
struct DropModel {
  ModelId model;
};
// -> DeviceMeasured
struct MeasureDevice {
  DeviceId device;
};
// A lease whose client is sent cells as a new generation.
struct CellReader {
  LeaseId lease;
  uint64_t generation = 0;
};
// Takes the cells of `givers`, which nobody uses, under the model's addresses as they are needed and clients have let
// them go, and the rest of them off; -> PlanRealized, which says what became of them. Clients of `readers` are sent
// cells once they are wholly overwritten, the rest of them with SendCells, which alone lets them be used.
struct RealizePlan {
  ModelId model;
  Plan plan;
  std::vector<ModelId> givers;
  bool skip_verification = false;
  std::vector<CellReader> readers;
};
// Nobody waits for the RealizePlan of `model` that is under way: it is to stop and be undone. Its PlanRealized comes
// all the same, as CANCELLED unless it was through already.
struct CancelRealize {
  ModelId model;
};
// -> CellsVerified
struct VerifyCells {
  ModelId model;
};
// Gives idle cells of the pool back to the driver; -> PoolTrimmed where `report`.
struct TrimPool {
  DeviceId device;
  bool report = false;
};
// Makes the lease's use word and tells its session.
struct GrantLease {
  LeaseId lease;
  SessionId session;
  ModelId model;
};
// Hands the session the descriptors of all resident cells that were not sent in this generation yet; -> LeaseMapped or
// LeaseFailed.
struct SendCells {
  LeaseId lease;
  uint64_t generation = 0;
};
// Keeps new users out of all of `leases`, or, where `only_if_idle` and one is in use, of none;
// -> UseWordsClosed.
struct CloseUseWords {
  ModelId model;
  std::vector<LeaseId> leases;
  bool only_if_idle = false;
};
// Takes that back where the client has not taken its pages yet; -> UseWordsReopened.
struct ReopenUseWords {
  ModelId model;
  std::vector<LeaseId> leases;
};
// Keeps new users out of a lease that is to end, and asks its client for the cells; -> LeaseReleased.
struct CloseAndRevoke {
  LeaseId lease;
  uint64_t generation = 0;
};
// Asks the client to let the lease's cells go; -> LeaseReleased.
struct RevokeLease {
  LeaseId lease;
  uint64_t generation = 0;
};
// Forgets the lease and tells its session, if that is still there.
struct EndLease {
  LeaseId lease;
  std::string reason;   // RELEASED, UNLOADED, SESSION_ENDED, or why it failed
  std::string message;  // empty where the reason says all
};
// -> TimerFired, unless the timer is set again or cleared first (`at` infinite).
struct SetTimer {
  TimerId timer;
  absl::Time at;
};

using Effect = std::variant<Reply, BuildMirrors, CancelMirrors, JoinMirrors, DropModel, MeasureDevice, RealizePlan,
                            CancelRealize, VerifyCells, TrimPool, GrantLease, SendCells, CloseUseWords, ReopenUseWords,
                            CloseAndRevoke, RevokeLease, EndLease, SetTimer>;

}  // namespace residency

#endif  // RESIDENCY_DAEMON_EVENTS_H_

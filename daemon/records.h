// SPDX-License-Identifier: Apache-2.0
//
// What the decision core knows: models, leases, sessions and devices, as plain data in ordered maps, so that
// walking them gives the same order every time.
#ifndef RESIDENCY_DAEMON_RECORDS_H_
#define RESIDENCY_DAEMON_RECORDS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/events.h"
#include "daemon/host_room.h"
#include "daemon/ids.h"
#include "daemon/residency.h"
#include "mechanisms/layout.h"
#include "mechanisms/plan.h"
#include "mechanisms/refusal.h"

namespace residency {

enum class LeaseState : uint8_t {
  kFilling,       // cells are sent to the client as they are filled; it uses none before all of them are
  kGranting,      // cells are on their way to the client
  kLive,          // mapped, and open for use
  kRevoking,      // asked to let its cells go
  kReleasing,     // lets them go one after the other
  kRevoked,       // holds no cell; the next generation brings them back
  kUnresponsive,  // hung up, but its process lives and may have cells mapped
};

struct LeaseRecord {
  LeaseId id;
  SessionId session;
  ModelId model;
  LeaseState state = LeaseState::kRevoked;
  uint64_t generation = 0;  // of the cells it got last
  uint64_t working_bytes = 0;
  absl::Time since;
  RequestId release;  // its client wants it to end, and waits for that
  // It is to end all the same: made for an activation that came to nothing, so that nobody knows of it, or failed here.
  bool unclaimed = false;
  absl::Status failure;  // why, in the latter case
  PhaseId phase;         // of a phased model: it is in the phase of the component that is on the GPU

  // Whether it is to end once it holds no cells.
  bool ending() const { return release || unclaimed; }
  // Whether its process may have cells mapped.
  bool holds_cells() const { return state != LeaseState::kRevoked; }
};

struct SessionRecord {
  SessionId id;
  int64_t pid = 0;
  uint32_t uid = 0;
  std::string client;
  bool hung_up = false;
};

struct ActivationRecord {
  uint64_t bytes = 0;
  absl::Duration duration;
  uint64_t verified_cells = 0;
  uint64_t trusted_cells = 0;
};

struct ModelRecord {
  ModelId id;
  std::string name;
  std::string identity;
  DeviceId device;
  Budget budget;
  Layout layout;  // without tensors
  ModelMode mode = ModelMode::kHeld;
  ModelState state = ModelState::kRegistering;
  bool reading = true;        // its host copy is not complete; also where it is being activated already
  bool nearly_built = false;  // it may be activated while that is read
  absl::Status failed;        // of the reading of one that was nearly built: it is dropped, and then that is told
  uint64_t generation = 0;
  uint64_t claimed_device_bytes = 0;           // promised; what is there is measured elsewhere
  uint64_t device_bytes = 0;                   // as measured after the last transition
  std::optional<uint32_t> component_on_gpu;    // of a phased model
  std::optional<uint64_t> asked_device_bytes;  // the budget of the last activation that gave one
  HostTier tier = HostTier::kMirror;           // of its host copy
  HostCopyId host_copy;
  uint64_t host_bytes = 0;           // that its host copy takes, which other models may count too: HostBytes
  PinWish pin_wish = PinWish::kTry;  // for its host copy
  PinOutcome pin;                    // of its host copy, once that is built
  uint64_t pinned_bytes = 0;         // of its host copy, which other models may count too
  bool dropping = false;             // DropModel is under way, or sure to come
  bool unwanted = false;             // nobody waits for its registration any more: the core unloads it by itself
  std::vector<RegisterRequested> registrations_after;  // came while it was dropping, or its reading was given up
  absl::Time last_used;
  std::optional<ActivationRecord> last_activation;
  absl::Status last_error;
  std::vector<RequestId> registrations;  // requests that wait for the mirrors
  RequestId unload;                      // waits for the mirrors to be given up

  // Nobody waits for its reading any more, which was told to stop.
  bool given_up() const { return reading && registrations.empty(); }
  // Moves the state; a change that the table does not have is a fault of ours (CHECK).
  void Apply(ModelChange change);
};

struct DeviceRecord {
  DeviceId id;
  std::string uuid;
  uint64_t budget_bytes = 0;
  uint64_t reserve_bytes = 0;
  absl::Status usable;  // why no model can be active there, as probed at start
};

// NOT_FOUND/NO_SUCH_LEASE.
absl::Status LeaseIsOver(LeaseId lease);
// FAILED_PRECONDITION/BROKEN, with what broke `model`.
absl::Status IsBroken(const ModelRecord& model);

struct Records {
  std::map<ModelId, ModelRecord> models;
  std::map<LeaseId, LeaseRecord> leases;
  std::map<SessionId, SessionRecord> sessions;
  std::map<DeviceId, DeviceRecord> devices;
  // What the driver had page-locked when it last refused more; nothing where it has not, or has locked more since.
  std::optional<uint64_t> pin_limit_bytes;

  // Of all host copies, each counted once: promised, page-locked, and complete without being page-locked.
  uint64_t host_bytes() const;
  uint64_t pinned_bytes() const;
  uint64_t pageable_bytes() const;
  // Of host_bytes, what is or will be page cache of weight files; and of pinned_bytes.
  uint64_t file_bytes() const;
  uint64_t page_cache_bytes() const;

  ModelRecord* FindModel(std::string_view name);
  const ModelRecord* FindModel(std::string_view name) const;
  // As FindModel; NOT_FOUND/NO_SUCH_MODEL.
  absl::StatusOr<ModelRecord*> GetModel(std::string_view name);
  std::vector<LeaseRecord*> LeasesOf(ModelId model);
  // Whether the lease has no cells and should have: its model is active, and in a phase where it goes by phases.
  bool WantsCells(const LeaseRecord& lease) const;
  // Whether a lease other than `except` is in a phase of the model.
  bool IsInPhase(ModelId model, LeaseId except = {}) const;
  // The session's lease on the model; one that is being released does not count.
  LeaseRecord* FindLease(SessionId session, ModelId model);
  Holder HolderOf(const LeaseRecord& lease, absl::Time now) const;
  // FAILED_PRECONDITION/IN_USE that names the holders of `leases`.
  absl::Status InUse(std::string_view model, const std::vector<LeaseId>& leases, absl::Time now) const;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RECORDS_H_

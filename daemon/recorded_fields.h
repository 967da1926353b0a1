// SPDX-License-Identifier: Apache-2.0
//
// The fields of every struct that a recording holds, each in the order of the struct. A struct that gains a field no
// longer compiles here until the field is named (a structured binding names all or none), and an event or effect that
// is not listed no longer compiles where it is recorded. proto/recording.proto has a message of the same name for each,
// with fields of the same names. Pure; any thread.
#ifndef RESIDENCY_DAEMON_RECORDED_FIELDS_H_
#define RESIDENCY_DAEMON_RECORDED_FIELDS_H_

#include <tuple>

#include "daemon/arbiter.h"
#include "daemon/events.h"

namespace residency {

template <typename T>
struct Recorded;

// A macro, as only the preprocessor has the names both as names and as text.
#define RESIDENCY_RECORDED(type, ...)               \
  template <>                                       \
  struct Recorded<type> {                           \
    static constexpr char kMessage[] = #type;       \
    static constexpr char kFields[] = #__VA_ARGS__; \
    template <typename Value>                       \
    static auto Fields(Value& value) {              \
      auto& [__VA_ARGS__] = value;                  \
      return std::tie(__VA_ARGS__);                 \
    }                                               \
  }

RESIDENCY_RECORDED(ArbiterOptions, devices, host_budget_bytes, pool_idle);
RESIDENCY_RECORDED(DeviceRecord, id, uuid, budget_bytes, reserve_bytes, usable);
RESIDENCY_RECORDED(Budget, device_bytes, host_bytes);

RESIDENCY_RECORDED(HostRoom, available_bytes, cgroup_limit_bytes);
RESIDENCY_RECORDED(PinOutcome, pinned, reason, message);

RESIDENCY_RECORDED(RegisterRequested, request, name, identity, device, budget, layout, mode, pin, host, tier,
                   file_bytes);
RESIDENCY_RECORDED(UnloadRequested, request, name);
RESIDENCY_RECORDED(ActivateRequested, request, name, budget, session, working_bytes, deadline, skip_verification);
RESIDENCY_RECORDED(DeactivateRequested, request, name, drain);
RESIDENCY_RECORDED(VerifyRequested, request, name);
RESIDENCY_RECORDED(ReleaseLeaseRequested, request, session, lease);
RESIDENCY_RECORDED(BeginPhaseRequested, request, session, lease, component, deadline);
RESIDENCY_RECORDED(EndPhaseRequested, request, session, lease, phase);
RESIDENCY_RECORDED(TrimRequested, request, device);
RESIDENCY_RECORDED(RequestCancelled, request);
RESIDENCY_RECORDED(MirrorsNearlyBuilt, model);
RESIDENCY_RECORDED(MirrorsBuilt, model, status, pinned_bytes, pin_refusal, pin_limit_bytes);
RESIDENCY_RECORDED(DeviceMeasured, device, status, total_bytes, free_bytes, pool_idle_bytes, broker_bytes,
                   leases_in_use);
RESIDENCY_RECORDED(PlanRealized, model, status, broken, device_bytes, copied_bytes, verified_cells, refilled_cells,
                   unmapped_bytes, pooled_bytes, freed_bytes, copied_to_host_bytes, duration, givers, trusted_cells);
RESIDENCY_RECORDED(GiverEmptied, model, status, broken, device_bytes, kept);
RESIDENCY_RECORDED(CellsVerified, model, status, broken, verified_cells, refilled_cells, absent_cells, duration);
RESIDENCY_RECORDED(PoolTrimmed, device, status, trimmed_bytes, freed_bytes);
RESIDENCY_RECORDED(ModelDropped, model, host_bytes, device_bytes);
RESIDENCY_RECORDED(UseWordsClosed, model, in_use);
RESIDENCY_RECORDED(UseWordsReopened, model, taken);
RESIDENCY_RECORDED(TimerFired, timer);
RESIDENCY_RECORDED(SessionOpened, session, pid, uid, client);
RESIDENCY_RECORDED(SessionHungUp, session);
RESIDENCY_RECORDED(SessionEnded, session);
RESIDENCY_RECORDED(LeaseMapped, lease, generation);
RESIDENCY_RECORDED(LeaseReleasing, lease, generation);
RESIDENCY_RECORDED(LeaseReleased, lease, generation);
RESIDENCY_RECORDED(LeaseFailed, lease, status, by_client);

RESIDENCY_RECORDED(RegisterOutcome, model, pinned_bytes, pin);
RESIDENCY_RECORDED(UnloadOutcome, host_bytes, device_bytes);
RESIDENCY_RECORDED(ActivateOutcome, model, lease, generation, bytes_moved, duration, verified_cells, refilled_cells,
                   device_bytes, evicted, trusted_cells);
RESIDENCY_RECORDED(DeactivateOutcome, pooled_bytes, freed_bytes, copied_bytes, duration);
RESIDENCY_RECORDED(PhaseOutcome, phase, generation, bytes_moved, duration, verified_cells, refilled_cells,
                   device_bytes);
RESIDENCY_RECORDED(VerifyOutcome, verified_cells, refilled_cells, absent_cells, duration);
RESIDENCY_RECORDED(TrimOutcome, trimmed_bytes, freed_bytes);

RESIDENCY_RECORDED(Reply, request, status, outcome);
RESIDENCY_RECORDED(BuildMirrors, model, request, copy, pin, tier);
RESIDENCY_RECORDED(CancelMirrors, model);
RESIDENCY_RECORDED(JoinMirrors, model, request);
RESIDENCY_RECORDED(DropModel, model);
RESIDENCY_RECORDED(MeasureDevice, device);
RESIDENCY_RECORDED(CellReader, lease, generation);
RESIDENCY_RECORDED(RealizePlan, model, plan, givers, skip_verification, readers);
RESIDENCY_RECORDED(CancelRealize, model);
RESIDENCY_RECORDED(VerifyCells, model);
RESIDENCY_RECORDED(TrimPool, device, report);
RESIDENCY_RECORDED(GrantLease, lease, session, model);
RESIDENCY_RECORDED(SendCells, lease, generation);
RESIDENCY_RECORDED(CloseUseWords, model, leases, only_if_idle);
RESIDENCY_RECORDED(ReopenUseWords, model, leases);
RESIDENCY_RECORDED(CloseAndRevoke, lease, generation);
RESIDENCY_RECORDED(RevokeLease, lease, generation);
RESIDENCY_RECORDED(EndLease, lease, reason, message);
RESIDENCY_RECORDED(SetTimer, timer, at);

#undef RESIDENCY_RECORDED

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RECORDED_FIELDS_H_

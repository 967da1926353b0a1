// SPDX-License-Identifier: Apache-2.0
//
// What `register --dry_run` answers: the set in host memory, what fits on the device, and the flags that follow. Pure.
#ifndef RESIDENCY_DAEMON_DRY_RUN_H_
#define RESIDENCY_DAEMON_DRY_RUN_H_

#include "daemon/events.h"
#include "daemon/host_room.h"
#include "daemon/records.h"
#include "daemon/scheduler.h"
#include "proto/residency.pb.h"

namespace residency {

// `plan` is the core's for `event`; `room` is the device's as measured, as if the models that nobody uses had gone.
v1::DryRun DryRunOf(const RegisterRequested& event, const HostPlan& plan, const DeviceRecord& device,
                    const DeviceRoom& room);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_DRY_RUN_H_

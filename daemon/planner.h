// SPDX-License-Identifier: Apache-2.0
//
// What a model needs of a device, and what lies there when it is active. Pure.
#ifndef RESIDENCY_DAEMON_PLANNER_H_
#define RESIDENCY_DAEMON_PLANNER_H_

#include <string_view>

#include "absl/status/status.h"
#include "daemon/residency.h"
#include "mechanisms/layout.h"
#include "mechanisms/plan.h"

namespace residency {

// What a model claims of its device while it is active: a held one all of its cells, a phased one those of its largest
// component, because each phase takes the place of the one before.
uint64_t ClaimedBytes(const Layout& layout, ModelMode mode);

// RESOURCE_EXHAUSTED/GPU_BUDGET with both figures where the budget's device_bytes is less than ClaimedBytes. `model` is
// named in the message.
absl::Status CheckBudget(std::string_view model, const Layout& layout, ModelMode mode, const Budget& budget);

// What is on the device once the model has become active: of a phased one nothing yet.
Plan ActivationPlan(const Layout& layout, ModelMode mode);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_PLANNER_H_

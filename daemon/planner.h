// SPDX-License-Identifier: Apache-2.0
//
// Turns a budget into a plan. Pure.
#ifndef RESIDENCY_DAEMON_PLANNER_H_
#define RESIDENCY_DAEMON_PLANNER_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "mechanisms/layout.h"
#include "mechanisms/plan.h"

namespace residency {

// The plan of a held model: every cell resident. RESOURCE_EXHAUSTED/GPU_BUDGET with both figures where
// the budget's device_bytes is less than that costs. `model` is named in the message.
absl::StatusOr<Plan> PlanHeld(std::string_view model, const Layout& layout, const Budget& budget);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_PLANNER_H_

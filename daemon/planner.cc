// SPDX-License-Identifier: Apache-2.0
#include "daemon/planner.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {

absl::StatusOr<Plan> PlanHeld(std::string_view model, const Layout& layout, const Budget& budget) {
  Plan plan = AllResident(layout);
  const uint64_t needed_bytes = Price(layout, plan);
  if (budget.device_bytes.has_value() && *budget.device_bytes < needed_bytes) {
    return Refuse(absl::StatusCode::kResourceExhausted,
                  Refusal{.reason = "GPU_BUDGET", .needed_bytes = needed_bytes, .available_bytes = budget.device_bytes},
                  absl::StrCat(std::string(model), " needs ", needed_bytes, " bytes on the GPU; its budget is ",
                               *budget.device_bytes));
  }
  return plan;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/planner.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {

uint64_t ClaimedBytes(const Layout& layout, ModelMode mode) {
  if (mode == ModelMode::kHeld) return Price(layout, AllResident(layout));
  uint64_t largest_bytes = 0;
  for (uint32_t component = 0; component < layout.components.size(); ++component) {
    largest_bytes = std::max(largest_bytes, Price(layout, ComponentResident(layout, component)));
  }
  return largest_bytes;
}

absl::Status CheckBudget(std::string_view model, const Layout& layout, ModelMode mode, const Budget& budget) {
  const uint64_t needed_bytes = ClaimedBytes(layout, mode);
  if (!budget.device_bytes.has_value() || *budget.device_bytes >= needed_bytes) return absl::OkStatus();
  return Refuse(absl::StatusCode::kResourceExhausted,
                Refusal{.reason = "GPU_BUDGET", .needed_bytes = needed_bytes, .available_bytes = budget.device_bytes},
                absl::StrCat(std::string(model), " needs ", needed_bytes, " bytes on the GPU; its budget is ",
                             *budget.device_bytes));
}

Plan ActivationPlan(const Layout& layout, ModelMode mode) {
  return mode == ModelMode::kPhased ? NoneResident(layout) : AllResident(layout);
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/host_room.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "daemon/events.h"
#include "daemon/records.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// Whether a registration of this tier and with this policy may use the copy of `model`.
bool MayShare(const ModelRecord& model, HostTier tier, PinPolicy policy) {
  if (model.tier != tier) return false;
  if (model.reading) {
    // Somebody must still want it, and it must not fail for a choice that is not ours.
    if (model.registrations.empty() || model.unload) return false;
    // There is but one kind of locked files.
    if (tier == HostTier::kFile) return true;
    if (policy == PinPolicy::kAuto) return model.pin_wish != PinWish::kMust;
    return model.pin_wish == (policy == PinPolicy::kYes ? PinWish::kMust : PinWish::kNo);
  }
  return !model.dropping && model.failed.ok() &&
         (policy == PinPolicy::kAuto || model.pin.pinned == (policy == PinPolicy::kYes));
}

// What the host leaves to another copy: less than the system says by the pages of weight files, which are locked, or
// are about to be and then as lost as memory that a mirror will yet take.
std::optional<uint64_t> AvailableBytes(const HostRoom& room, const Records& records) {
  if (!room.available_bytes.has_value()) return std::nullopt;
  return SaturatingSubtract(*room.available_bytes, records.file_bytes());
}

void DecidePin(const RegisterRequested& event, std::optional<uint64_t> available_bytes, HostPlan& plan) {
  const uint64_t set_bytes = HostBytes(event);
  plan.little_room = available_bytes.has_value() && *available_bytes / 2 < set_bytes;
  if (event.tier == HostTier::kFile) {
    plan.wish = PinWish::kMust;
    plan.pin = {true, PinReason::kHostTier,
                "page-locked where they lie: the host tier file is the page cache of the weight files, no second copy"};
  } else if (event.pin != PinPolicy::kAuto) {
    const bool pinned = event.pin == PinPolicy::kYes;
    plan.wish = pinned ? PinWish::kMust : PinWish::kNo;
    plan.pin = {pinned, PinReason::kRequested, absl::StrCat(pinned ? "page-locked" : "pageable", ", as was asked for")};
  } else if (!plan.little_room) {
    plan.wish = PinWish::kTry;
    plan.pin = {true, PinReason::kRoom,
                available_bytes.has_value() ? absl::StrCat("page-locked: the host has ", *available_bytes,
                                                           " bytes, at least twice the ", set_bytes, " of the set")
                                            : std::string("page-locked: nothing is known to limit the host's memory")};
  } else {
    plan.wish = PinWish::kNo;
    plan.pin = {false, PinReason::kLittleRoom,
                absl::StrCat("pageable: the host has ", *available_bytes, " bytes, less than twice the ", set_bytes,
                             " of the set")};
  }
}

}  // namespace

std::string_view HostTierName(HostTier tier) { return tier == HostTier::kFile ? "file" : "mirror"; }

uint64_t HostBytes(const RegisterRequested& event) {
  return event.tier == HostTier::kFile ? event.file_bytes : event.layout.span_bytes;
}

absl::Status CheckTier(const RegisterRequested& event) {
  if (event.tier != HostTier::kFile) return absl::OkStatus();
  if (event.mode != ModelMode::kHeld) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_HOST_TIER",
                  absl::StrCat(event.name, " is to be phased, and the host tier file is for models that are held"));
  }
  if (event.pin == PinPolicy::kNo) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_PIN",
                  absl::StrCat(event.name,
                               " is not to be page-locked, and the host tier file is nothing else than its "
                               "files' pages, locked"));
  }
  return absl::OkStatus();
}

std::optional<uint64_t> HostBudgetBytes(const HostRoom& room, const Records& records,
                                        std::optional<uint64_t> configured_bytes) {
  const uint64_t held_bytes = records.host_bytes();
  const std::optional<uint64_t> available_bytes = AvailableBytes(room, records);
  uint64_t budget_bytes = std::min(configured_bytes.value_or(kNoLimit), room.cgroup_limit_bytes.value_or(kNoLimit));
  if (available_bytes.has_value() && *available_bytes < kNoLimit - held_bytes) {
    budget_bytes = std::min(budget_bytes, held_bytes + *available_bytes);
  }
  return budget_bytes == kNoLimit ? std::nullopt : std::optional<uint64_t>(budget_bytes);
}

HostPlan PlanHost(const RegisterRequested& event, const Records& records, std::optional<uint64_t> configured_bytes) {
  HostPlan plan;
  const uint64_t set_bytes = HostBytes(event);
  plan.needed_bytes = set_bytes;
  for (const auto& [id, model] : records.models) {
    if (model.identity != event.identity || !MayShare(model, event.tier, event.pin)) continue;
    plan.copy = model.host_copy;
    plan.wish = model.pin_wish;
    // While it is being read, its own outcome is not known yet.
    plan.pin = {model.pin.pinned, PinReason::kShared, absl::StrCat("it is the host copy of ", model.name)};
    plan.needed_bytes = 0;
    break;
  }
  const std::optional<uint64_t> host_available_bytes = AvailableBytes(event.host, records);
  if (!plan.copy) DecidePin(event, host_available_bytes, plan);

  const uint64_t held_bytes = records.host_bytes();
  const std::optional<uint64_t> budget_bytes = HostBudgetBytes(event.host, records, configured_bytes);
  if (budget_bytes.has_value()) plan.available_bytes = SaturatingSubtract(*budget_bytes, held_bytes);
  // What the caller grants the model counts whether or not the bytes are there already.
  if (event.budget.host_bytes.value_or(kNoLimit) < set_bytes) {
    plan.needed_bytes = set_bytes;
    plan.available_bytes = std::min(plan.available_bytes.value_or(kNoLimit), *event.budget.host_bytes);
  }
  if (plan.needed_bytes <= plan.available_bytes.value_or(kNoLimit)) return plan;
  std::string limits;
  const auto add = [&limits](const char* what, const std::optional<uint64_t>& bytes) {
    if (bytes.has_value()) absl::StrAppend(&limits, "; ", what, " ", *bytes);
  };
  add("--host_budget", configured_bytes);
  add("the cgroup leaves mirrors", event.host.cgroup_limit_bytes);
  add("host and cgroup have", host_available_bytes);
  add("the model's own budget", event.budget.host_bytes);
  plan.room = Refuse(
      absl::StatusCode::kResourceExhausted,
      Refusal{.reason = "HOST_BUDGET", .needed_bytes = plan.needed_bytes, .available_bytes = plan.available_bytes},
      absl::StrCat(event.name, " needs ", plan.needed_bytes, " bytes of host memory; ", *plan.available_bytes,
                   " available (mirrors hold ", held_bytes, limits, ")"));
  return plan;
}

}  // namespace residency

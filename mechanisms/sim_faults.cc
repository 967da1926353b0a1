// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_faults.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "mechanisms/driver.h"
#include "mechanisms/refusal.h"
#include "mechanisms/sim_errors.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

#define RESIDENCY_CALL_NAME(name) #name,
constexpr std::string_view kCalls[] = {RESIDENCY_DRIVER_CALLS(RESIDENCY_CALL_NAME)};
#undef RESIDENCY_CALL_NAME

constexpr std::string_view kAttributes[] = {"VMM", "POSIX_FD", "HOST_REGISTER", "READONLY_PIN", "NVML"};

// Abseil may have been built with a string_view of its own.
absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

absl::Status BadFaults(std::string_view item, absl::string_view what) {
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_FAULTS", absl::StrCat("fault \"", View(item), "\": ", what));
}

}  // namespace

absl::StatusOr<std::unique_ptr<FaultPlan>> FaultPlan::Parse(std::string_view spec) {
  std::unique_ptr<FaultPlan> plan(new FaultPlan);
  if (absl::StripAsciiWhitespace(View(spec)).empty()) return plan;
  for (absl::string_view text : absl::StrSplit(View(spec), ',')) {
    const absl::string_view item = absl::StripAsciiWhitespace(text);
    if (absl::Status status = plan->AddItem({item.data(), item.size()}); !status.ok()) return status;
  }
  return plan;
}

absl::Status FaultPlan::AddItem(std::string_view item) {
  const size_t equals = item.find('=');
  if (equals == std::string_view::npos) return BadFaults(item, "has no '='");
  const std::string_view target = item.substr(0, equals);
  const std::string_view value = item.substr(equals + 1);
  if (target.substr(0, 5) == "attr:") return AddAttribute(item, target.substr(5), value);
  if (target == "pin_limit") {
    absl::StatusOr<uint64_t> bytes = ParseBytes(value);
    if (!bytes.ok()) return BadFaults(item, bytes.status().message());
    pin_limit_bytes_ = *bytes;
    return absl::OkStatus();
  }
  return AddRule(item, target, value);
}

absl::Status FaultPlan::AddAttribute(std::string_view item, std::string_view name, std::string_view value) {
  if (std::find(std::begin(kAttributes), std::end(kAttributes), name) == std::end(kAttributes)) {
    return BadFaults(item, absl::StrCat("unknown attribute \"", View(name),
                                        "\"; known are VMM, POSIX_FD, HOST_REGISTER, READONLY_PIN and NVML"));
  }
  if (value != "0" && value != "1") return BadFaults(item, "an attribute is 0 or 1");
  attributes_[std::string(name)] = value == "1" ? 1 : 0;
  return absl::OkStatus();
}

absl::Status FaultPlan::AddRule(std::string_view item, std::string_view target, std::string_view effect) {
  Rule rule;
  const size_t mark = target.find_first_of("@<");
  const std::string_view call = target.substr(0, mark);
  if (std::find(std::begin(kCalls), std::end(kCalls), call) == std::end(kCalls)) {
    return BadFaults(item, absl::StrCat("the driver table has no function \"", View(call), "\""));
  }
  if (mark != std::string_view::npos) {
    const std::string_view when = target.substr(mark + 1);
    if (target[mark] == '@') {
      uint64_t call_number = 0;
      if (!absl::SimpleAtoi(View(when), &call_number) || call_number == 0) {
        return BadFaults(item, absl::StrCat("\"", View(when), "\" is no number of a call, which count from 1"));
      }
      rule.only_call = call_number;
    } else {
      absl::StatusOr<absl::Duration> first = ParseDuration(when);
      if (!first.ok()) return BadFaults(item, first.status().message());
      rule.only_first = *first;
    }
  }
  if (effect.substr(0, 1) == "+") {
    absl::StatusOr<absl::Duration> delay = ParseDuration(effect.substr(1));
    if (!delay.ok()) return BadFaults(item, delay.status().message());
    rule.fault.delay = *delay;
  } else {
    const std::optional<CUresult> error = SimErrorFromSuffix(effect);
    if (!error) return BadFaults(item, absl::StrCat("there is no CUDA_ERROR_", View(effect)));
    rule.fault.error = *error;
  }
  calls_[std::string(call)].rules.push_back(rule);
  return absl::OkStatus();
}

CallFault FaultPlan::OnCall(std::string_view call, absl::Duration since_open) {
  CallFault result;
  const auto found = calls_.find(call);
  if (found == calls_.end()) return result;  // A function without rules needs no count.
  const uint64_t number = found->second.calls.fetch_add(1, std::memory_order_relaxed) + 1;
  for (const Rule& rule : found->second.rules) {
    if (rule.only_call && *rule.only_call != number) continue;
    if (rule.only_first && since_open >= *rule.only_first) continue;
    if (result.error == CUDA_SUCCESS) result.error = rule.fault.error;
    result.delay += rule.fault.delay;
  }
  return result;
}

std::optional<int> FaultPlan::Attribute(std::string_view name) const {
  const auto found = attributes_.find(name);
  if (found == attributes_.end()) return std::nullopt;
  return found->second;
}

}  // namespace residency

// SPDX-License-Identifier: Apache-2.0
#include "daemon/residency.h"

namespace residency {

std::optional<ModelState> NextState(ModelState state, ModelChange change) {
  using S = ModelState;
  using C = ModelChange;
  switch (state) {
    case S::kRegistering:
      if (change == C::kRegistered) return S::kInactive;
      if (change == C::kActivationBegan) return S::kActivating;
      if (change == C::kRegistrationFailed || change == C::kUnloaded) return S::kUnloaded;
      return std::nullopt;
    case S::kInactive:
      if (change == C::kActivationBegan) return S::kActivating;
      if (change == C::kUnloaded) return S::kUnloaded;
      return std::nullopt;
    case S::kActivating:
      if (change == C::kActivated) return S::kActive;
      if (change == C::kActivationUndone) return S::kInactive;
      if (change == C::kEarlyActivationUndone) return S::kRegistering;
      if (change == C::kBroke) return S::kBroken;
      return std::nullopt;
    case S::kActive:
      if (change == C::kDeactivationBegan) return S::kDeactivating;
      if (change == C::kBroke) return S::kBroken;
      return std::nullopt;
    case S::kDeactivating:
      if (change == C::kDeactivated) return S::kInactive;
      if (change == C::kDeactivationUndone) return S::kActive;
      if (change == C::kBroke) return S::kBroken;
      return std::nullopt;
    case S::kBroken:
      if (change == C::kUnloaded) return S::kUnloaded;
      return std::nullopt;
    case S::kUnloaded:
      return std::nullopt;
  }
  return std::nullopt;
}

std::string_view ModelStateName(ModelState state) {
  constexpr std::string_view kNames[kModelStateCount] = {"registering",  "inactive", "activating", "active",
                                                         "deactivating", "broken",   "unloaded"};
  return kNames[static_cast<int>(state)];
}

std::string_view ModelModeName(ModelMode mode) { return mode == ModelMode::kPhased ? "phased" : "held"; }

}  // namespace residency

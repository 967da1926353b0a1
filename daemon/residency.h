// SPDX-License-Identifier: Apache-2.0
//
// The states of a model and the table of what leads from one to another, and the ways to be active. Pure.
#ifndef RESIDENCY_DAEMON_RESIDENCY_H_
#define RESIDENCY_DAEMON_RESIDENCY_H_

#include <cstdint>
#include <optional>
#include <string_view>

namespace residency {

enum class ModelState : uint8_t {
  kRegistering,   // its bytes are being read into host memory
  kInactive,      // page-locked in host memory, nothing on the GPU
  kActivating,    // cells are being mapped and filled, perhaps while the last bytes are being read
  kActive,        // on the GPU and verified
  kDeactivating,  // its leases are being asked back, or its cells unmapped
  kBroken,        // a failed transition could not be undone: only status, verify and unload
  kUnloaded,      // the end
};
inline constexpr int kModelStateCount = 7;

enum class ModelChange : uint8_t {
  kRegistered,
  kRegistrationFailed,
  kActivationBegan,
  kActivated,
  kActivationUndone,       // it failed, and nothing is on the GPU
  kEarlyActivationUndone,  // the same, while its bytes are still being read
  kDeactivationBegan,
  kDeactivated,
  kDeactivationUndone,  // given up or failed, and everything is on the GPU
  kBroke,               // failed, and what is on the GPU is not known to be right
  kUnloaded,
};
inline constexpr int kModelChangeCount = 11;

// How a model is active. Stated at registration, never inferred.
enum class ModelMode : uint8_t {
  kHeld,    // all of it is on the GPU
  kPhased,  // one component at a time is, for as long as a lease is in its phase
};

// The state that `change` leads to, or nothing where it cannot happen in `state`.
std::optional<ModelState> NextState(ModelState state, ModelChange change);

// As status shows it: "registering", "inactive", ...
std::string_view ModelStateName(ModelState state);

// "held", "phased".
std::string_view ModelModeName(ModelMode mode);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RESIDENCY_H_
